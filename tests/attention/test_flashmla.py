"""flashmla.py and backends.py: which vLLM folder it takes, which way is chosen, and both through a stand-in.

The interpreter is only to be trusted with fp32, so the ways are walked with fp32 queries, which `way` itself refuses.
"""

import pytest
import torch

from dcp_fix.attention import sparse_partial_reference
from dcp_fix.base.errors import UserError
from dcp_fix.kv_cache import read_latent
from dcp_fix.workspace import Plan, expected_columns
from tests.attention.test_attention import INF, NAN, SCALE, agree, filled_cache, holed_slots, randn

pytest.importorskip("triton")
from dcp_fix.attention import backends, flashmla, spill
from dcp_fix.attention.kernel import pack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ULPS = 64 if DEVICE == "cpu" else 256
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning"),  # the interpreter's
]


class Operators:
    """Stand in for FlashMLA's: fp64 attention over what they are given; a token without key is left undefined."""

    def __init__(self):
        self.schedules, self.widths = [], []

    def sparse_prefill_fwd(self, q, rows, packed, scale, width, sink, counts, out):
        assert q.shape[1] % 64 == 0 and packed.dtype == counts.dtype == torch.int32
        for row, count in zip(packed[:, 0], counts.tolist(), strict=True):
            assert row[count:].eq(-1).all()  # a slot there may name a row of NaN, which FlashMLA multiplies
        return partial(q, rows[:, 0], [row[:n] for row, n in zip(packed[:, 0], counts.tolist(), strict=True)], scale)

    def sparse_decode_fwd(self, q, cache, slots, *rest):
        plan, (width, scale, _) = rest[2:4], rest[-3:]
        assert q.shape[2] % 64 == 0 and slots.dtype == torch.int32 and width == 512 and plan[0] in (None, "plan")
        self.schedules.append(plan[0])
        self.widths.append(slots.shape[-1])
        cache = cache[..., 0, :]
        rows = read_latent(cache, torch.arange(cache.shape[0] * cache.shape[1], device=q.device), "fp8_ds_mla")
        out, _, lse = partial(q[0], rows, [row[row >= 0] for row in slots[0]], scale)
        return out[None], lse.T[None], "plan", "splits"


def partial(q, rows, slots, scale):
    """out [T, H, 512] and lse [T, H] of each token over its slots; NaN and +inf where it has none or one is NaN."""
    out, lse = q.new_full((*q.shape[:2], 512), NAN), q.new_full(q.shape[:2], INF, dtype=torch.float32)
    for token, own in enumerate(slots):
        if len(own):
            keys = rows[own.long()].double()
            scores = scale * q[token].double() @ keys.T
            out[token], lse[token] = scores.softmax(-1) @ keys[:, :512], scores.logsumexp(-1).nan_to_num(nan=INF)
    return out, None, lse


@pytest.fixture
def operators():
    """In use for one test."""
    operators = Operators()
    backends.use(flashmla.FlashMLA(operators))
    yield operators
    backends.use(None)


def problem(tokens, heads, k, holes=0.5):
    """Queries, a cache whose unselected rows are NaN, slots of which the first token has none, and the reference."""
    slots = holed_slots(tokens, k, 80, holes, seed=5)
    cache, _ = filled_cache("fp8_ds_mla", slots)
    q = randn(tokens, heads, 576)
    want = sparse_partial_reference(q, cache, slots, SCALE, "fp8_ds_mla")
    return q.to(DEVICE), cache.to(DEVICE), slots.to(DEVICE), want


def test_folders_that_hold_no_flashmla_are_refused(tmp_path):
    with pytest.raises(UserError, match="no vllm/_flashmla_C.abi3.so in it; name a folder"):
        flashmla.load(tmp_path)
    library = tmp_path / flashmla.LIBRARY
    library.parent.mkdir()
    library.write_bytes(b"not a library")
    with pytest.raises(UserError, match="cannot be loaded"):
        flashmla.load(tmp_path)


def test_the_way_is_chosen_by_tokens_heads_and_width(operators):
    way, bf16 = backends.way, torch.bfloat16
    many = lambda heads, ranks=4: Plan(8192, heads, 2048, 1, 8192, 0, decoded=65536, ranks=ranks)  # noqa: E731
    few = lambda ranks: Plan(64, 64, 2048, 1, 64, 0, ranks=ranks)  # noqa: E731
    assert [way(many(h), 8192, h, bf16, "fp8_ds_mla") for h in (16, 32, 33, 64)] == ["here", "here"] + ["prefill"] * 2
    assert [way(many(h, 1), 8192, h, bf16, "fp8_ds_mla") for h in (16, 17)] == ["here", "prefill"]
    assert [way(few(4), 64, h, bf16, "fp8_ds_mla") for h in (16, 32, 33, 64)] == ["here", "here"] + ["decode"] * 2
    assert [way(few(2), 64, h, bf16, "fp8_ds_mla") for h in (16, 17, 32)] == ["here", "decode", "decode"]
    assert [way(few(4), t, 64, bf16, "fp8_ds_mla") for t in (7, 8, 512, 513)] == ["here", "decode", "decode", "here"]
    assert [way(few(2), t, 32, bf16, "fp8_ds_mla") for t in (31, 32, 512, 513)] == ["here", "decode", "decode", "here"]
    assert way(few(4), 64, 64, bf16, "fp8") == way(few(4), 64, 64, torch.float16, "fp8_ds_mla") == "here"
    assert way(many(64), 8192, 64, bf16, "bf16") == way(many(64), 8192, 64, bf16, None) == "here"
    backends.use(None)
    assert way(many(64), 8192, 64, bf16, "fp8_ds_mla") == "here"


