"""exact/ and exact_attention.py: the same bits at every DCP size, from one leaf to the logits of a trained model.

Two-sided: what the ordinary mode does at each place (a flat merge, its own prefix cache, its own combine) is put in and
fails the same comparison.
"""

import doctest
import re
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_fix import combine, exact, workspace
from dcp_fix.attention import sparse_partial_reference
from dcp_fix.base.equality import close, same_bytes
from dcp_fix.base.errors import UserError
from dcp_fix.engine import exact_attention, sharded
from dcp_fix.engine.config import Config
from dcp_fix.engine.engine import Engine
from dcp_fix.engine.exact_attention import ExactAttention, ExactManager, RunPool
from dcp_fix.engine.model import Model
from dcp_fix.kv_cache import new_latent_cache, write_latent
from dcp_fix.learn import exact_compare
from dcp_fix.ownership import class_of, global_position, local_class, local_length, localise, owner
from dcp_fix.ranks import launch
from dcp_fix.ranks.group import LocalGroup
from dcp_fix.tiny import corpus
from dcp_fix.verify import verify
from tests.checkpoints import random_checkpoint, random_tokens
from tests.exact.near_tie import near_tie
from tests.processes import run_ranks

TP, CLASSES, SCALE = 8, 8, 0.07
SIZES = (1, 2, 4, 8)
NAN = float("nan")
many = partial(
    settings, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)  # the same examples on every run


# --- attention --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One sparse attention: T tokens, h heads a rank, K ids of N positions, of which a share is a hole."""

    seed: int
    tokens: int
    heads: int
    length: int
    topk: int
    interleave: int
    holes: float
    rank: int  # of TP ranks, the one whose heads are looked at
    cache_format: str | None

    def inputs(self):
        """q [T, 8 h, 576], rows [N, 576] with NaN where no token looks, ids [T, K]."""
        random = torch.Generator().manual_seed(self.seed)
        q = torch.randn(self.tokens, TP * self.heads, 576, generator=random)
        rows = torch.randn(self.length, 576, generator=random)
        order = torch.rand(self.tokens, self.length, generator=random).argsort(1)[:, : self.topk]
        ids = order.masked_fill(torch.rand(order.shape, generator=random) < self.holes, -1)
        rows[~torch.isin(torch.arange(self.length), ids)] = NAN
        return q, rows, ids


CASES = st.builds(
    Case, seed=st.integers(0, 1 << 30), tokens=st.integers(1, 4), heads=st.integers(1, 3),
    length=st.integers(1, 400), topk=st.integers(1, 150), interleave=st.sampled_from([1, 2, 4, 16, 64]),
    holes=st.sampled_from([0.0, 0.3, 0.95]), rank=st.integers(0, TP - 1),
    cache_format=st.sampled_from([None, None, "fp8_ds_mla"]),
)  # fmt: skip


