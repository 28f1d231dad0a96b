"""The sparse attention kernels: under the interpreter against the reference, and on a GPU."""

from dataclasses import replace

import pytest
import torch

from dcp_fix import broken, workspace
from dcp_fix.attention import dense_prefill, dense_prefill_reference, sparse_partial_reference
from dcp_fix.base.equality import close, same_bytes
from dcp_fix.kv_cache import CACHE_FORMATS, new_latent_cache, read_latent, write_latent
from dcp_fix.ownership import pack_valid
from tests.attention.test_attention import INF, NAN, SCALE, agree, filled_cache, holed_slots, oracle, randn

triton = pytest.importorskip("triton")
from dcp_fix.attention import kernel as attention_kernel  # noqa: E402
from dcp_fix.attention.kernel import pack, sparse_partial_triton  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ULPS = 32 if DEVICE == "cpu" else 128  # a GPU approximates exp2 and log2; seen: 24 for values of size 1
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings(
        "ignore:(divide by zero|invalid value|overflow):RuntimeWarning"
    ),  # numpy, in the interpreter
]


def on_device(*args, **kwargs):
    """The kernel's answer, brought back to the CPU."""
    moved = [a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in args]
    return tuple(x.cpu() for x in sparse_partial_triton(*moved, **kwargs))


def forced(tokens, heads, topk, splits):
    return workspace.Plan(tokens, heads, topk, splits, tokens, splits if splits > 1 else 0)


@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (3, 7), (5, 130)])
@pytest.mark.parametrize("holes", [0.0, 0.6, 1.1])
def test_pack_is_pack_valid(tokens, k, holes):
    slots = holed_slots(tokens, k, 200, holes)
    packed, counts = (x.cpu() for x in pack(slots.to(DEVICE)))
    want, want_counts = pack_valid(slots)
    assert counts.tolist() == want_counts.tolist()
    for row, want_row, n in zip(packed.tolist(), want.tolist(), counts.tolist(), strict=True):
        assert row[:n] == want_row[:n]
    packed, counts = (x.cpu() for x in pack(slots.to(DEVICE), tail=-7))
    want[want < 0] = -7
    assert counts.tolist() == want_counts.tolist() and packed.tolist() == want.tolist()


@pytest.mark.parametrize(
    ("cache_format", "tokens", "heads", "k", "splits"),
    [*((form, 3, 20, 33, 1) for form in (None, *CACHE_FORMATS)), (None, 2, 1, 5, 1), ("fp8_ds_mla", 2, 16, 50, 3)]
    + [(None, 2, 3, 9, 8)],
)
@pytest.mark.parametrize("slots_are", ["packed", "holed"])
def test_kernel_against_the_reference(cache_format, tokens, heads, k, splits, slots_are, monkeypatch):
    """Every row of the cache that is not selected is NaN; splits may be empty, row 0 has no key."""
    monkeypatch.setattr(attention_kernel, "HOLED_SLOTS", 64 if slots_are == "holed" else 0)
    q, slots = randn(tokens, heads, 576), holed_slots(tokens, k, 80, 0.5, seed=5)
    if cache_format is None:
        kv, kv_scale = torch.full((80, 576), NAN), None
        kv[slots[slots >= 0]] = randn(80, 576, seed=3)[slots[slots >= 0]]
    else:
        kv, kv_scale = filled_cache(cache_format, slots)
    args = q, kv, slots, SCALE, cache_format, kv_scale
    got = on_device(*args, plan=forced(tokens, heads, k, splits))
    assert agree(got, sparse_partial_reference(*args), ULPS)
    assert got[0][0].eq(0).all() and (got[1][0] == -INF).all()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("slots_are", ["packed", "holed"])
def test_a_nan_in_a_query_or_in_every_key_reaches_the_output(splits, slots_are, monkeypatch):
    """Token 0 has no key, which is no fault; 1 has a query of NaN, 2 keys of NaN, 3 one among others, 4 no fault."""
    monkeypatch.setattr(attention_kernel, "HOLED_SLOTS", 64 if slots_are == "holed" else 0)
    q, rows = randn(5, 20, 576), randn(40, 576, seed=1)
    q[1, 3], rows[20:30] = NAN, NAN
    slots = torch.full((5, 50), -1)
    slots[1, :9], slots[2, 5:12], slots[4, 10:30] = torch.arange(9), torch.arange(21, 28), torch.arange(20)
    slots[3, 2:20] = torch.arange(3, 21)
    given = (q, rows, slots, SCALE)
    for got in (on_device(*given, plan=forced(5, 20, 50, splits)), sparse_partial_reference(*given)):
        bad = torch.zeros(5, 20, dtype=torch.bool)
        bad[1, 3], bad[2:4] = True, True
        assert got[0].isnan().all(-1).equal(bad) and got[0].isnan().any(-1).equal(bad) and got[1].isnan().equal(bad)
        assert got[0][0].eq(0).all() and (got[1][0] == -INF).all()


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "fp8"])
def test_decoding_the_cache_first_changes_no_bit(cache_format):
    slots = holed_slots(3, 33, 80, 0.5, seed=5)
    cache, kv_scale = filled_cache(cache_format, slots)
    args = randn(3, 5, 576), cache, slots, SCALE, cache_format, kv_scale
    plain, decoded = forced(3, 5, 33, 1), replace(forced(3, 5, 33, 1), decoded=80)
    got, want = on_device(*args, plan=decoded), on_device(*args, plan=plain)
    assert same_bytes(got[0], want[0]) and same_bytes(got[1], want[1])
    rows = attention_kernel.decode_rows(cache.to(DEVICE), cache_format, torch.float32).cpu()
    used = slots[slots >= 0].unique()
    assert same_bytes(rows[used], read_latent(cache, used, cache_format, 1.0 if cache_format == "fp8" else None))


