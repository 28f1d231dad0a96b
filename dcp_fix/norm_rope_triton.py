"""Fused norm and RoPE, the Triton kernel: jobs, formulas and signature of norm_rope.py, one program per (token, job).

    grid (T, 4)   job 0 query     reads q [Lq]                                 writes q_out [Lq]
                  job 1 latent    reads kv [512], k_pe [64], one cos/sin row   writes kv_out, kpe_out, one cache entry
                  job 2 index     reads k [128], one cos/sin row               writes 128 fp8 and one fp32 scale
                  job 3 top-k     reads nothing                                writes -1 [topk]
    grid (T, 2)   without an indexer: jobs 0 and 1

Every effect stands under its own guard. The query and the top-k reset stand under none, so that they run on every rank;
the dense key rows ask whether the caller wants them; each cache write asks for a slot in *its* slot mapping.

Loads and stores run over consecutive elements. RoPE therefore keeps each element where it is and loads its partner a
second time (from L1) instead of shuffling pairs. Fused multiply-add is off and divisions are exact: the rotation then
rounds as in the reference, and only the order of the sums in the norms differs. Tokens and slots are 64-bit before they
meet a stride.

Byte layouts: `latent_views` and `index_views` of kv_cache.py cut the caches into typed fields, and the kernel sees only
those. fp8 needs compute capability 8.9. TRITON_INTERPRET=1 must be set before this module is imported; the interpreter
rounds bf16 and fp8 wrongly, so the bytes of those are only to be trusted on a GPU.
Not here: programmatic dependent launch, tuning beyond Hopper.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcp_fix.kv_cache import (
    FLT_MIN,
    FP8_MAX,
    INDEX_AMAX_MIN,
    INDEX_DIM,
    LATENT,
    ROPE,
    TILE,
    TILES,
    index_views,
    latent_views,
)
from dcp_fix.norm_rope_inputs import IndexerInputs, check_inputs, index_slots

# Kernels may read module globals only as constexpr.
_LATENT = tl.constexpr(LATENT)
_ROPE = tl.constexpr(ROPE)
_TILE = tl.constexpr(TILE)
_TILES = tl.constexpr(TILES)
_FP8_MAX = tl.constexpr(FP8_MAX)
_FLT_MIN = tl.constexpr(FLT_MIN)
_INDEX_DIM = tl.constexpr(INDEX_DIM)
_INDEX_AMAX_MIN = tl.constexpr(INDEX_AMAX_MIN)


@triton.jit
def _load(row, element):
    return tl.load(row + element).to(tl.float32)


@triton.jit
def _mean(x, DIM: tl.constexpr):
    return tl.div_rn(tl.sum(x, axis=0), DIM)


@triton.jit
def _reciprocal_root(mean_square, eps):
    """Correctly rounded, unlike tl.rsqrt: one number per token costs nothing and keeps close to the reference."""
    return tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))


@triton.jit
def _slot_of(slot_mapping, token):
    return tl.load(slot_mapping + token).to(tl.int64)


@triton.jit
def _table_row(cos_sin, cos_sin_stride, table_rows, positions, token):
    """The token's row of the cos/sin table, clamped: padded rows may carry any position."""
    position = tl.load(positions + token).to(tl.int64)
    return cos_sin + tl.minimum(tl.maximum(position, 0), table_rows - 1) * cos_sin_stride