def shard(rows, size, rank, interleave, cache_format):
    """What one rank caches: a tensor and its format."""
    mine = global_position(torch.arange(local_length(len(rows), size, rank, interleave)), size, rank, interleave)
    if cache_format is None:
        return rows[mine] if len(mine) else torch.full((1, 576), NAN)
    cache = new_latent_cache(len(mine) // 64 + 1, cache_format).fill_(0x7F)
    write_latent(cache, rows[mine, :512].nan_to_num(1e9), rows[mine, 512:], torch.arange(len(mine)), cache_format)
    return cache


def nodes(case, size, chunk):
    """The node of each rank of the DCP group that `case.rank` is in: out [D, T, H, 512], lse [D, T, H]."""
    q, rows, ids = case.inputs()
    first = case.rank // size * size
    q = q[:, first * case.heads : (first + size) * case.heads]
    leaf_of = local_class(torch.arange(len(rows)), CLASSES, size, case.interleave).to(torch.int16)
    plan = workspace.Plan(case.tokens, case.heads * CLASSES, case.topk, 1, chunk, 1)
    parts = [
        exact.node_partial(
            q, shard(rows, size, rank, case.interleave, case.cache_format),
            localise(ids, size, rank, case.interleave), ids, leaf_of, CLASSES // size, case.heads, SCALE,
            case.cache_format, plan=plan,
        )
        for rank in range(size)
    ]  # fmt: skip
    return (torch.stack(column) for column in zip(*parts, strict=True))


def attention(case, size, chunk=1 << 20, merge=exact.merge_tree):
    """(out [T, h, 512], lse [T, h]) of the heads of `case.rank`, sharded over `size` ranks."""
    out, lse = merge(*nodes(case, size, chunk))
    mine = slice(case.rank % size * case.heads, (case.rank % size + 1) * case.heads)
    return out[:, mine], lse[:, mine]


def same(a, b):
    return all(same_bytes(x.contiguous(), y.contiguous()) for x, y in zip(a, b, strict=True))


@many()
@given(CASES, st.sampled_from(SIZES[1:]), st.integers(1, 4), st.integers(1, 4))
def test_the_same_bits_at_every_dcp_size(case, size, chunk, other_chunk):
    one, many = attention(case, 1, chunk), attention(case, size, other_chunk)
    assert not one[0].isnan().any() and not one[1].isnan().any()
    assert same(one, many)


FULL = Case(7, tokens=5, heads=2, length=700, topk=600, interleave=1, holes=0.1, rank=5, cache_format=None)


@pytest.mark.parametrize("interleave", [1, 4, 64])
@pytest.mark.parametrize("cache_format", [None, "fp8_ds_mla"])
def test_it_is_the_attention_of_the_reference(interleave, cache_format):
    case = replace(FULL, interleave=interleave, cache_format=cache_format)
    q, rows, ids = case.inputs()
    want = sparse_partial_reference(q[:, 10:12], shard(rows, 1, 0, 1, cache_format), ids, SCALE, cache_format)
    for size in SIZES:
        out, lse = attention(case, size)
        assert close(out, want[0], ulps=16, floor=1.0) and close(lse, want[1], ulps=4)


def test_a_flat_merge_of_the_ranks_fails_where_the_tree_passes():
    flat = [attention(FULL, size, merge=combine.merge_partials) for size in SIZES]
    assert not any(same(flat[0], other) for other in flat[2:])
    assert all(same(attention(FULL, 1), attention(FULL, size)) for size in SIZES)


def test_the_ordinary_combine_has_other_bits_at_every_size():
    q, rows, ids = FULL.inputs()
    ordinary = []
    for size in SIZES:
        slots = [torch.where(owner(ids, size) == rank, ids, -1) for rank in range(size)]
        parts = [sparse_partial_reference(q[:, 10:12], rows, s, SCALE) for s in slots]
        ordinary.append(combine.merge_partials(*(torch.stack(column) for column in zip(*parts, strict=True))))
    assert not any(same(ordinary[0], other) for other in ordinary[1:])
    assert all(close(ordinary[0][0], other[0], ulps=16, floor=1.0) for other in ordinary)


def test_a_class_or_a_token_without_a_key_is_neutral():
    case = replace(FULL, topk=3, holes=0.0)
    q, rows, ids = case.inputs()
    ids[1] = -1
    leaves, leaf_of = class_of(ids), class_of(torch.arange(len(rows))).to(torch.int16)
    out, lse = exact.leaf_partials(q, rows, ids, ids, leaf_of, 8, case.heads, SCALE)
    alone = [[leaf in leaves[token][ids[token] >= 0] for token in range(5)] for leaf in range(8)]
    assert torch.equal(lse > -torch.inf, torch.tensor(alone)[..., None].expand(8, 5, 16))
    assert out[lse == -torch.inf].eq(0).all() and not out.isnan().any()
    whole = exact.merge_tree(out, lse)
    assert (whole[1][1] == -torch.inf).all() and whole[0][1].eq(0).all() and (whole[1][0] > -torch.inf).all()
    assert [x.shape for x in exact.node_partial(q[:0], rows, ids[:0], ids[:0], leaf_of, 8, 2, SCALE)] == [
        (0, 16, 512),
        (0, 16),
    ]


# --- exchange ---------------------------------------------------------------------------------------------------------


def test_both_transports_bring_the_tree_over_local_groups():
    random = torch.Generator().manual_seed(0)
    out, lse = torch.randn(4, 3, 8, 512, generator=random), torch.randn(4, 3, 8, generator=random)
    lse[1, 0], lse[2, 1], lse[:, 2] = torch.inf, torch.inf, -torch.inf  # marks of kernels for "no key"
    out[1, 0], out[2, 1] = NAN, NAN
    want, _ = exact.merge_tree(out, combine.clean_lse(lse))
    for method in exact_attention.METHODS:
        rank = lambda group: ExactManager(group, method, 3).combine(out[group.rank], lse[group.rank], True)  # noqa: B023, E731
        assert same_bytes(torch.cat(LocalGroup.run(4, rank), 1), want)
    assert not want.isnan().any() and want[2].eq(0).all()


def test_the_lse_of_no_class_is_exchanged():
    """As many bytes as the ordinary combine, whatever C is."""
    sent = {}

    class Counting(LocalGroup):
        def all_to_all(self, x, out=None):
            sent.setdefault(self.rank, []).append(x.nbytes)
            return super().all_to_all(x, out)

    def rank(group):
        group.__class__ = Counting
        for combined in (combine.combine_a2a, exact.combine_exact):
            combined(torch.zeros(3, 8, 512), torch.zeros(3, 8), group)

    LocalGroup.run(4, rank)
    assert all(bytes[:2] == bytes[2:] == [3 * 8 * 512 * 4, 3 * 8 * 4] for bytes in sent.values())


# --- plan, pool and door ----------------------------------------------------------------------------------------------


def test_the_plan_splits_by_tokens_and_streams_within_the_budget():
    plan = partial(exact.plan, heads=16, topk=2048, classes=4, num_sms=132)
    assert [plan(tokens, budget_bytes=1 << 30).splits for tokens in (1, 40, 64, 8192)] == [8, 2, 2, 1]
    long = plan(8192, budget_bytes=1 << 30)
    assert long.bytes <= 1 << 30 and long.token_chunk == 4088 and len(long.chunks()) == 3
    assert plan(1, budget_bytes=3 * workspace.partial_bytes(64)).splits == 2
    with pytest.raises(workspace.WorkspaceError, match="one token of 16 heads in 4 classes needs .* raise the budget"):
        plan(1, budget_bytes=2 * workspace.partial_bytes(64) - 1)


requests = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=6)