def test_broken_cutting_fails_where_packing_passes():
    """Case 9 for the kernel: the same assertion, with columns masked by the local length instead."""
    q, rows, slots = randn(1, 4, 576), randn(3, 576, seed=1), torch.tensor([[-1, 2, -1, -1, 0, -1, 1, -1]])
    want = oracle(q, rows, slots)
    assert agree(on_device(q, rows, slots, SCALE), want, ULPS)
    assert not agree(on_device(q, rows, slots[:, :3].contiguous(), SCALE), want, ULPS)


def test_strided_queries_and_padded_blocks():
    cache, _ = filled_cache("fp8_ds_mla", torch.arange(80))
    padded = torch.full((5, 20, 656), 0x7F, dtype=torch.uint8)  # a block stride larger than a block
    padded[:, :16] = cache
    q, slots = randn(3, 9, 600)[:, 2:7, 8:584], holed_slots(3, 12, 80, 0.3)
    want = sparse_partial_reference(q, cache, slots, SCALE, "fp8_ds_mla")
    assert agree(on_device(q, padded[:, :16], slots, SCALE, "fp8_ds_mla"), want, ULPS)


def test_offsets_beyond_32_bits():
    """Case 10: a 2 GiB cache of which the last block alone is touched."""
    blocks = 3_273_604 // 64 + 2
    cache = torch.empty(blocks, 64, 656, dtype=torch.uint8)  # never written, so never resident
    slots = torch.tensor([[3_273_604, -1, blocks * 64 - 1]])
    write_latent(cache, randn(2, 512), randn(2, 64), slots[slots >= 0], "fp8_ds_mla")
    q = randn(1, 2, 576)
    near = new_latent_cache(1, "fp8_ds_mla")
    near[0, :2] = cache[[slots[0, 0] // 64, -1], [slots[0, 0] % 64, 63]]
    want = sparse_partial_reference(q, near, torch.tensor([[0, -1, 1]]), SCALE, "fp8_ds_mla")
    assert agree(on_device(q, cache, slots, SCALE, "fp8_ds_mla"), want, ULPS)


def test_nothing_to_do_and_plans_that_do_not_fit():
    q, rows = randn(2, 3, 576), randn(4, 576)
    out, lse = on_device(q, rows, torch.zeros(2, 0).long(), SCALE)
    assert out.eq(0).all() and (lse == -INF).all()
    assert on_device(q[:0], rows, torch.zeros(0, 5).long(), SCALE)[0].shape == (0, 3, 512)
    with pytest.raises(ValueError, match="2 tokens of 3 heads do not fit Plan.tokens=1.*pass the tokens of one chunk"):
        on_device(q, rows, torch.zeros(2, 1).long(), SCALE, plan=forced(1, 3, 1, 1))


def test_always_allocate_gives_the_same_answer():
    q, rows, slots = randn(2, 3, 576), randn(30, 576, seed=1), holed_slots(2, 12, 30, 0.3)
    wasteful = broken.plan_always_allocate(2, 3, 12, num_sms=1)
    assert wasteful.accumulators == 2
    got, want = (on_device(q, rows, slots, SCALE, plan=p) for p in (wasteful, workspace.plan(2, 3, 12, num_sms=1)))
    assert same_bytes(got[0], want[0]) and same_bytes(got[1], want[1])


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
@pytest.mark.parametrize(("tokens", "heads", "k"), [(1, 16, 512), (3, 64, 2048), (7, 128, 512), (200, 20, 512)])
def test_bf16_on_the_tensor_cores(cache_format, tokens, heads, k):
    slots = holed_slots(tokens, k, 4096, 0.75)
    cache, scale = filled_cache(cache_format, slots, block_size=64, blocks=64)
    q = randn(tokens, heads, 576).bfloat16()
    got = on_device(q, cache, slots, SCALE, cache_format, scale)
    want = sparse_partial_reference(q, cache, slots, SCALE, cache_format, scale)
    assert torch.allclose(got[1], want[1], atol=2e-2) and torch.allclose(got[0], want[0], atol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (7, 7), (5, 300), (512, 512)])
def test_dense_prefill_on_a_gpu(tokens, keys):
    q, k, v = (randn(n, 4, 128, seed=i).bfloat16().cuda() for i, n in enumerate((tokens, keys, keys)))
    got, want = dense_prefill(q, k, v, SCALE), dense_prefill_reference(q.cpu(), k.cpu(), v.cpu(), SCALE)
    assert got.dtype == want.dtype and close(got.cpu(), want, ulps=4, floor=1.0)


@pytest.mark.gpu
def test_a_quarter_of_the_keys_is_much_less_work():
    q, rows = torch.randn(2048, 64, 576).bfloat16().cuda(), torch.randn(65536, 576).bfloat16().cuda()
    whole = torch.randint(65536, (2048, 2048), device="cuda")
    quarter = torch.where(whole % 4 == 1, whole, -1)
    times = {}
    for name, slots in (("whole", whole), ("quarter", quarter)):
        times[name] = triton.testing.do_bench(lambda: sparse_partial_triton(q, rows, slots, SCALE))  # noqa: B023
    assert times["quarter"] < 0.45 * times["whole"]
