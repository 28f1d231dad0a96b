"""engine.py, sharded.py, shard.py, blocks.py and scratch.py on a random checkpoint, ranks as threads.

"Same" means the tokens: logits of different DCP sizes differ in the last bits, and then an fp8 rounding may flip.
"""

import doctest
import math
from dataclasses import replace

import pytest
import torch

from dcp_fix import broken
from dcp_fix.base.equality import same_bytes
from dcp_fix.base.errors import UserError
from dcp_fix.engine import blocks, shard
from dcp_fix.engine.blocks import BlockPool, CacheFull
from dcp_fix.engine.engine import Engine
from dcp_fix.engine.model import Model, PlainAttention
from dcp_fix.engine.scratch import STALE, Scratch
from dcp_fix.engine.sharded import Ops
from dcp_fix.kv_cache import BLOCK, decode_latent, encode_latent, quantize_index_key
from dcp_fix.norm_rope import fused_norm_rope
from dcp_fix.ranks.group import GroupError, LocalGroup, SingleGroup
from dcp_fix.workspace import WorkspaceError
from tests.checkpoints import random_checkpoint, random_tokens

DENSE, SPARSE = 37, 150  # prompt lengths on both sides of index_topk = 64
STEPS = 6
OTHER = random_tokens(60, seed=999)  # the request that leaves its rows behind


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def model(folder):
    model = Model.load(folder)
    return Model(replace(model.config, eos_token_id=-1), model.weights)  # an answer never ends early


def answers(model, prompts, tp=4, dcp_size=1, warm=False, steps=STEPS, **options):
    """Every rank's generations for a list of prompts on one engine; asserts that the ranks agree, returns rank 0's."""

    def rank(group):
        engine = Engine(model, group, dcp_size=dcp_size, **{"max_length": 512} | options)
        if warm:
            engine.leave_rows(OTHER)
        return [engine.generate(prompt, steps) for prompt in prompts]

    ranks = LocalGroup.run(tp, rank)
    for other in ranks[1:]:
        assert [g.tokens for g in other] == [g.tokens for g in ranks[0]]
        assert all(same_bytes(a.logits, b.logits) for a, b in zip(other, ranks[0], strict=True))
    return ranks[0]


def answer(model, prompt, **options):
    return answers(model, [prompt], **options)[0]


@pytest.fixture(scope="module", params=[DENSE, SPARSE], ids=["dense", "sparse"])
def prompt(request):
    return random_tokens(request.param, seed=request.param)


@pytest.fixture(scope="module")
def at_dcp1(model, prompt):
    return answer(model, prompt)


def assert_same(got, want, ulps=0.05):
    assert got.tokens == want.tokens
    assert (got.logits - want.logits).abs().max() < ulps * want.logits.abs().max()


# --- the whole against oracles ----------------------------------------------------------------------------------------


@torch.no_grad()
def plain(model, prompt, steps=STEPS):
    """Greedy continuation without cache or ranks: (tokens, logits [steps, vocab])."""
    ids, rows = list(prompt), []
    for _ in range(steps):
        hidden = model.forward(torch.tensor(ids), PlainAttention(model.config, len(ids)))
        rows.append(model.logits(hidden)[-1])
        ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], torch.stack(rows)


def with_cache_rounding(model, monkeypatch, cache_format):
    """Let the plain model see every key as the caches give it back."""
    for layer in model.layers:
        index_keys, expand = layer.index_keys, layer.expand

        def rounded_index(x, cos_sin, index_keys=index_keys):
            codes, scale = quantize_index_key(index_keys(x, cos_sin))
            return codes.float() * scale[:, None]

        def rounded(latent, k_pe, expand=expand):
            if cache_format == "bf16":
                return expand(latent.bfloat16().float(), k_pe.bfloat16().float())
            return expand(*decode_latent(encode_latent(latent, k_pe)))

        monkeypatch.setattr(layer, "index_keys", rounded_index)
        monkeypatch.setattr(layer, "expand", rounded)