@pytest.mark.parametrize(
    ("chosen", "form"),
    [("here", "fp8_ds_mla"), ("prefill", "fp8_ds_mla"), ("prefill", "fp8"), ("decode", "fp8_ds_mla")],
)
def test_every_way_gives_the_same_answer(operators, chosen, form, monkeypatch):
    slots = holed_slots(4, 33, 80, 0.5, seed=5)
    cache, kv_scale = filled_cache(form, slots)
    args = randn(4, 5, 576), cache, slots, SCALE, form, kv_scale
    want = sparse_partial_reference(*args)
    monkeypatch.setattr(backends, "way", lambda *sizes: chosen)
    moved = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in args]
    got = backends.sparse_partial_cuda(*moved)
    assert agree(tuple(x.cpu() for x in got), want, ULPS)
    assert got[0].dtype == torch.float32 and got[0][0].eq(0).all() and (got[1][0] == -INF).all()


@pytest.mark.parametrize("width", [None, 8, 30, 33])
def test_a_nan_is_told_from_no_key(operators, width):
    """FlashMLA marks both by +inf. Its prefill, and its decode of a width that holds few keys, the own ones, all."""
    q, cache, slots, _ = problem(4, 5, 33)
    q[1, 2] = NAN
    if width is None:
        got = flashmla.by_prefill(backends.CHOSEN[0], q, cache, slots, SCALE, "fp8_ds_mla", None)
    else:
        got = flashmla.by_decode(backends.CHOSEN[0], q, cache, slots, SCALE, width)
    out, lse = (x.cpu() for x in got)
    for x in (out.isnan().all(-1), out.isnan().any(-1), lse.isnan()):
        assert x.nonzero().tolist() == [[1, 2]]
    assert out[0].eq(0).all() and (lse[0] == -INF).all()


@pytest.mark.parametrize("width", [1, 5, 16, 33, 150])
def test_what_exceeds_the_width_is_added_and_nothing_is_dropped(operators, width):
    q, cache, slots, want = problem(5, 20, 150, holes=0.4)
    got = flashmla.by_decode(backends.CHOSEN[0], q, cache, slots, SCALE, width)
    assert operators.widths == [width]
    assert agree(tuple(x.cpu() for x in got), want, ULPS)


def test_in_place_writes_only_the_tokens_that_exceed_the_width(operators):
    q, cache, slots, want = problem(6, 3, 60)
    slots[2, 10:] = -1  # at most ten keys
    want = sparse_partial_reference(q.cpu(), cache.cpu(), slots.cpu(), SCALE, "fp8_ds_mla")
    packed, counts = pack(slots, tail=-1)
    fits = (counts <= 16).cpu()
    assert 0 < fits.sum() < 6
    first, lse = backends.CHOSEN[0].decode(q, cache, packed[:, :16], SCALE)
    first, lse = first.contiguous(), lse.contiguous().T.contiguous().T  # heads first in memory, as FlashMLA returns it
    before = first.clone()
    out, out_lse = spill.with_spill(q, cache, "fp8_ds_mla", packed, counts, 16, SCALE, first, lse, in_place=True)
    assert out is first and out_lse is lse
    assert out[fits].equal(before[fits]) or out[fits].isnan().equal(before[fits].isnan())
    assert agree((out[~fits].cpu(), lse[~fits].cpu()), (want[0][~fits], want[1][~fits]), ULPS)


def test_a_schedule_is_made_once_for_each_size(operators):
    q, cache, slots, _ = problem(3, 2, 40)
    for width in (8, 8, 16, 8):
        flashmla.by_decode(backends.CHOSEN[0], q, cache, slots, SCALE, width)
    assert operators.schedules == [None, "plan", None, "plan"]


def test_a_width_holds_the_share_and_what_chance_adds():
    """Of ids that are dealt out at random, 2 in 1000 tokens may exceed it; none can where one rank has them all."""
    ids = torch.rand(1000, 8192, generator=torch.Generator().manual_seed(0)).argsort(-1)[:, :2048]
    for ranks in (2, 4, 8):
        own = (ids % ranks == 0).sum(-1)
        assert (own > expected_columns(2048, ranks)).float().mean() < 2e-3
    assert expected_columns(2048, 1) == 2048 and expected_columns(40, 1) == 40 and expected_columns(40, 8) == 40


def test_heads_are_padded_with_zeros():
    padded = flashmla.padded(torch.ones(2, 20, 576))
    assert padded.shape == (2, 64, 576) and padded[:, :20].eq(1).all() and padded[:, 20:].eq(0).all()
    assert flashmla.padded(torch.ones(2, 64, 576)).shape == (2, 64, 576)
