"""Attention of GLM-DSA: the sparse MLA partial over selected cache rows, and the dense prefill.

Sparse (decode, and prefill over more than `index_topk` keys): all heads of a token share one selected set S of rows of
the latent cache, of which the value is the first 512 numbers. Over the rows that lie on this rank:

    s[h, j] = scale * q[h] . row_j           lse[h] = log sum_j exp(s[h, j])        natural logarithm
    out[h]  = sum_j exp(s[h, j] - lse[h]) row_j[:512]

A token with no row here gives the neutral element (0, -inf), which combine/ merges away. Holes (-1) lie anywhere in a
row of slots; they are packed away first, so that a rank of DCP4, which owns a quarter of the ids, does a quarter of the
work. (FlashMLA takes the same time whatever the number of holes, and marks an empty row with lse = +inf.)

Dense (prefill over fewer keys): plain causal attention of this rank's own heads, no combine.

The reference is torch and computes in fp32, whatever the cache holds; CUDA tensors go through backends.py to kernel.py.
It does not: select keys (indexer.py), write the cache (norm_rope/reference.py), combine ranks (combine/reference.py).
Source: DeepSeek-V3.2's sparse MLA; the (out, lse) contract is that of FlashMLA's sparse decode.
"""

import threading

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dcp_fix.kv_cache import LATENT, ROPE, check_latent_cache, read_latent
from dcp_fix.ownership import pack_valid
from dcp_fix.workspace import Plan

GATHER_FLOATS = 1 << 20  # of gathered rows at once: 4 MiB, so that both products find them in the cache
SCORE_FLOATS = 1 << 24  # of a dense prefill's scores at once: 64 MiB
# torch ranks its fused attentions (cuDNN's first on an H200) at the first call of a process, and says that it has done
# so before it has: a rank thread that came second would take another kernel once, and with it other bits.
ONE_AT_A_TIME = threading.Lock()


