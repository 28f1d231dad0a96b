"""Exact mode, the Triton kernels: leaves and merges of reference.py's tree.

    _pack_classes   grid (T, n)                         slots [K] of a token -> its valid ones class by class
    _attend_leaf    grid (T * ceil(H / BLOCK_H), S n)   one token, a block of heads, one of S pieces of one class
    _merge_node     grid (T * H)                        P nodes of one head of one token into their common ancestor

A leaf is the walk of attention/kernel.py over the slots of one class. BLOCK_H and BLOCK_K are the same at every D, so a
head goes through tensor-core tiles of one shape. In which row of a tile it lies depends on D; tensor cores compute rows
alike, which the GPU tests check (products of numpy, and so the interpreter, do not). The classes take the place of
splits; a class is split further as exact.plan says, from the heads of one rank, since a plan must not know D. So a
small batch at a large D may occupy fewer multiprocessors than the ordinary plan would.

A leaf is computed among another number of heads, tokens and classes under every D, so those are run-time numbers for
which nothing is specialised (do_not_specialize): one compiled kernel serves them all. Merging is compiled for each P,
and the same pair of nodes is merged inside a rank under one D and between ranks under the next, so products are not
fused into sums (enable_fp_fusion=False): that would be the compiler's choice each time.

TRITON_INTERPRET=1 must be set before this module is imported; the interpreter is only to be trusted with fp32 queries.
Not here: merging the classes of a rank inside the attention kernel, which would save writing C / D partials.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcp_fix.attention.kernel import _LATENT, TYPES, _walk, block_sizes, cache_arguments
from dcp_fix.base.interpreter import check_interpreter
from dcp_fix.kv_cache import LATENT

HEADS = 64  # what every D asks the block sizes for


@triton.jit(do_not_specialize=["classes"])
def _pack_classes(slots, ids, leaf_of, packed, ends, topk, classes, BLOCK: tl.constexpr):
    token, own = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    slot = tl.load(slots + token * topk + column, mask=column < topk, other=-1)
    valid = slot >= 0
    position = tl.load(ids + token * topk + column, mask=valid, other=0)
    leaf = tl.load(leaf_of + position, mask=valid, other=0).to(tl.int32)
    before = tl.sum((valid & (leaf < own)).to(tl.int32), axis=0)
    mine = valid & (leaf == own)
    place = before + tl.cumsum(mine.to(tl.int32), axis=0) - 1
    tl.store(packed + token * topk + place, slot.to(tl.int32), mask=mine)
    row = ends + token * (classes + 1)
    tl.store(row + own, before)
    tl.store(row + classes, before + tl.sum(mine.to(tl.int32), axis=0), mask=own == classes - 1)


@triton.jit(do_not_specialize=["tokens", "heads", "splits", "classes"])
def _attend_leaf(
    q, q_token, q_head, packed, ends, out, lse, tokens, heads, topk, splits, classes, scale, value_scale,
    latent, latent_block, rope, rope_block, scales, scales_block,
    BLOCK_SIZE: tl.constexpr, LATENT_ENTRY: tl.constexpr, ROPE_ENTRY: tl.constexpr, SCALES_ENTRY: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    head_blocks = tl.cdiv(heads, BLOCK_H)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    node = tl.program_id(1)  # classes innermost
    split, own = node // classes, node % classes

    # Counted from the start of the class, so that its blocks are the same wherever its slots lie in the row.
    first = tl.load(ends + token * (classes + 1) + own)
    count = tl.load(ends + token * (classes + 1) + own + 1) - first
    span = tl.cdiv(tl.cdiv(count, splits), BLOCK_K) * BLOCK_K
    begin = split * span
    end = tl.minimum(count, begin + span)
    result, natural = _walk(
        q, q_token, q_head, token, head, heads, packed + token * topk + first, begin, end, scale, value_scale,
        latent, latent_block, rope, rope_block, scales, scales_block,
        BLOCK_SIZE, LATENT_ENTRY, ROPE_ENTRY, SCALES_ENTRY, BLOCK_H, BLOCK_K, TYPE,
    )  # fmt: skip
    at = (node.to(tl.int64) * tokens + token) * heads + head
    tl.store(out + at[:, None] * _LATENT + tl.arange(0, _LATENT)[None, :], result, mask=head[:, None] < heads)
    tl.store(lse + at, natural, mask=head < heads)


@triton.jit
def _ancestor(parts, stride, logs, log_stride, at, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr):
    """The ancestor of the nodes FIRST, FIRST + STEP ..., COUNT of them: out [512] and lse of one head."""
    if COUNT == 1:
        place = parts + FIRST * stride + at * _LATENT
        return tl.load(place + tl.arange(0, _LATENT)), tl.load(logs + FIRST * log_stride + at)
    else:
        out_a, lse_a = _ancestor(parts, stride, logs, log_stride, at, FIRST, 2 * STEP, COUNT // 2)
        out_b, lse_b = _ancestor(parts, stride, logs, log_stride, at, FIRST + STEP, 2 * STEP, COUNT // 2)
        return _merge_pair(out_a, lse_a, out_b, lse_b)


@triton.jit
def _merge_pair(out_a, lse_a, out_b, lse_b):
    """combine.merge_partials of two."""
    top = tl.maximum(lse_a, lse_b)
    finite_top = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp(lse_a - finite_top), tl.exp(lse_b - finite_top)
    total = weight_a + weight_b
    share = tl.where(total == 0, 1.0, total)
    return weight_a / share * out_a + weight_b / share * out_b, top + tl.log(total)  # an empty leaf is 0, never NaN


@triton.jit(do_not_specialize=["log_stride"])
def _merge_node(parts, stride, logs, log_stride, out, lse, NODES: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    result, natural = _ancestor(parts, stride.to(tl.int64), logs, log_stride.to(tl.int64), at, 0, 1, NODES)
    tl.store(out + at * _LATENT + tl.arange(0, _LATENT), result)
    tl.store(lse + at, natural)


def leaf_partials_triton(
    q: Tensor, kv: Tensor, slots: Tensor, ids: Tensor, leaf_of: Tensor, classes: int, heads: int, scale: float,
    cache_format: str | None = None, kv_scale: Tensor | float | None = None, splits: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """exact.leaf_partials. All heads of the group go through one grid; `heads`, those of a rank, matter to none."""
    (tokens, total, _), topk = q.shape, slots.shape[1]
    if not q.is_cuda:
        check_interpreter()
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty(splits * classes, tokens, total, LATENT, device=q.device)
    lse = torch.empty(splits * classes, tokens, total, device=q.device)
    if tokens == 0 or topk == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    packed, ends = pack_classes(slots, ids, leaf_of, classes)
    blocks, value_scale = block_sizes(HEADS, q.dtype), 1.0 if kv_scale is None else float(kv_scale)
    _attend_leaf[tokens * triton.cdiv(total, blocks["BLOCK_H"]), splits * classes](
        q, q.stride(0), q.stride(1), packed, ends, out, lse, tokens, total, topk, splits, classes, scale * value_scale,
        value_scale, **cache_arguments(kv, cache_format), TYPE=TYPES[q.dtype], enable_fp_fusion=False, **blocks,
    )  # fmt: skip
    return out, lse


def pack_classes(slots: Tensor, ids: Tensor, leaf_of: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The valid slots of each token, class after class: int32 [T, K] whose tail is left unwritten, and where each class
    begins and the last one ends: int32 [T, n + 1]. Looked up here: a launch of its own costs more.
    """
    (tokens, topk), slots, ids = slots.shape, slots.contiguous(), ids.contiguous()
    packed = torch.empty(tokens, topk, dtype=torch.int32, device=slots.device)
    ends = torch.empty(tokens, classes + 1, dtype=torch.int32, device=slots.device)
    block = triton.next_power_of_2(topk)
    _pack_classes[tokens, classes](slots, ids, leaf_of, packed, ends, topk, classes, BLOCK=block)
    return packed, ends


def merge_tree_triton(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """exact.merge_tree: out [P, T, H, 512], lse [P, T, H] -> out [T, H, 512], lse [T, H]."""
    if len(out) == 1:
        return out[0], lse[0]
    out, lse = (x if x[0].is_contiguous() else x.contiguous() for x in (out, lse))
    merged, merged_lse = torch.empty_like(out[0]), torch.empty_like(lse[0])
    if merged_lse.numel():
        _merge_node[(merged_lse.numel(),)](
            out, out.stride(0), lse, lse.stride(0), merged, merged_lse, NODES=len(out), enable_fp_fusion=False
        )
    return merged, merged_lse