@pytest.mark.parametrize("length, cache_format", [(DENSE, "bf16"), (SPARSE, "bf16"), (SPARSE, "fp8_ds_mla")])
def test_the_plain_model_answers_alike(folder, model, monkeypatch, length, cache_format):
    """Which answers as transformers does (test_model.py)."""
    rounded = Model.load(folder)
    with_cache_rounding(rounded, monkeypatch, cache_format)
    prompt = random_tokens(length, seed=length)
    tokens, logits = plain(rounded, prompt)
    got = answer(model, prompt, tp=1, cache_format=cache_format)
    assert got.tokens == tokens
    assert (got.logits[0] - logits[0]).abs().max() < 0.02 * logits.abs().max()


def test_a_group_of_one_needs_no_threads(model, prompt, at_dcp1):
    got = Engine(model, SingleGroup(), dcp_size=1, max_length=512).generate(prompt, STEPS)
    assert_same(got, at_dcp1)


@pytest.mark.parametrize("tp, dcp_size, interleave", [(4, 2, 1), (4, 4, 16), (8, 4, 64), (8, 8, 1)])
def test_every_dcp_size_answers_as_dcp1(model, prompt, at_dcp1, tp, dcp_size, interleave):
    assert_same(answer(model, prompt, tp=tp, dcp_size=dcp_size, interleave=interleave), at_dcp1)


def test_both_combines_give_the_same_bits(model, prompt):
    ag_rs, a2a = (answer(model, prompt, dcp_size=4, combine=method) for method in ("ag_rs", "a2a"))
    assert same_bytes(ag_rs.logits, a2a.logits)


@pytest.mark.parametrize("cache_format", ["bf16", "fp8"])
def test_the_other_cache_formats(model, prompt, cache_format):
    one, four = (answer(model, prompt, dcp_size=size, cache_format=cache_format) for size in (1, 4))
    assert_same(four, one)


# --- prefix cache and chunks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dcp_size, hit", [(1, 192), (2, 128), (4, 0)])
def test_a_prefix_is_found_in_whole_blocks_of_every_rank(model, dcp_size, hit):
    shared = random_tokens(200, seed=1)
    prompt = shared + random_tokens(50, seed=2)
    want = answer(model, prompt, dcp_size=dcp_size)
    first, again = answers(model, [shared, prompt], dcp_size=dcp_size)
    assert (want.cached, first.cached, again.cached) == (0, 0, hit)
    assert_same(again, want)


def test_a_cached_context_reaches_dense_prefill(folder):
    """index_topk beyond the prompt: new rows as norm_rope left them, old ones from their owners, quantised."""
    model = Model.load(folder)
    model = Model(replace(model.config, index_topk=448, eos_token_id=-1), model.weights)
    shared = random_tokens(300, seed=3)
    prompt = shared + random_tokens(77, seed=4)
    want = answer(model, prompt)
    for dcp_size, interleave, hit in ((1, 1, 256), (4, 1, 256), (2, 16, 256)):
        _, got = answers(model, [shared, prompt], dcp_size=dcp_size, interleave=interleave)
        assert got.cached == hit
        assert_same(got, want, ulps=0.2)


@pytest.mark.parametrize("dcp_size, size", [(1, 64), (4, 7), (4, 149)])
def test_chunked_prefill(model, dcp_size, size):
    prompt = random_tokens(SPARSE, seed=SPARSE)
    whole = answer(model, prompt, dcp_size=dcp_size, cache_format="bf16")
    chunked = answer(model, prompt, dcp_size=dcp_size, cache_format="bf16", max_batch_tokens=size)
    assert chunked.tokens == whole.tokens


def test_a_repeated_prompt_leaves_one_token_to_compute(model):
    prompt = random_tokens(2 * BLOCK, seed=5)
    first, again = answers(model, [prompt, prompt])
    assert (first.cached, again.cached) == (0, BLOCK)
    assert again.tokens == first.tokens


