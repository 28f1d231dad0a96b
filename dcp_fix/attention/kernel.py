"""Sparse MLA partial, the Triton kernels: formula, shapes and signature of reference.py's `sparse_partial`.

    _pack     grid (T)                            slots [K] of a token -> its valid ones first, and their count
    _attend   grid (T * ceil(H / BLOCK_H), S)     one token, a block of heads, one of S pieces of its packed slots
    _merge    grid (T * H, 512 / COLUMNS)         only where S > 1: the S partials of a head into one
    _decode   grid (slots / DECODED_ROWS)         only where the plan says so: an fp8 cache as rows, once for all tokens

A program walks over its packed slots BLOCK_K at a time: gather rows, dequantise, two products, online softmax (base 2
inside, natural logarithm out). Work is proportional to the *count* of valid slots, so a DCP4 rank pays a quarter. The
products take the query's type: bf16 goes to the tensor cores with fp32 accumulators, fp32 stays IEEE. Tile scales of
fp8_ds_mla are applied in fp32 and the entry rounded to that type once; the one scale of "fp8" is applied to the scores
and to the result.

A row of a block that lies beyond the count repeats the last valid slot and gets score -inf: nothing that was not
selected is read, so no load needs a mask. Slots are 64-bit before they meet a stride (slot 3,273,604 of 656 bytes is
the first to pass 2**31). Splits and accumulators come from workspace.py: where nothing is split, the result is
written directly and no accumulator exists.

TRITON_INTERPRET=1 must be set before this module is imported; the interpreter is only to be trusted with fp32 queries.
Not here: when it attends (backends.py), warp specialisation, reading fp8 straight into the tensor cores.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcp_fix import workspace
from dcp_fix.base.interpreter import check_interpreter
from dcp_fix.kv_cache import LATENT, ROPE, TILE, TILES, latent_views

FEW_HEADS = 16  # of a program, also of more heads where that many programs have a multiprocessor each
LONG_PIECE = 1024  # slots of a program
HOLED_SLOTS = 64  # up to here a piece is read with its holes: packing it would be a launch that costs more
MERGED_COLUMNS = 128  # of the output, a program of _merge
DECODED_ROWS = 16  # a program of _decode
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}  # of queries and products

# Kernels may read module globals only as constexpr.
_LATENT = tl.constexpr(LATENT)
_ROPE = tl.constexpr(ROPE)
_TILE = tl.constexpr(TILE)
_TILES = tl.constexpr(TILES)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _pack(slots, packed, counts, topk, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    slot = tl.load(slots + token * topk + column, mask=column < topk, other=-1)
    valid = slot >= 0
    place, count = tl.cumsum(valid.to(tl.int32), axis=0) - 1, tl.sum(valid.to(tl.int32), axis=0)
    tl.store(packed + token * topk + place, slot.to(tl.int32), mask=valid)
    if TAIL is not None:
        tl.store(packed + token * topk + column, TAIL, mask=(column >= count) & (column < topk))
    tl.store(counts + token, count)


@triton.jit
def _rows(
    slot, latent, latent_block, rope, rope_block, scales, scales_block,
    BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, LATENT_ENTRY: tl.constexpr, ROPE_ENTRY: tl.constexpr,
    SCALES_ENTRY: tl.constexpr, TYPE: tl.constexpr, HOLES: tl.constexpr, OPAQUE: tl.constexpr = False,
):  # fmt: skip
    """The cache rows at int64 `slot` [BLOCK_K]: latents [BLOCK_K, 512] times their tile's scale, keys [BLOCK_K, 64].

    With HOLES a negative slot gives zeros and nothing is read for it. With OPAQUE the compiler cannot see through the
    conversion: else, for mma.sync, it moves it behind the way through shared memory, once for each product, and loads
    the codes synchronously.
    """
    held = (slot >= 0)[:, None] if HOLES else None
    nothing = 0.0 if HOLES else None
    slot = tl.maximum(slot, 0) if HOLES else slot
    block, entry = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    at = block * latent_block + entry * LATENT_ENTRY
    keys = tl.load(latent + at[:, None] + tl.arange(0, _LATENT)[None, :], mask=held, other=nothing)
    at = block * rope_block + entry * ROPE_ENTRY
    rotated = tl.load(rope + at[:, None] + tl.arange(0, _ROPE)[None, :], mask=held, other=nothing)
    if SCALES_ENTRY > 0:  # fp8_ds_mla: one scale per tile of the latent
        at = block * scales_block + entry * SCALES_ENTRY
        scale = tl.load(scales + at[:, None] + tl.arange(0, _TILES)[None, :], mask=held, other=nothing)
        keys = tl.reshape(
            tl.reshape(keys.to(tl.float32), [BLOCK_K, _TILES, _TILE]) * scale[:, :, None], [BLOCK_K, _LATENT]
        )
    keys = keys.to(TYPE)
    if OPAQUE:
        keys = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [keys], dtype=keys.dtype, is_pure=False, pack=2)
    return keys, rotated.to(TYPE)


@triton.jit
def _walk(
    q, q_token, q_head, token, head, heads, packed, begin, end, scale, value_scale,
    latent, latent_block, rope, rope_block, scales, scales_block,
    BLOCK_SIZE: tl.constexpr, LATENT_ENTRY: tl.constexpr, ROPE_ENTRY: tl.constexpr, SCALES_ENTRY: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, TYPE: tl.constexpr, HOLES: tl.constexpr = False,
):  # fmt: skip
    """The partial of one token's heads [BLOCK_H] over its slots begin .. end - 1: out [BLOCK_H, 512], lse.

    With HOLES the slots are as given, without they are packed.
    """
    OPAQUE: tl.constexpr = BLOCK_H < 64 and TYPE != tl.float32 and latent.dtype.element_ty != TYPE
    row = q + token * q_token + head[:, None] * q_head
    own = head[:, None] < heads
    q_latent = tl.load(row + tl.arange(0, _LATENT)[None, :], mask=own, other=0.0)
    q_rope = tl.load(row + _LATENT + tl.arange(0, _ROPE)[None, :], mask=own, other=0.0)

    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, _LATENT], tl.float32)
    for start in range(begin, end, BLOCK_K):
        place = start + tl.arange(0, BLOCK_K)
        slot = tl.load(packed + tl.minimum(place, end - 1)).to(tl.int64)
        keys, rotated = _rows(
            slot, latent, latent_block, rope, rope_block, scales, scales_block,
            BLOCK_SIZE, BLOCK_K, LATENT_ENTRY, ROPE_ENTRY, SCALES_ENTRY, TYPE, HOLES, OPAQUE,
        )  # fmt: skip
        scores = tl.dot(q_latent, tl.trans(keys), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(rotated), scores, input_precision="ieee")
        live = place < end
        if HOLES:
            live = live & (slot >= 0)
        scores = tl.where(live[None, :], scores * (scale * _LOG2_E), float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        finite = tl.where(new_top == float("-inf"), 0.0, new_top) if HOLES else new_top  # a block of nothing but holes
        weights = tl.exp2(scores - finite[:, None])
        keep = tl.exp2(top - finite)
        total = total * keep + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(TYPE), keys, acc * keep[:, None], input_precision="ieee")
        top = new_top

    empty = total == 0  # no key: the neutral element, selected, since 0 / 0 is NaN. A NaN is none, and goes on
    result = tl.where(empty[:, None], 0.0, acc / total[:, None] * value_scale)
    return result, tl.where(empty, float("-inf"), (top + tl.log2(total)) * _LN_2)


@triton.jit
def _attend(
    q, q_token, q_head, packed, counts, out, lse, tokens, heads, topk, scale, value_scale,
    latent, latent_block, rope, rope_block, scales, scales_block,
    BLOCK_SIZE: tl.constexpr, LATENT_ENTRY: tl.constexpr, ROPE_ENTRY: tl.constexpr, SCALES_ENTRY: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, TYPE: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    head_blocks = tl.cdiv(heads, BLOCK_H)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(1)

    # This program's piece of the slots: whole blocks, so that only the last piece has a ragged one.
    count = topk if HOLES else tl.load(counts + token)
    span = tl.cdiv(tl.cdiv(count, SPLITS), BLOCK_K) * BLOCK_K
    begin = split * span
    end = tl.minimum(count, begin + span)
    result, natural = _walk(
        q, q_token, q_head, token, head, heads, packed + token * topk, begin, end, scale, value_scale,
        latent, latent_block, rope, rope_block, scales, scales_block,
        BLOCK_SIZE, LATENT_ENTRY, ROPE_ENTRY, SCALES_ENTRY, BLOCK_H, BLOCK_K, TYPE, HOLES,
    )  # fmt: skip
    at = (split.to(tl.int64) * tokens + token) * heads + head
    tl.store(out + at[:, None] * _LATENT + tl.arange(0, _LATENT)[None, :], result, mask=head[:, None] < heads)
    tl.store(lse + at, natural, mask=head < heads)


@triton.jit
def _merge(parts, part_lse, out, lse, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, COLUMNS: tl.constexpr):
    """combine.merge_partials for one head of one token, splits in order; COLUMNS of the output a program."""
    at, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    logs = tl.load(part_lse + split * rows + at, mask=split < SPLITS, other=float("-inf"))
    top = tl.max(logs, axis=0)
    weights = tl.exp(logs - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, axis=0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = (split * rows + at)[:, None] * _LATENT + column[None, :]
    values = tl.load(parts + place, mask=weights[:, None] != 0, other=0.0)  # a weight of zero selects: 0 x NaN is NaN
    merged = tl.sum(values * weights[:, None], axis=0) / tl.where(total == 0, 1.0, total)
    tl.store(out + at * _LATENT + column, merged)
    tl.store(lse + at, top + tl.log(total), mask=tl.program_id(1) == 0)


@triton.jit
def _decode(
    latent, latent_block, rope, rope_block, scales, scales_block, rows, capacity,
    BLOCK_SIZE: tl.constexpr, LATENT_ENTRY: tl.constexpr, ROPE_ENTRY: tl.constexpr, SCALES_ENTRY: tl.constexpr,
    BLOCK_K: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    keys, rotated = _rows(
        tl.minimum(slot, capacity - 1), latent, latent_block, rope, rope_block, scales, scales_block,
        BLOCK_SIZE, BLOCK_K, LATENT_ENTRY, ROPE_ENTRY, SCALES_ENTRY, TYPE, False,
    )  # fmt: skip
    row, held = rows + slot[:, None] * (_LATENT + _ROPE), (slot < capacity)[:, None]
    tl.store(row + tl.arange(0, _LATENT)[None, :], keys, mask=held)
    tl.store(row + _LATENT + tl.arange(0, _ROPE)[None, :], rotated, mask=held)


def sparse_partial_triton(
    q: Tensor, kv: Tensor, slots: Tensor, scale: float, cache_format: str | None = None,
    kv_scale: Tensor | float | None = None, plan: workspace.Plan | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """attention.sparse_partial as up to four launches; arguments, result and errors as there. Never waits for the
    device. Without a plan it makes one, that may decode the cache.
    """
    (tokens, heads, _), topk = q.shape, slots.shape[1]
    if not q.is_cuda:
        check_interpreter()
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty(tokens, heads, LATENT, device=q.device)
    lse = torch.empty(tokens, heads, device=q.device)
    if tokens == 0 or topk == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    fp8 = cache_format not in (None, "bf16")
    plan = plan or planned(q, kv, topk, cache_format)
    if tokens > plan.token_chunk or heads > plan.heads:
        raise ValueError(f"{tokens} tokens of {heads} heads do not fit {plan}: pass the tokens of one chunk")
    value_scale = 1.0 if kv_scale is None else float(kv_scale)
    if plan.decoded and fp8:
        kv, cache_format = decode_rows(kv, cache_format, q.dtype), None
    accumulators = workspace.allocate(plan, q.device)
    part, part_lse = accumulators if plan.splits > 1 else (out, lse)  # memory for [splits, T, H]: at least that large
    holes = topk <= plan.splits * HOLED_SLOTS
    packed, counts = (slots.contiguous(), None) if holes else pack(slots)
    alone = tokens * plan.splits * triton.cdiv(heads, FEW_HEADS) <= workspace.num_sms(q.device)
    blocks = block_sizes(heads, q.dtype, kv.dtype == q.dtype, alone, plan.width // plan.splits)
    grid = (tokens * triton.cdiv(heads, blocks["BLOCK_H"]), plan.splits)
    _attend[grid](
        q, q.stride(0), q.stride(1), packed, counts, part, part_lse, tokens, heads, topk, scale * value_scale,
        value_scale, **cache_arguments(kv, cache_format), SPLITS=plan.splits, TYPE=TYPES[q.dtype], HOLES=holes,
        **blocks,
    )  # fmt: skip
    if plan.splits > 1:
        _merge[(tokens * heads, LATENT // MERGED_COLUMNS)](
            part, part_lse, out, lse, SPLITS=plan.splits, BLOCK_S=triton.next_power_of_2(plan.splits),
            COLUMNS=MERGED_COLUMNS,
        )  # fmt: skip
    return out, lse


def planned(q: Tensor, kv: Tensor, topk: int, cache_format: str | None) -> workspace.Plan:
    """The plan of a caller that has none: for these tokens and this GPU, with no budget; it may decode the cache."""
    may_decode = cache_format not in (None, "bf16") and q.dtype != torch.float32
    capacity = kv.shape[0] * kv.shape[1] if may_decode else 0
    return workspace.plan(q.shape[0], q.shape[1], topk, workspace.num_sms(q.device), capacity=capacity)


def pack(slots: Tensor, tail: int | None = None) -> tuple[Tensor, Tensor]:
    """ownership.pack_valid in one kernel: int32 [T, K] whose tail is `tail` or left unwritten, counts int32 [T]."""
    (tokens, topk), slots = slots.shape, slots.contiguous()
    packed = torch.empty(tokens, topk, dtype=torch.int32, device=slots.device)
    counts = torch.empty(tokens, dtype=torch.int32, device=slots.device)
    _pack[(tokens,)](slots, packed, counts, topk, BLOCK=triton.next_power_of_2(topk), TAIL=tail)
    return packed, counts


def decode_rows(kv: Tensor, cache_format: str, dtype: torch.dtype) -> Tensor:
    """Every row of an fp8 cache by its slot, in the queries' type: [B * block_size, 576]. A row is what the attention
    kernel itself would make of the entry, bit for bit; the one scale of "fp8" stays out, as there.
    """
    capacity = kv.shape[0] * kv.shape[1]
    rows = torch.empty(capacity, LATENT + ROPE, dtype=dtype, device=kv.device)
    _decode[(triton.cdiv(capacity, DECODED_ROWS),)](
        **cache_arguments(kv, cache_format), rows=rows, capacity=capacity, BLOCK_K=DECODED_ROWS, TYPE=TYPES[dtype],
        num_warps=4,
    )  # fmt: skip
    return rows


def block_sizes(heads: int, dtype: torch.dtype, plain: bool = False, alone: bool = False, piece: int = 0) -> dict:
    """Heads and keys per step, warps, pipeline depth: as large as sm_90 has registers and shared memory for.

    The accumulator [64, 512] alone takes half the registers of 8 warps. `plain` rows go to shared memory as they are,
    and registers are left for 64 keys a step. Rows that are converted pass through registers: with up to 32 heads one
    step at a time of two or three programs a multiprocessor beats a pipeline within one; a program that is `alone` on
    its multiprocessor, and one of 64 heads with a long `piece` of slots to walk, take 128 keys in one step instead.
    """
    if dtype == torch.float32:
        return {"BLOCK_H": 16, "BLOCK_K": 16, "num_warps": 8, "num_stages": 1}
    block = FEW_HEADS if alone or heads <= 16 else 32 if heads <= 32 else 64
    if plain:
        return {"BLOCK_H": block, "BLOCK_K": 64, "num_warps": 8 if alone or block == 64 else 4, "num_stages": 2}
    if alone:
        return {"BLOCK_H": FEW_HEADS, "BLOCK_K": 128 if piece > 64 else 64, "num_warps": 8, "num_stages": 1}
    if heads <= 32:
        return {"BLOCK_H": FEW_HEADS, "BLOCK_K": 64, "num_warps": 4, "num_stages": 1}
    long = piece >= LONG_PIECE
    return {"BLOCK_H": 64, "BLOCK_K": 128 if long else 32, "num_warps": 8, "num_stages": 1 if long else 2}


def cache_arguments(kv: Tensor, cache_format: str | None) -> dict:
    """The cache's typed fields and strides. Entry strides are constants, so that the compiler knows their alignment."""
    if cache_format is None:  # rows [N, 576]: blocks of one
        kv, cache_format = kv[:, None], "bf16"
    latent, rope, scales = latent_views(kv, cache_format)
    return {
        "latent": latent, "latent_block": latent.stride(0), "LATENT_ENTRY": latent.stride(1),
        "rope": rope, "rope_block": rope.stride(0), "ROPE_ENTRY": rope.stride(1),
        "scales": scales, "scales_block": 0 if scales is None else scales.stride(0),
        "SCALES_ENTRY": 0 if scales is None else scales.stride(1),
        "BLOCK_SIZE": kv.shape[1],
    }  # fmt: skip