def sparse_partial(
    q: Tensor, kv: Tensor, slots: Tensor, scale: float, cache_format: str | None = None,
    kv_scale: Tensor | float | None = None, plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [T, H, 576], slots int [T, K] (-1 = hole) -> out fp32 [T, H, 512], natural lse fp32 [T, H].

    `kv` is a paged cache with its `cache_format` (and `kv_scale` for "fp8"), or without a format rows [N, 576].
    `plan` (workspace.Plan) says how the kernel splits; None lets it plan for these tokens. The reference never splits.
    """
    _check_sparse(q, kv, slots, cache_format, kv_scale)
    if q.is_cuda:
        from dcp_fix.attention.backends import sparse_partial_cuda

        return sparse_partial_cuda(q, kv, slots, scale, cache_format, kv_scale, plan)
    return sparse_partial_reference(q, kv, slots, scale, cache_format, kv_scale, plan)


def sparse_partial_reference(
    q: Tensor, kv: Tensor, slots: Tensor, scale: float, cache_format: str | None = None,
    kv_scale: Tensor | float | None = None, plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same in torch: gathers the packed rows of a few tokens at a time, then two batched products."""
    tokens, heads, _ = q.shape
    out, lse = q.new_zeros(tokens, heads, LATENT, dtype=torch.float32), q.new_full((tokens, heads), -torch.inf).float()
    packed, counts = pack_valid(slots)
    most = int(counts.max()) if slots.numel() else 0  # keys of the fullest token
    if most == 0:
        return out, lse
    rows, packed = _used_rows(kv, packed, cache_format, kv_scale)
    step = max(1, GATHER_FLOATS // (most * (LATENT + ROPE)))
    buffer = torch.empty(min(step, tokens) * most, LATENT + ROPE, device=q.device)
    for start in range(0, tokens, step):
        chunk = slice(start, min(start + step, tokens))
        out[chunk], lse[chunk] = _attend(q[chunk].float() * scale, rows, packed[chunk], counts[chunk], buffer)
    return out, lse


def dense_prefill(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [T, h, Dq], k [S, h, Dq], v [S, h, Dv] -> [T, h, Dv]: query t sees the keys 0 .. S - T + t."""
    _check_dense(q, k, v)
    if q.is_cuda:
        return _dense_prefill_cuda(q, k, v, scale)
    return dense_prefill_reference(q, k, v, scale)


def dense_prefill_reference(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The same in fp32, a few queries at a time; rounded to the values' type."""
    (tokens, heads, _), keys = q.shape, len(k)
    k, values = k.float().permute(1, 2, 0), v.float().transpose(0, 1)  # [h, Dq, S], [h, S, Dv]
    parts, step = [], max(1, SCORE_FLOATS // (heads * keys))
    for start in range(0, tokens, step):
        queries = q[start : start + step].float().transpose(0, 1) * scale  # [h, t, Dq]
        last = keys - tokens + start + torch.arange(queries.shape[1], device=q.device)  # the last key each one sees
        seen = int(last[-1]) + 1
        future = torch.arange(seen, device=q.device) > last[:, None]
        scores = (queries @ k[..., :seen]).masked_fill_(future, -torch.inf)
        parts.append((scores.softmax(-1) @ values[:, :seen]).transpose(0, 1))
    return torch.cat(parts).to(v.dtype) if parts else v.new_empty(0, heads, v.shape[-1])


def _dense_prefill_cuda(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """torch's fused attention, with the causal mask aligned to the last key."""
    from torch.nn.attention.bias import causal_lower_right

    mask = causal_lower_right(len(q), len(k))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    with ONE_AT_A_TIME:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1)


def _attend(q: Tensor, rows: Tensor, packed: Tensor, counts: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled q [t, H, 576], rows fp32 [N, 576], packed ids [t, K], counts [t] -> out [t, H, 512], lse [t, H]."""
    tokens, width = len(q), max(1, int(counts.max()))
    ids = packed[:, :width]
    ids = torch.where(ids >= 0, ids, ids[:, :1].clamp(min=0))  # a hole repeats a key of its own row: 0 x NaN is NaN
    keys = torch.index_select(rows, 0, ids.flatten(), out=buffer[: tokens * width]).view(tokens, width, -1)
    scores = torch.bmm(q, keys.transpose(1, 2))  # [t, H, width]
    scores.masked_fill_((torch.arange(width, device=q.device) >= counts[:, None])[:, None], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    out, lse = torch.bmm(weights, keys[..., :LATENT]).div_(total), (top + total.log()).squeeze(-1)
    empty = (counts == 0)[:, None]
    return out.masked_fill_(empty[..., None], 0.0), lse.masked_fill_(empty, -torch.inf)


def _used_rows(kv, packed, cache_format, kv_scale):
    """fp32 rows [N, 576] and the indices into them that `packed` names; of a paged cache only the rows in use."""
    if cache_format is None:
        return kv.float(), packed
    used = torch.zeros(kv.shape[0] * kv.shape[1], dtype=torch.bool, device=kv.device)
    used[packed[packed >= 0]] = True
    place = used.cumsum(0) - 1
    rows = read_latent(kv, used.nonzero().squeeze(1), cache_format, kv_scale)
    return rows, torch.where(packed >= 0, place[packed.clamp(min=0)], -1)


def _check_sparse(q, kv, slots, cache_format, kv_scale):
    if q.ndim != 3 or q.shape[2] != LATENT + ROPE or slots.ndim != 2 or len(slots) != len(q):
        raise ValueError(
            f"sparse_partial needs q [T, H, 576] and slots [T, K], got {list(q.shape)}, {list(slots.shape)}"
        )
    if cache_format is not None:
        check_latent_cache(kv, cache_format, kv_scale)
    elif kv.ndim != 2 or kv.shape[1] != LATENT + ROPE or not kv.dtype.is_floating_point:
        raise ValueError(f"without a cache_format kv is rows [N, 576] of floats, got {kv.dtype} {list(kv.shape)}")


def _check_dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    if k.shape[1:] != q.shape[1:] or v.shape[:2] != k.shape[:2] or len(k) < len(q):
        raise ValueError(
            "dense_prefill needs q [T, h, Dq], k [S, h, Dq], v [S, h, Dv] with S >= T, "
            f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