def test_blocks_are_handed_on_when_the_cache_is_small(model):
    prompts = [random_tokens(100, seed=seed) for seed in (6, 7, 6)]
    got = answers(model, prompts, max_length=128)
    assert [g.cached for g in got] == [0, 0, 0]
    assert got[2].tokens == got[0].tokens
    assert [g.cached for g in answers(model, prompts, max_length=256)] == [0, 0, BLOCK]


def test_the_block_pool_documents_itself():
    assert doctest.testmod(blocks).failed == 0


def test_content_counts_from_the_start_of_the_sequence():
    pool = BlockPool(num_blocks=4, block_size=4, dcp_size=1)
    pool.close(pool.open([1] * 8, 8)[0], [1] * 8)
    assert pool.open([1] * 9, 12)[1] == 8
    assert BlockPool.match(pool, [2, 1, 1, 1, 1, 1, 1, 1, 1]) == []


# --- what each defect does --------------------------------------------------------------------------------------------

SKIP_ALL, SKIP_DENSE = Ops(norm_rope=broken.norm_rope_skip_all_rows), Ops(norm_rope=broken.norm_rope_skip_dense_rows)
UNROUTED = Ops(route=broken.attend_unrouted)


@pytest.mark.parametrize("stale", STALE)
def test_stale_memory_never_reaches_the_corrected_steps(model, prompt, at_dcp1, stale):
    assert_same(answer(model, prompt, dcp_size=4, stale=stale, warm=True), at_dcp1)


@pytest.mark.parametrize("stale", STALE)
def test_without_query_rows_the_first_logits_are_wrong(model, prompt, at_dcp1, stale):
    got = answer(model, prompt, dcp_size=4, ops=SKIP_ALL, stale=stale, warm=True)
    assert (got.logits[0] - at_dcp1.logits[0]).abs().max() > 0.1 * at_dcp1.logits.abs().max()


@pytest.mark.parametrize("stale", STALE)
def test_without_dense_rows_only_dense_prefill_is_wrong(model, prompt, at_dcp1, stale):
    got = answer(model, prompt, dcp_size=4, ops=SKIP_DENSE, stale=stale, warm=True)
    if len(prompt) == SPARSE:
        assert_same(got, at_dcp1)
    else:
        assert (got.logits[0] - at_dcp1.logits[0]).abs().max() > 0.1 * at_dcp1.logits.abs().max()


def test_without_routing_a_dense_prefill_is_right_and_the_rest_is_not(model, prompt, at_dcp1):
    got = answer(model, prompt, dcp_size=4, ops=UNROUTED)
    apart = (got.logits[0] - at_dcp1.logits[0]).abs().max() / at_dcp1.logits.abs().max()
    assert (apart < 0.05) if len(prompt) == DENSE else (apart > 0.1)
    assert got.tokens != at_dcp1.tokens


@pytest.mark.parametrize("ops", [SKIP_ALL, SKIP_DENSE, UNROUTED])
def test_at_dcp1_no_defect_shows(model, prompt, at_dcp1, ops):
    assert same_bytes(answer(model, prompt, ops=ops, warm=True).logits, at_dcp1.logits)


@pytest.mark.parametrize("stale", STALE)
def test_garbage_is_the_same_on_every_run(model, prompt, stale):
    all_broken = replace(SKIP_ALL, route=broken.attend_unrouted)
    one, two = (answer(model, prompt, dcp_size=4, ops=all_broken, stale=stale, warm=True) for _ in range(2))
    assert same_bytes(one.logits, two.logits)


def test_the_historical_plan_exceeds_a_budget_that_the_corrected_one_meets(model):
    prompt, budget = random_tokens(SPARSE, seed=SPARSE), 40 << 20
    fits = answer(model, prompt, dcp_size=4, workspace_budget=budget)
    assert_same(fits, answer(model, prompt, dcp_size=4))
    with pytest.raises(GroupError, match="MiB") as error:
        answer(model, prompt, dcp_size=4, workspace_budget=budget, ops=Ops(plan=broken.plan_always_allocate))
    assert isinstance(error.value.__cause__, WorkspaceError)