@triton.jit
def _partner(element, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The other element of the pair: 0 <-> 1 when interleaved, 0 <-> HALF when split in halves."""
    if INTERLEAVED:
        return element ^ 1
    else:
        return tl.where(element < HALF, element + HALF, element - HALF)


@triton.jit
def _rotate(x, partner, element, table_row, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotates elements 0 .. 2 * HALF - 1 of x and leaves the rest."""
    rotated = element < 2 * HALF
    pair = element // 2 if INTERLEAVED else element % HALF
    first = element % 2 == 0 if INTERLEAVED else element < HALF
    cos = tl.load(table_row + pair, mask=rotated, other=1.0).to(tl.float32)
    sin = tl.load(table_row + HALF + pair, mask=rotated, other=0.0).to(tl.float32)
    return tl.where(rotated, x * cos + tl.where(first, -partner, partner) * sin, x)


@triton.jit
def _query_job(token, q, q_stride, q_weight, q_out, q_out_stride, eps, Q_DIM: tl.constexpr, Q_BLOCK: tl.constexpr):
    # Fix of defect 1: no slot in sight. Queries are not sharded, every rank needs every row (vLLM issue 50095).
    element = tl.arange(0, Q_BLOCK)
    inside = element < Q_DIM
    x = tl.load(q + token * q_stride + element, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(q_weight + element, mask=inside, other=0.0).to(tl.float32)
    scale = _reciprocal_root(_mean(x * x, Q_DIM), eps)
    tl.store(q_out + token * q_out_stride + element, x * scale * weight, mask=inside)


@triton.jit
def _write_entry(
    latent, key, slot, cache_latent, latent_block, latent_entry, cache_rope, rope_block, rope_entry,
    tile_scales, scales_block, scales_entry, kv_scale, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    block, entry = slot // BLOCK_SIZE, slot % BLOCK_SIZE  # 64-bit, as slot is
    latent_row = cache_latent + block * latent_block + entry * latent_entry + tl.arange(0, _LATENT)
    rope_row = cache_rope + block * rope_block + entry * rope_entry + tl.arange(0, _ROPE)
    if tile_scales is not None:  # fp8_ds_mla
        tiles = tl.reshape(latent, (_TILES, _TILE))
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(tiles), axis=1), _FP8_MAX), _FLT_MIN)
        latent = tl.reshape(tl.div_rn(tiles, scale[:, None]), (_LATENT,))
        tl.store(tile_scales + block * scales_block + entry * scales_entry + tl.arange(0, _TILES), scale)
    elif kv_scale is not None:  # fp8, one scale for the tensor
        scale = tl.load(kv_scale)
        latent, key = tl.div_rn(latent, scale), tl.div_rn(key, scale)
    tl.store(latent_row, latent.to(cache_latent.dtype.element_ty))
    tl.store(rope_row, key.to(cache_rope.dtype.element_ty))


