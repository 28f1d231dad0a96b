"""Sparse partials and dense prefill in torch, against fp64 written as plainly as possible."""

import math
import threading
import time

import pytest
import torch

from dcp_fix import attention, ownership
from dcp_fix.attention import dense_prefill, sparse_partial
from dcp_fix.base.equality import close
from dcp_fix.combine import merge_partials
from dcp_fix.kv_cache import CACHE_FORMATS, new_latent_cache, read_latent, write_latent

INF, NAN = math.inf, math.nan
SCALE = 0.07


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def holed_slots(tokens, k, rows, holes, seed=0):
    """Distinct slots per row with holes anywhere; row 0 has none at all."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.stack([torch.randperm(max(rows, k), generator=generator)[:k] for _ in range(tokens)])
    slots[(torch.rand(tokens, k, generator=generator) < holes) | (slots >= rows)] = -1
    slots[0] = -1
    return slots


def oracle(q, rows, slots, scale=SCALE):
    """One token at a time in fp64, over the keys that are there."""
    out, lse = torch.zeros(*q.shape[:2], 512).double(), torch.full(q.shape[:2], -INF).double()
    for t, row in enumerate(slots):
        keys = rows[row[row >= 0]].double()
        if len(keys):
            scores = scale * q[t].double() @ keys.T
            out[t], lse[t] = scores.softmax(-1) @ keys[:, :512], scores.logsumexp(-1)
    return out.float(), lse.float()


def agree(got, want, ulps=32):
    """(out, lse) within rounding: out in ulps of 1, the size of the rows' values."""
    return all(close(g, w, ulps=ulps, floor=1.0) for g, w in zip(got, want, strict=True))


def filled_cache(cache_format, slots, block_size=16, blocks=5, seed=3):
    """A cache whose rows are all NaN except those named by `slots`; and its scale."""
    cache, scale = new_latent_cache(blocks, cache_format, block_size), 0.01 if cache_format == "fp8" else None
    cache.view(torch.uint8).fill_(0x7F)
    if cache_format == "bf16":
        cache.fill_(NAN)
    used = slots[slots >= 0].unique()
    write_latent(
        cache, randn(len(used), 512, seed=seed), randn(len(used), 64, seed=seed + 1), used, cache_format, scale
    )
    return cache, scale


@pytest.mark.parametrize(
    ("tokens", "heads", "k", "rows"), [(1, 1, 1, 3), (3, 2, 5, 9), (7, 16, 130, 200), (2, 65, 33, 40)]
)
@pytest.mark.parametrize("holes", [0.0, 0.7])
def test_sparse_partial_against_fp64(tokens, heads, k, rows, holes):
    q, kv, slots = randn(tokens, heads, 576), randn(rows, 576, seed=1), holed_slots(tokens, k, rows, holes)
    out, lse = sparse_partial(q, kv, slots, SCALE)
    assert out.dtype == lse.dtype == torch.float32
    assert agree((out, lse), oracle(q, kv, slots))
    assert out[0].eq(0).all() and (lse[0] == -INF).all()  # the neutral element, never FlashMLA's +inf


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
@pytest.mark.parametrize("tokens", [1, 6])
def test_paged_caches_read_only_the_selected_rows(cache_format, tokens):
    q, slots = randn(tokens, 3, 576), holed_slots(tokens, 21, 80, 0.5, seed=5)
    slots[-1, 4] = 79  # the last row of the last block
    cache, scale = filled_cache(cache_format, slots)
    got = sparse_partial(q, cache, slots, SCALE, cache_format, scale)
    assert agree(got, oracle(q, read_latent(cache, torch.arange(80), cache_format, scale), slots))
    assert not got[0].isnan().any()


@pytest.mark.parametrize("dcp_size", [2, 4, 8])
@pytest.mark.parametrize("interleave", [1, 4])
def test_shards_merge_to_the_whole(dcp_size, interleave):
    q, kv, ids = randn(5, 6, 576), randn(90, 576, seed=1), holed_slots(5, 40, 90, 0.2)
    parts = []
    for rank in range(dcp_size):
        mine = ownership.owner(torch.arange(90), dcp_size, interleave) == rank
        shard = torch.where(mine[:, None], kv, NAN)[mine]  # another rank's rows are not here
        parts.append(sparse_partial(q, shard, ownership.localise(ids, dcp_size, rank, interleave), SCALE))
    out, lse = map(torch.stack, zip(*parts, strict=True))
    assert agree(merge_partials(out, lse), oracle(q, kv, ids))