# --- faults in what is computed from ----------------------------------------------------------------------------------


def spoiled(name, step):
    """norm_rope with a NaN in `name` of one row: of position 20, or in the step of decode."""

    def norm_rope(inputs):
        row = (inputs.positions == (20 if step == "prefill" else SPARSE))[:, None]
        if name == "index key" and inputs.indexer is not None:
            inputs = replace(inputs, indexer=replace(inputs.indexer, k=inputs.indexer.k.masked_fill(row, math.nan)))
        elif name != "index key":
            inputs = replace(inputs, **{name: getattr(inputs, name).masked_fill(row, math.nan)})
        return fused_norm_rope(inputs)

    return Ops(norm_rope=norm_rope)


@pytest.mark.parametrize("name", ["q", "kv", "k_pe", "index key"])
@pytest.mark.parametrize("step", ["prefill", "decode"])
@pytest.mark.parametrize(
    "dcp_size, options", [(1, {}), (4, {"combine": "a2a"}), (4, {"combine": "exact"}), (1, {"static_decode": True})]
)
def test_a_nan_reaches_the_logits(model, name, step, dcp_size, options):
    """Faults and "no key" share no mark, so none is merged away, at any DCP size."""
    prompt = random_tokens(SPARSE, seed=SPARSE)
    got = answer(model, prompt, dcp_size=dcp_size, ops=spoiled(name, step), steps=2, **options)
    assert got.logits[1].isnan().all()
    assert got.logits[0].isnan().all() if step == "prefill" else got.logits[0].isfinite().all()


# --- scratch memory ---------------------------------------------------------------------------------------------------


def test_previous_rows_repeat_to_the_end_and_are_never_reset():
    scratch = Scratch({"q": 3}, 8, "previous", torch.device("cpu"), torch.float32)
    scratch.take("q", 3).copy_(torch.arange(9.0).view(3, 3))
    scratch.remember(3)
    assert scratch.take("q", 8)[:, 0].tolist() == [0, 3, 6, 0, 3, 6, 0, 3]
    assert scratch.take("q", 5).data_ptr() == scratch.take("q", 8).data_ptr()


@pytest.mark.parametrize("stale", ["zeros", "noise"])
def test_zeros_and_noise_come_back_before_every_launch(stale):
    scratch = Scratch({"q": 3}, 8, stale, torch.device("cpu"), torch.float32)
    before = scratch.take("q", 5).clone()
    scratch.take("q", 8).fill_(math.nan)
    assert same_bytes(scratch.take("q", 5), before)
    assert (before == 0).all() if stale == "zeros" else before.std() > 0.5


def test_another_request_leaves_its_rows_everywhere(model):
    def rank(group):
        engine = Engine(model, group, dcp_size=4, max_length=200, ops=SKIP_ALL)
        engine.leave_rows(OTHER)
        return {name: buffer.clone() for name, buffer in engine.attention.scratch.buffers.items()}

    for buffers in LocalGroup.run(4, rank):
        for rows in buffers.values():
            assert (rows.abs().amax(-1) > 0).all()
            assert same_bytes(rows[60:120], rows[:60]) and len(rows) == 200


# --- shards -----------------------------------------------------------------------------------------------------------


def test_shards_add_up(model):
    x = torch.randn(5, model.config.hidden_size)
    parts = [shard.shard(model, rank, 4) for rank in range(4)]
    for index, whole in enumerate(model.layers):
        total = sum(part.layers[index].mlp(x) for part in parts)
        assert (total - whole.mlp(x)).abs().max() < 1e-4
        assert [part.layers[index].heads for part in parts] == [2, 2, 2, 2]
    logits = torch.cat([part.logits(x) for part in parts], -1)  # 97 rows over 4 ranks: 25 each, 3 of padding
    assert logits.shape[-1] == 100 and (logits[:, 97:] == 0).all()
    assert (logits[:, :97] - model.logits(x)).abs().max() < 1e-4