@triton.jit
def _latent_job(
    token, positions, slot_mapping, kv, kv_stride, kv_weight, k_pe, k_pe_stride, cos_sin, cos_sin_stride, table_rows,
    eps, kv_out, kv_out_stride, kpe_out, kpe_out_stride,
    cache_latent, latent_block, latent_entry, cache_rope, rope_block, rope_entry,
    tile_scales, scales_block, scales_entry, kv_scale, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    slot = tl.full((), -1, tl.int64)
    if slot_mapping is not None:
        slot = _slot_of(slot_mapping, token)
    # Fix of defect 3: a negative slot ends the job only where nobody asked for the dense rows (vLLM issue 54907).
    wanted = slot >= 0
    if kv_out is not None or kpe_out is not None:
        wanted = True
    if wanted:
        element = tl.arange(0, _LATENT)
        x = _load(kv + token * kv_stride, element)
        scale = _reciprocal_root(_mean(x * x, _LATENT), eps)
        latent = x * scale * _load(kv_weight, element)

        element = tl.arange(0, _ROPE)
        row = k_pe + token * k_pe_stride
        partner = _load(row, _partner(element, _ROPE // 2, True))
        table_row = _table_row(cos_sin, cos_sin_stride, table_rows, positions, token)
        key = _rotate(_load(row, element), partner, element, table_row, _ROPE // 2, True)

        if kv_out is not None:
            tl.store(kv_out + token * kv_out_stride + tl.arange(0, _LATENT), latent)
        if kpe_out is not None:
            tl.store(kpe_out + token * kpe_out_stride + element, key)
        if slot_mapping is not None:  # known when compiling: without it the cache pointers are None
            if slot >= 0:
                _write_entry(
                    latent, key, slot, cache_latent, latent_block, latent_entry, cache_rope, rope_block, rope_entry,
                    tile_scales, scales_block, scales_entry, kv_scale, BLOCK_SIZE,
                )  # fmt: skip


@triton.jit
def _layer_norm(x, mean, scale, weight, bias, element):
    return (x - mean) * scale * _load(weight, element) + _load(bias, element)


@triton.jit
def _index_job(
    token, positions, slot_mapping, k, k_stride, weight, bias, eps, cos_sin, cos_sin_stride, table_rows,
    cache_keys, cache_scales, keys_block, scales_block,
    BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    slot = _slot_of(slot_mapping, token)  # the indexer's own: its cache may be sharded differently
    if slot >= 0:
        element = tl.arange(0, _INDEX_DIM)
        row = k + token * k_stride
        x = _load(row, element)
        mean = _mean(x, _INDEX_DIM)
        scale = _reciprocal_root(_mean((x - mean) * (x - mean), _INDEX_DIM), eps)
        normed = _layer_norm(x, mean, scale, weight, bias, element)

        partner = tl.where(element < 2 * HALF, _partner(element, HALF, INTERLEAVED), element)
        normed_partner = _layer_norm(_load(row, partner), mean, scale, weight, bias, partner)
        table_row = _table_row(cos_sin, cos_sin_stride, table_rows, positions, token)
        key = _rotate(normed, normed_partner, element, table_row, HALF, INTERLEAVED)

        # Next power of two above amax / 448: any mantissa bit carries into the exponent.
        amax = tl.maximum(tl.max(tl.abs(key), axis=0), _INDEX_AMAX_MIN)
        bits = tl.div_rn(amax, _FP8_MAX).to(tl.int32, bitcast=True) + 0x007FFFFF
        key_scale = (bits & 0x7F800000).to(tl.float32, bitcast=True)
        block, entry = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        codes = tl.div_rn(key, key_scale).to(cache_keys.dtype.element_ty)
        tl.store(cache_keys + block * keys_block + entry * _INDEX_DIM + element, codes)
        tl.store(cache_scales + block * scales_block + entry, key_scale)


@triton.jit
def _topk_job(token, topk_indices, topk_stride, TOPK: tl.constexpr, TOPK_BLOCK: tl.constexpr):
    column = tl.arange(0, TOPK_BLOCK)
    tl.store(topk_indices + token * topk_stride + column, -1, mask=column < TOPK)


@triton.jit
def fused_norm_rope_kernel(
    positions, eps, q, q_stride, q_weight, q_out, q_out_stride,
    kv, kv_stride, kv_weight, k_pe, k_pe_stride, cos_sin, cos_sin_stride, table_rows,
    Q_DIM: tl.constexpr, Q_BLOCK: tl.constexpr,
    # dense outputs
    kv_out=None, kv_out_stride=None, kpe_out=None, kpe_out_stride=None,
    # latent cache
    slot_mapping=None, cache_latent=None, latent_block=None, latent_entry=None, cache_rope=None, rope_block=None,
    rope_entry=None, tile_scales=None, scales_block=None, scales_entry=None, kv_scale=None,
    BLOCK_SIZE: tl.constexpr = None,
    # indexer
    index_slots=None, index_k=None, index_k_stride=None, index_weight=None, index_bias=None, index_eps=None,
    index_cos_sin=None, index_cos_sin_stride=None, index_table_rows=None,
    index_keys=None, index_scales=None, index_keys_block=None, index_scales_block=None,
    INDEX_BLOCK_SIZE: tl.constexpr = None, INDEX_HALF: tl.constexpr = None, INDEX_INTERLEAVED: tl.constexpr = None,
    # top-k buffer
    topk_indices=None, topk_stride=None, TOPK: tl.constexpr = None, TOPK_BLOCK: tl.constexpr = None,
):  # fmt: skip
    """What is None is known when compiling: its branch is not in the program."""
    token = tl.program_id(0).to(tl.int64)
    job = tl.program_id(1)
    if job == 0:
        _query_job(token, q, q_stride, q_weight, q_out, q_out_stride, eps, Q_DIM, Q_BLOCK)
    elif job == 1:
        _latent_job(
            token, positions, slot_mapping, kv, kv_stride, kv_weight, k_pe, k_pe_stride, cos_sin, cos_sin_stride,
            table_rows, eps, kv_out, kv_out_stride, kpe_out, kpe_out_stride,
            cache_latent, latent_block, latent_entry, cache_rope, rope_block, rope_entry,
            tile_scales, scales_block, scales_entry, kv_scale, BLOCK_SIZE,
        )  # fmt: skip
    elif job == 2:
        if index_slots is not None:
            _index_job(
                token, positions, index_slots, index_k, index_k_stride, index_weight, index_bias, index_eps,
                index_cos_sin, index_cos_sin_stride, index_table_rows,
                index_keys, index_scales, index_keys_block, index_scales_block,
                INDEX_BLOCK_SIZE, INDEX_HALF, INDEX_INTERLEAVED,
            )  # fmt: skip
    else:
        if topk_indices is not None:
            _topk_job(token, topk_indices, topk_stride, TOPK, TOPK_BLOCK)


def fused_norm_rope_triton(
    positions: Tensor,
    q: Tensor,
    q_weight: Tensor,
    kv: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    cos_sin: Tensor,
    *,
    eps: float,
    slot_mapping: Tensor | None = None,
    kv_cache: Tensor | None = None,
    cache_format: str = "fp8_ds_mla",
    kv_scale: Tensor | None = None,
    q_out: Tensor | None = None,
    kv_out: Tensor | None = None,
    kpe_out: Tensor | None = None,
    indexer: IndexerInputs | None = None,
    topk_indices: Tensor | None = None,
) -> Tensor:
    """`fused_norm_rope` as one launch; arguments, result and errors as there. Never waits for the device."""
    check_inputs(
        positions, q, q_weight, kv, kv_weight, k_pe, cos_sin, slot_mapping, kv_cache, cache_format, kv_scale, q_out,
        kv_out, kpe_out, indexer, topk_indices,
    )  # fmt: skip
    q_out = torch.empty_like(q) if q_out is None else q_out
    if len(q) == 0:
        return q_out
    optional = {}
    if kv_cache is not None and slot_mapping is not None:  # a profiling run has no slots
        optional |= _latent_arguments(slot_mapping, kv_cache, cache_format, kv_scale)
    if index_slots(indexer, slot_mapping) is not None:
        optional |= _index_arguments(indexer, index_slots(indexer, slot_mapping))
    if indexer is not None and topk_indices is not None:
        optional |= _topk_arguments(topk_indices)
    fused_norm_rope_kernel[(len(q), 2 if indexer is None else 4)](
        positions=positions, eps=eps, q=q, q_stride=q.stride(0), q_weight=q_weight, q_out=q_out,
        q_out_stride=q_out.stride(0), kv=kv, kv_stride=kv.stride(0), kv_weight=kv_weight, k_pe=k_pe,
        k_pe_stride=k_pe.stride(0), cos_sin=cos_sin, cos_sin_stride=cos_sin.stride(0), table_rows=len(cos_sin),
        Q_DIM=q.shape[1], Q_BLOCK=triton.next_power_of_2(q.shape[1]),
        kv_out=kv_out, kv_out_stride=_stride(kv_out), kpe_out=kpe_out, kpe_out_stride=_stride(kpe_out),
        **optional, num_warps=2, enable_fp_fusion=False,  # of 1, 2, 4 and 8 warps, 2 are fastest on an H200
    )  # fmt: skip
    return q_out


def _latent_arguments(slot_mapping: Tensor, kv_cache: Tensor, cache_format: str, kv_scale: Tensor | None) -> dict:
    latent, rope, scales = latent_views(kv_cache, cache_format)
    return {
        "slot_mapping": slot_mapping, "BLOCK_SIZE": kv_cache.shape[1], "kv_scale": kv_scale,
        "cache_latent": latent, "latent_block": _stride(latent), "latent_entry": _stride(latent, 1),
        "cache_rope": rope, "rope_block": _stride(rope), "rope_entry": _stride(rope, 1),
        "tile_scales": scales, "scales_block": _stride(scales), "scales_entry": _stride(scales, 1),
    }  # fmt: skip


def _index_arguments(indexer: IndexerInputs, slots: Tensor) -> dict:
    keys, scales = index_views(indexer.cache)
    table = indexer.cos_sin
    return {
        "index_slots": slots, "INDEX_BLOCK_SIZE": indexer.cache.shape[1],
        "index_k": indexer.k, "index_k_stride": _stride(indexer.k),
        "index_weight": indexer.weight, "index_bias": indexer.bias, "index_eps": indexer.eps,
        "index_cos_sin": table, "index_cos_sin_stride": _stride(table), "index_table_rows": len(table),
        "INDEX_HALF": table.shape[1] // 2, "INDEX_INTERLEAVED": indexer.interleaved,
        "index_keys": keys, "index_keys_block": _stride(keys),
        "index_scales": scales, "index_scales_block": _stride(scales),
    }  # fmt: skip


def _topk_arguments(topk_indices: Tensor) -> dict:
    topk = topk_indices.shape[1]
    block = triton.next_power_of_2(topk)
    return {"topk_indices": topk_indices, "topk_stride": _stride(topk_indices), "TOPK": topk, "TOPK_BLOCK": block}


def _stride(x: Tensor | None, dim: int = 0) -> int | None:
    return None if x is None else x.stride(dim)