def cached(pool, asked):
    """How many tokens each request of (first token, length) finds in the cache."""
    found = []
    for first, length in asked:
        tokens = [first] + [9] * (length - 1)
        table, hit = pool.open(tokens, length)
        assert len(set(table)) == len(table) and all(0 <= block < pool.num_blocks for block in table)
        pool.close(table, tokens)
        found.append(hit)
    return found


@many()
@given(requests)
def test_a_hit_is_the_same_at_every_dcp_size(asked):
    hits = [cached(RunPool(64 // size, 1, size, CLASSES // size), asked) for size in SIZES]
    assert all(hit == hits[0] for hit in hits)


def test_the_ordinary_pool_hits_by_dcp_size():
    asked = [(0, 21), (0, 21)]
    assert [cached(sharded.BlockPool(64 // size, 1, size), asked)[1] for size in SIZES] == [20, 20, 20, 16]


def test_the_pool_documents_itself():
    assert doctest.testmod(exact_attention).failed == 0


def test_sizes_that_are_no_nodes_of_the_tree_are_refused(model):
    for tp, options, message in (
        (8, {"dcp_size": 8, "classes": 4}, "DCP size of 8 does not divide the 4 canonical classes"),
        (2, {"dcp_size": 2, "classes": 6}, "6 canonical classes.*power of two"),
    ):
        with pytest.raises(Exception, match=message) as refused:
            LocalGroup.run(tp, lambda group: Engine(model, group, combine="exact", max_length=99, **options))  # noqa: B023
        assert isinstance(refused.value.__cause__, UserError)


# --- a whole model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def model(folder):
    model = Model.load(folder)
    return Model(replace(model.config, eos_token_id=-1), model.weights)


def answers(group, model, size, prompts, steps, **options):
    """(cached tokens, logits digests of every step, tokens) of each prompt on one engine."""
    if "dtype" in options:
        model = Model(model.config, {name: weight.to(options["dtype"]) for name, weight in model.weights.items()})
    engine = Engine(model, group, dcp_size=size, **{"combine": "exact", "stale": "noise"} | options)
    runs = [engine.generate(prompt, steps) for prompt in prompts]
    return [(run.cached, run.digests, run.tokens) for run in runs]


def at_every_size(model, prompts, steps=3, tp=TP, sizes=SIZES, **options):
    """The answers at every DCP size; asserts that the ranks agree."""
    by_size = {}
    for size in sizes:
        ranks = LocalGroup.run(tp, lambda group: answers(group, model, size, prompts, steps, **options))  # noqa: B023
        assert all(other == ranks[0] for other in ranks)
        by_size[size] = ranks[0]
    return by_size


def alike(by_size):
    first, *others = by_size.values()
    return all(other == first for other in others)


def test_logits_of_the_trained_checkpoint():
    """Dense and sparse prefill, decode, and a sparse prompt of which 512 tokens are cached."""
    model = Model.load(corpus.CHECKPOINT)
    short, long = corpus.prompt(Random("short"), 120, 3), corpus.prompt(Random("long"), 560, 6)
    by_size = at_every_size(model, [short.ids, long.ids[:520], long.ids], sizes=(1, 8), max_length=580)
    assert alike(by_size)
    assert [run[0] for run in by_size[1]] == [0, 0, 512]
    assert by_size[1][0][2] == short.answer[:3] and by_size[1][2][2] == long.answer[:3]


def test_dense_prefill_over_a_cached_context():
    """Four classes: a hit of 256 tokens, short enough for dense prefill, whose context is gathered from its owners."""
    model = Model.load(corpus.CHECKPOINT)
    prompt = corpus.prompt(Random("cached"), 300, 6).ids
    by_size = at_every_size(model, [prompt[:260], prompt], tp=4, sizes=(1, 2, 4), max_length=320, classes=4)
    assert alike(by_size) and [run[0] for run in by_size[1]] == [0, 256]


PROMPTS = [random_tokens(count, seed=count) for count in (30, 150)]  # index_topk is 64


@pytest.mark.parametrize(
    "options",
    [
        {"interleave": 4, "cache_format": "bf16"},
        {"interleave": 64, "combine": "exact_ag_rs", "max_batch_tokens": 70},
        {"interleave": 1, "dtype": torch.bfloat16, "cache_format": "fp8"},
        {"interleave": 2, "static_decode": True, "workspace_budget": 40 * workspace.partial_bytes(CLASSES)},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_logits_for_interleaves_formats_types_chunks_and_transports(model, options):
    assert alike(at_every_size(model, PROMPTS, sizes=(1, 8), max_length=200, **options))


def test_bits_depend_neither_on_the_transport_nor_on_the_budget(model):
    run = partial(at_every_size, model, PROMPTS[1:], tp=2, sizes=(2,), max_length=200)
    assert run() == run(combine="exact_ag_rs") == run(workspace_budget=4 * workspace.partial_bytes(4 * CLASSES))


def test_processes_have_the_bits_of_threads(model, folder):
    threads = at_every_size(model, PROMPTS[1:], tp=4, sizes=(1,), max_length=200)
    processes = run_ranks(4, in_process, folder, 4)
    assert [rank.error for rank in processes] == [None] * 4
    assert all(rank.value == threads[1] for rank in processes)


def in_process(group, folder, size):
    model = Model.load(folder)
    model = Model(replace(model.config, eos_token_id=-1), model.weights)
    return answers(group, model, size, PROMPTS[1:], 3, max_length=200)


# --- defects put back -------------------------------------------------------------------------------------------------


def test_the_ordinary_combine_differs_end_to_end(model):
    assert not alike(at_every_size(model, PROMPTS[1:], sizes=(1, 8), max_length=200, combine="a2a"))


def test_the_ordinary_prefix_cache_would_show(model, monkeypatch):
    """Another number of cached tokens is another shape of every projection."""
    run = partial(at_every_size, model, [random_tokens(193, seed=1)] * 2, tp=4, sizes=(1, 4), max_length=320, classes=4)
    assert alike(run())
    ordinary = staticmethod(lambda length, size, classes: sharded.ShardedAttention.pool(length, size))
    monkeypatch.setattr(ExactAttention, "pool", ordinary)
    (_, one), (_, four) = run().values()
    assert (one[0], four[0]) == (192, 0) and one[1] != four[1]


# --- how much it matters ----------------------------------------------------------------------------------------------


def test_the_difference_in_numbers_and_a_token_that_flips(model):
    """The ordinary combine: nearly every logit has other bits, and on a near tie another token is chosen."""
    prompt = PROMPTS[1]
    answer = exact_compare.answer
    ordinary = [answer(model, prompt, 4, TP, size, "a2a") for size in (1, 8)]
    apart = exact_compare.bits("a2a", 8, *reversed(ordinary)).ulps
    assert (apart > 0).float().mean() > 0.5 and apart.max() > 1
    tied, step = near_tie(model, *ordinary)
    for method, parted in (("a2a", step), ("exact", None)):
        runs = [answer(tied, prompt, step + 1, TP, size, method) for size in (8, 1)]
        assert exact_compare.bits(method, 8, *runs).first_token == parted
        assert (runs[0].digests == runs[1].digests) is (method == "exact")


def test_only_equal_bits_are_no_distance_apart():
    nan, one = float("nan"), 1.0 + 2**-23
    a, b = torch.tensor([1.0, 1.0, 0.0, nan, nan, 1.0]), torch.tensor([1.0, one, -0.0, nan, 1.0, nan])
    got = exact_compare.ulps_of(a, b)
    assert got[:2].tolist() == [0.0, 1.0] and 0 < got[2] < 1e-30
    assert got[3:].tolist() == [0.0, float("inf"), float("inf")]


@pytest.mark.parametrize("length", [1, 64, 700, 8192])
def test_plans_and_pools_do_not_know_the_dcp_size(length):
    """A GPU splits as the plan says, and evictions come when the pool is full: both would show in the bits."""
    config = Config.from_json(corpus.CHECKPOINT / "config.json")
    pools = {ExactAttention.pool(length, size, CLASSES).num_blocks * size for size in SIZES}
    assert len(pools) == 1
    asked = []
    for size in SIZES:
        attention = ExactAttention.__new__(ExactAttention)
        attention.heads, attention.classes, attention.config = 2, CLASSES, config
        attention.dcp, attention.num_sms, attention.workspace_budget = SimpleNamespace(size=size), 132, 1 << 30
        asked.append(attention.plan(min(length, 1024)))
    assert asked == [asked[0]] * len(SIZES)


def cells(told):
    """The table of steps."""
    table = told[told.index("SHA256 of the logits") :]
    return [re.split(" *│ *", line)[1:-1] for line in table.splitlines() if line.startswith("│")]


def test_verify_demands_equal_logits_and_prints_one_digest_per_step(capsys):
    asked = verify.Settings(tp=2, dcp=(1, 2), classes=("512",), combine="exact", logits=True, passes=("free",))
    report = verify.as_threads(asked)
    assert verify.finish(report, 0, None) == 0
    told = capsys.readouterr().out
    assert "the same logits for every prompt and step, bit for bit" in told
    steps = report.rows[0].logits
    assert cells(told) == [["512", str(step), digest[:16], "1, 2"] for step, digest in enumerate(steps)]
    parted = [report.rows[0], replace(report.rows[1], logits=["f" * 64, *steps[1:]], logits_identical=False)]
    parted = replace(report, rows=parted)
    assert parted.rows[1].same and not replace(parted, settings=replace(asked, logits=False)).ok  # exact promises bits
    assert replace(parted, settings=replace(asked, logits=False, combine="a2a")).ok
    assert verify.finish(parted, 0, None) == launch.DIFFERS
    told = capsys.readouterr().out
    assert "1 of 2 runs differ from DCP1." in told
    assert cells(told)[:2] == [["512", "0", steps[0][:16], "1"], ["512", "0", "f" * 16, "2"]]


def test_verify_refuses_sizes_beyond_the_classes():
    with pytest.raises(UserError, match="DCP size of 16 does not divide the 8 canonical classes"):
        verify.Settings(tp=16, dcp=(1, 16), combine="exact").check()


def test_no_near_tie_without_other_bits(model):
    run = exact_compare.answer(model, PROMPTS[0], 2, 1, 1, "a2a")
    with pytest.raises(AssertionError, match="no step with other bits"):
        near_tie(model, run, run)