def test_empty_rows_do_not_disturb_their_neighbours():
    q, kv = randn(3, 2, 576), randn(4, 576, seed=1)
    kv[0] = NAN  # what a hole must not read
    slots = torch.tensor([[-1, -1, -1], [-1, 3, -1], [1, -1, 2]])
    out, lse = sparse_partial(q, kv, slots, SCALE)
    assert agree((out, lse), oracle(q, kv, slots))
    assert out[0].eq(0).all() and (lse[0] == -INF).all()
    for nothing in (slots.clamp(max=-1), slots[:, :0]):
        out, lse = sparse_partial(q, kv, nothing, SCALE)
        assert out.eq(0).all() and (lse == -INF).all()
    assert sparse_partial(q[:0], kv, slots[:0], SCALE)[0].shape == (0, 2, 512)


def test_large_scores_do_not_overflow_and_nan_is_not_hidden():
    q, kv, slots = 100 * randn(2, 2, 576), 100 * randn(6, 576, seed=1), torch.tensor([[0, 1, 2], [3, 4, 5]])
    out, lse = sparse_partial(q, kv, slots, SCALE)
    assert out.isfinite().all() and close(
        lse, oracle(q, kv, slots)[1], ulps=4, floor=4e5
    )  # the size of the products' sum
    kv[1] = NAN
    out, _ = sparse_partial(q, kv, slots, SCALE)
    assert out[0].isnan().all() and out[1].isfinite().all()


@pytest.mark.parametrize(
    ("tokens", "keys", "heads", "dq", "dv"), [(1, 1, 1, 8, 8), (5, 5, 3, 12, 7), (4, 11, 2, 128, 128), (1, 9, 5, 16, 3)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_prefill_against_fp64(tokens, keys, heads, dq, dv, dtype):
    q, k, v = (
        randn(*shape, seed=i).to(dtype)
        for i, shape in enumerate([(tokens, heads, dq), (keys, heads, dq), (keys, heads, dv)])
    )
    scores = SCALE * torch.einsum("thd,shd->hts", q.double(), k.double())
    scores += torch.full((tokens, keys), -INF).triu(keys - tokens + 1)
    want = torch.einsum("hts,shd->thd", scores.softmax(-1), v.double()).to(dtype)
    got = dense_prefill(q, k, v, SCALE)
    assert got.dtype == dtype and close(got, want, ulps=2 if dtype == torch.bfloat16 else 32, floor=1.0)


def test_ranks_take_turns_at_torchs_attention(monkeypatch):
    """Two threads in it at once get different kernels on the first call of a process (tests/gpu has the bits)."""
    inside, most = [], []

    def watched(q, k, v, **options):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return q

    monkeypatch.setattr(attention.reference, "scaled_dot_product_attention", watched)
    given = (*[randn(3, 1, 4)] * 3, SCALE)
    threads = [threading.Thread(target=attention.reference._dense_prefill_cuda, args=given) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]


def test_dense_prefill_never_reads_the_future(monkeypatch):
    q, k, v = randn(6, 2, 8), randn(9, 2, 8, seed=1), randn(9, 2, 8, seed=2)
    want = dense_prefill(q, k, v, SCALE)
    monkeypatch.setattr("dcp_fix.attention.reference.SCORE_FLOATS", 1)  # one query at a time
    assert close(dense_prefill(q, k, v, SCALE), want, ulps=8, floor=1.0)
    k[8:], v[8:] = NAN, NAN  # only the last query may see the last key
    got = dense_prefill(q, k, v, SCALE)
    assert close(got[:-1], want[:-1], ulps=8, floor=1.0) and got[-1].isnan().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sparse_partial(randn(2, 3, 512), randn(4, 576), torch.zeros(2, 1).long(), 1.0), r"got \[2, 3, 512\]"),
        (lambda: sparse_partial(randn(2, 3, 576), randn(4, 576), torch.zeros(3, 1).long(), 1.0), r"\[3, 1\]"),
        (lambda: sparse_partial(randn(1, 3, 576), randn(4, 512), torch.zeros(1, 1).long(), 1.0), r"rows \[N, 576\]"),
        (lambda: sparse_partial(randn(1, 3, 576), randn(4, 576), torch.zeros(1, 1).long(), 1.0, "fp16"), "fp16"),
        (lambda: dense_prefill(randn(3, 1, 4), randn(2, 1, 4), randn(2, 1, 4), 1.0), "with S >= T"),
    ],
)
def test_bad_arguments_are_refused_at_the_door(call, message):
    with pytest.raises(ValueError, match=message):
        call()
