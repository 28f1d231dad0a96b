"""Fused norm and RoPE, the Triton kernel: the jobs of reference.py, formulas as there, dealt out ROWS tokens at a time.

    ROWS programs   query, top-k   read q [Lq]                            write q_out [Lq], -1 [topk]
    1 program       latent         reads kv [512], k_pe [64], cos/sin     writes kv_out, kpe_out, a cache entry
    1 program       index          reads k [128], cos/sin                 writes 128 fp8 and one fp32 scale

Every effect stands under its own guard. The query and the top-k reset stand under none, so that they run on every rank;
the dense key rows ask whether the caller wants them; each cache write asks for a slot in *its* slot mapping.

A latent is a quarter of a query and an index key a sixteenth, so a program takes several of those: a thread then has as
many bytes on their way as in the query job, and there are fewer programs to start. The reset of the top-k row is only
stores and goes first in the program of the query, whose loads then overlap it.

Loads and stores run over consecutive elements. RoPE therefore keeps each element where it is and loads its partner a
second time (from L1) instead of shuffling pairs. Fused multiply-add is off and divisions are exact: the rotation then
rounds as in the reference, and only the order of the sums in the norms differs. Tokens and slots are 64-bit before they
meet a stride.

fp8 needs compute capability 8.9. TRITON_INTERPRET=1 must be set before this module is imported; the interpreter rounds
bf16 and fp8 wrongly, so the bytes of those are only to be trusted on a GPU.
Not here: the launch (launcher.py), programmatic dependent launch, tuning beyond Hopper.
"""

import triton
import triton.language as tl

from dcp_fix.kv_cache import FLT_MIN, FP8_MAX, INDEX_AMAX_MIN, INDEX_DIM, LATENT, ROPE, TILE, TILES

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
def _load(rows, element, wanted):
    """rows [R] of pointers, element [W] -> fp32 [R, W]; zeros where a row is not wanted."""
    return tl.load(rows[:, None] + element[None, :], mask=wanted[:, None], other=0.0).to(tl.float32)


@triton.jit
def _weights(weight, element):
    return tl.load(weight + element).to(tl.float32)[None, :]


@triton.jit
def _mean(x, DIM: tl.constexpr):
    return tl.div_rn(tl.sum(x, axis=1), DIM)


@triton.jit
def _reciprocal_root(mean_square, eps):
    """Correctly rounded, unlike tl.rsqrt: one number per token costs nothing and keeps close to the reference."""
    return tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))


@triton.jit
def _slots_of(slot_mapping, token, live):
    return tl.load(slot_mapping + token, mask=live, other=-1).to(tl.int64)


@triton.jit
def _table_rows(cos_sin, cos_sin_stride, table_rows, positions, token, wanted):
    """The tokens' rows of the cos/sin table, clamped: padded rows may carry any position."""
    position = tl.load(positions + token, mask=wanted, other=0).to(tl.int64)
    return cos_sin + tl.minimum(tl.maximum(position, 0), table_rows - 1) * cos_sin_stride