# --- the answer -------------------------------------------------------------------------------------------------------


def test_it_stops_at_the_end_token(model, at_dcp1, prompt):
    end = at_dcp1.tokens[2]
    unsaid = next(token for token in range(97) if token not in at_dcp1.tokens)
    for ends in (end, (unsaid, end)):
        stops = Model(replace(model.config, eos_token_id=ends), model.weights)
        got = answer(stops, prompt)
        assert got.tokens == at_dcp1.tokens[: at_dcp1.tokens.index(end) + 1]
    assert len(got.logits) == len(got.tokens) == len(got.margins) == len(got.digests)


def test_margins_and_digests(at_dcp1):
    first = at_dcp1.logits[0]
    assert at_dcp1.tokens[0] == int(first.argmax())
    assert at_dcp1.margins[0] == pytest.approx((first.max() - first.sort().values[-2]).item())
    assert len(set(at_dcp1.digests)) == STEPS


def test_progress_counts_up_to_the_total(model, prompt):
    seen = []
    Engine(model, SingleGroup(), dcp_size=1, max_length=512).generate(prompt, 4, lambda *step: seen.append(step))
    done, totals = zip(*seen, strict=True)
    assert list(done) == sorted(done) and done[-1] == totals[-1] == 3 * (len(prompt) + 3)


# --- bad input --------------------------------------------------------------------------------------------------------


def engine(model, **options):
    return Engine(model, SingleGroup(), **{"dcp_size": 1, "max_length": 200} | options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"interleave": 3}, "interleave of 3"),
        ({"max_length": 513}, "513 tokens"),
        ({"max_batch_tokens": 0}, "max_batch_tokens is 0"),
        ({"dcp_size": 2}, "DCP size of 2 does not divide the TP size 1"),
        ({"dcp_size": 0}, "DCP size of 0"),
        ({"device": "tpu9"}, "'tpu9' is unknown"),
        ({"device": "meta"}, "'meta' is not supported"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"stale": "fresh"}, "'fresh' is not one of"),
        ({"cache_format": "fp4"}, "fp4"),
        ({"combine": "magic"}, "magic"),
    ],
)
def test_bad_options_are_refused_at_the_door(model, options, message):
    with pytest.raises(ValueError, match=message):
        engine(model, **options)


@pytest.mark.parametrize("name, width", [("kv_lora_rank", 512), ("qk_rope_head_dim", 64), ("index_head_dim", 128)])
def test_a_model_whose_keys_do_not_fit_the_cache_is_refused(model, name, width):
    with pytest.raises(UserError, match=f"{name} is 32; allowed: {width}"):
        engine(Narrow(model, name))


class Narrow(Model):
    """The model, with one width of its config changed."""

    def __init__(self, model, name):
        self.config, self.weights, self.layers = replace(model.config, **{name: 32}), model.weights, model.layers


def test_a_tp_size_that_does_not_divide_the_heads(model):
    with pytest.raises(UserError, match="TP size of 3 does not divide the model's 8 attention heads"):
        shard.shard(model, 0, 3)


def test_a_prompt_longer_than_the_cache_writes_nothing(model):
    small = engine(model, max_length=100)
    small.generate(random_tokens(90, seed=8), 2)
    before = [cache.clone() for cache in small.attention.latent]
    for tokens in (100, 149):  # the first would still fit into the last block
        with pytest.raises(CacheFull, match=f"request of {tokens + 1} tokens and a cache made for 100"):
            small.generate(random_tokens(tokens, seed=9), 2)
    assert all(same_bytes(cache, old) for cache, old in zip(small.attention.latent, before, strict=True))
    assert small.generate(random_tokens(90, seed=8), 2).cached == BLOCK  # and still works


@pytest.mark.parametrize("ids, steps", [([], 1), ([5], 0), ([97], 1), ([-1], 1)])
def test_requests_that_make_no_sense(model, ids, steps):
    with pytest.raises(UserError):
        engine(model).generate(ids, steps)