@triton.jit
def _partner(element, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The other element of the pair: 0 <-> 1 when interleaved, 0 <-> HALF when split in halves."""
    if INTERLEAVED:
        return element ^ 1
    else:
        return tl.where(element < HALF, element + HALF, element - HALF)


@triton.jit
def _rotate(x, partner, element, table, wanted, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotates elements 0 .. 2 * HALF - 1 of x [R, W] and leaves the rest; `table` [R] points to rows of cos and sin."""
    rotated = element < 2 * HALF
    pair = element // 2 if INTERLEAVED else element % HALF
    first = (element % 2 == 0 if INTERLEAVED else element < HALF)[None, :]
    mask = wanted[:, None] & rotated[None, :]
    cos = tl.load(table[:, None] + pair[None, :], mask=mask, other=1.0).to(tl.float32)
    sin = tl.load(table[:, None] + HALF + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.where(rotated[None, :], x * cos + tl.where(first, -partner, partner) * sin, x)


@triton.jit
def _query_job(token, q, q_stride, q_weight, q_out, q_out_stride, eps, Q_DIM: tl.constexpr, Q_BLOCK: tl.constexpr):
    # Fix of defect 1: no slot in sight. Queries are not sharded, every rank needs every row (vLLM issue 50095).
    element = tl.arange(0, Q_BLOCK)
    inside = element < Q_DIM
    x = tl.load(q + token * q_stride + element, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(q_weight + element, mask=inside, other=0.0).to(tl.float32)
    scale = _reciprocal_root(tl.div_rn(tl.sum(x * x, axis=0), Q_DIM), eps)
    tl.store(q_out + token * q_out_stride + element, x * scale * weight, mask=inside)


@triton.jit
def _write_entries(
    latent, key, slot, cache_latent, latent_block, latent_entry, cache_rope, rope_block, rope_entry,
    tile_scales, scales_block, scales_entry, kv_scale, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    held = (slot >= 0)[:, None]
    slot = tl.maximum(slot, 0)
    block, entry = slot // BLOCK_SIZE, slot % BLOCK_SIZE  # 64-bit, as slot is
    latent_row = (cache_latent + block * latent_block + entry * latent_entry)[:, None] + tl.arange(0, _LATENT)[None, :]
    rope_row = (cache_rope + block * rope_block + entry * rope_entry)[:, None] + tl.arange(0, _ROPE)[None, :]
    if tile_scales is not None:  # fp8_ds_mla
        tiles = tl.reshape(latent, (ROWS, _TILES, _TILE))
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(tiles), axis=2), _FP8_MAX), _FLT_MIN)
        latent = tl.reshape(tl.div_rn(tiles, scale[:, :, None]), (ROWS, _LATENT))
        scale_row = (tile_scales + block * scales_block + entry * scales_entry)[:, None]
        tl.store(scale_row + tl.arange(0, _TILES)[None, :], scale, mask=held)
    elif kv_scale is not None:  # fp8, one scale for the tensor
        scale = tl.load(kv_scale)
        latent, key = tl.div_rn(latent, scale), tl.div_rn(key, scale)
    tl.store(latent_row, latent.to(cache_latent.dtype.element_ty), mask=held)
    tl.store(rope_row, key.to(cache_rope.dtype.element_ty), mask=held)


@triton.jit
def _latent_job(
    token, live, positions, slot_mapping, kv, kv_stride, kv_weight, k_pe, k_pe_stride, cos_sin, cos_sin_stride,
    table_rows, eps, kv_out, kv_out_stride, kpe_out, kpe_out_stride,
    cache_latent, latent_block, latent_entry, cache_rope, rope_block, rope_entry,
    tile_scales, scales_block, scales_entry, kv_scale, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    slot = tl.full([ROWS], -1, tl.int64)
    if slot_mapping is not None:
        slot = _slots_of(slot_mapping, token, live)
    # Fix of defect 3: a negative slot ends the job only where nobody asked for the dense rows (vLLM issue 54907).
    wanted = slot >= 0
    if kv_out is not None or kpe_out is not None:
        wanted = live
    if tl.max(wanted.to(tl.int32), axis=0) > 0:
        element = tl.arange(0, _LATENT)
        x = _load(kv + token * kv_stride, element, wanted)
        scale = _reciprocal_root(_mean(x * x, _LATENT), eps)
        latent = x * scale[:, None] * _weights(kv_weight, element)

        element = tl.arange(0, _ROPE)
        rows = k_pe + token * k_pe_stride
        partner = _load(rows, _partner(element, _ROPE // 2, True), wanted)
        table = _table_rows(cos_sin, cos_sin_stride, table_rows, positions, token, wanted)
        key = _rotate(_load(rows, element, wanted), partner, element, table, wanted, _ROPE // 2, True)

        if kv_out is not None:
            into = (kv_out + token * kv_out_stride)[:, None] + tl.arange(0, _LATENT)[None, :]
            tl.store(into, latent, mask=live[:, None])
        if kpe_out is not None:
            tl.store((kpe_out + token * kpe_out_stride)[:, None] + element[None, :], key, mask=live[:, None])
        if slot_mapping is not None:  # known when compiling: without it the cache pointers are None
            _write_entries(
                latent, key, slot, cache_latent, latent_block, latent_entry, cache_rope, rope_block, rope_entry,
                tile_scales, scales_block, scales_entry, kv_scale, BLOCK_SIZE, ROWS,
            )  # fmt: skip


@triton.jit
def _layer_norm(x, mean, scale, weight, bias, element):
    return (x - mean[:, None]) * scale[:, None] * _weights(weight, element) + _weights(bias, element)


@triton.jit
def _index_job(
    token, live, positions, slot_mapping, k, k_stride, weight, bias, eps, cos_sin, cos_sin_stride, table_rows,
    cache_keys, cache_scales, keys_block, scales_block,
    BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    slot = _slots_of(slot_mapping, token, live)  # the indexer's own: its cache may be sharded differently
    held = slot >= 0
    if tl.max(held.to(tl.int32), axis=0) > 0:
        element = tl.arange(0, _INDEX_DIM)
        rows = k + token * k_stride
        x = _load(rows, element, held)
        mean = _mean(x, _INDEX_DIM)
        scale = _reciprocal_root(_mean((x - mean[:, None]) * (x - mean[:, None]), _INDEX_DIM), eps)
        normed = _layer_norm(x, mean, scale, weight, bias, element)

        partner = tl.where(element < 2 * HALF, _partner(element, HALF, INTERLEAVED), element)
        normed_partner = _layer_norm(_load(rows, partner, held), mean, scale, weight, bias, partner)
        table = _table_rows(cos_sin, cos_sin_stride, table_rows, positions, token, held)
        key = _rotate(normed, normed_partner, element, table, held, HALF, INTERLEAVED)

        # Next power of two above amax / 448: any mantissa bit carries into the exponent.
        amax = tl.maximum(tl.max(tl.abs(key), axis=1), _INDEX_AMAX_MIN)
        bits = tl.div_rn(amax, _FP8_MAX).to(tl.int32, bitcast=True) + 0x007FFFFF
        key_scale = (bits & 0x7F800000).to(tl.float32, bitcast=True)
        slot = tl.maximum(slot, 0)
        block, entry = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        codes = tl.div_rn(key, key_scale[:, None]).to(cache_keys.dtype.element_ty)
        into = (cache_keys + block * keys_block + entry * _INDEX_DIM)[:, None] + element[None, :]
        tl.store(into, codes, mask=held[:, None])
        tl.store(cache_scales + block * scales_block + entry, key_scale, mask=held)


@triton.jit
def _topk_job(token, topk_indices, topk_stride, TOPK: tl.constexpr, TOPK_BLOCK: tl.constexpr):
    column = tl.arange(0, TOPK_BLOCK)
    tl.store(topk_indices + token * topk_stride + column, -1, mask=column < TOPK)


@triton.jit
def fused_norm_rope_kernel(
    positions, eps, tokens, q, q_stride, q_weight, q_out, q_out_stride,
    kv, kv_stride, kv_weight, k_pe, k_pe_stride, cos_sin, cos_sin_stride, table_rows,
    Q_DIM: tl.constexpr, Q_BLOCK: tl.constexpr, ROWS: tl.constexpr,
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
    """Grid (ROWS + 2, ceil(T / ROWS)), without an index job (ROWS + 1, ...): the jobs of a group side by side. What is
    None is known when compiling: its branch is not in the program.
    """
    job, first = tl.program_id(0), tl.program_id(1).to(tl.int64) * ROWS
    if job < ROWS:
        token = first + job
        if token < tokens:
            if topk_indices is not None:
                _topk_job(token, topk_indices, topk_stride, TOPK, TOPK_BLOCK)
            _query_job(token, q, q_stride, q_weight, q_out, q_out_stride, eps, Q_DIM, Q_BLOCK)
    elif job == ROWS:
        rows = first + tl.arange(0, ROWS)
        _latent_job(
            rows, rows < tokens, positions, slot_mapping, kv, kv_stride, kv_weight, k_pe, k_pe_stride, cos_sin,
            cos_sin_stride, table_rows, eps, kv_out, kv_out_stride, kpe_out, kpe_out_stride,
            cache_latent, latent_block, latent_entry, cache_rope, rope_block, rope_entry,
            tile_scales, scales_block, scales_entry, kv_scale, BLOCK_SIZE, ROWS,
        )  # fmt: skip
    else:
        if index_slots is not None:
            group = first + tl.arange(0, ROWS)
            _index_job(
                group, group < tokens, positions, index_slots, index_k, index_k_stride, index_weight, index_bias,
                index_eps, index_cos_sin, index_cos_sin_stride, index_table_rows,
                index_keys, index_scales, index_keys_block, index_scales_block,
                INDEX_BLOCK_SIZE, INDEX_HALF, INDEX_INTERLEAVED,
            )  # fmt: skip
