"""Sparse MLA partial over the slots that a fixed width left over, merged with the partial over those within it.

    _spill    grid (T * ceil(H / 16))    one token, 16 heads: slots width .. count - 1 of its packed ones, if any

A kernel that walks every column it is given, holes too, wants a width close to the number of keys. While a CUDA graph
is captured nobody knows that number, and waiting for it costs more than it wins where tokens are few. So such a kernel
gets a width that nearly every token fits (workspace.expected_columns) and this one takes what lies beyond: a program
whose token fits finds out by one load and leaves. No key is dropped, however many there are.

TRITON_INTERPRET=1 must be set before this module is imported; the interpreter is only to be trusted with fp32 queries.
It does not: pack slots (kernel.pack), or attend to what lies within the width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcp_fix.attention.kernel import TYPES, _walk, cache_arguments
from dcp_fix.base.interpreter import check_interpreter
from dcp_fix.kv_cache import LATENT

BLOCKS = {"BLOCK_H": 16, "BLOCK_K": 64, "num_warps": 4, "num_stages": 2}
_LATENT = tl.constexpr(LATENT)


@triton.jit
def _spill(
    q, q_token, q_head, packed, packed_token, counts, width, heads, scale, first, first_token, first_head,
    first_lse, first_lse_token, first_lse_head, out, out_token, out_head, lse, lse_token, lse_head,
    latent, latent_block, rope, rope_block, scales, scales_block,
    BLOCK_SIZE: tl.constexpr, LATENT_ENTRY: tl.constexpr, ROPE_ENTRY: tl.constexpr, SCALES_ENTRY: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, TYPE: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    head_blocks = tl.cdiv(heads, BLOCK_H)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    own, column = head < heads, tl.arange(0, _LATENT)[None, :]
    x_at = first + token * first_token + head[:, None] * first_head + column
    log_at = first_lse + token * first_lse_token + head * first_lse_head
    out_at = out + token * out_token + head[:, None] * out_head + column
    lse_at = lse + token * lse_token + head * lse_head
    count = tl.load(counts + token)
    if count > width:
        more, more_log = _walk(
            q, q_token, q_head, token, head, heads, packed + token * packed_token, width, count, scale, 1.0,
            latent, latent_block, rope, rope_block, scales, scales_block,
            BLOCK_SIZE, LATENT_ENTRY, ROPE_ENTRY, SCALES_ENTRY, BLOCK_H, BLOCK_K, TYPE,
        )  # fmt: skip
        log = tl.load(log_at, mask=own, other=0.0)  # of at least `width` keys, as is more_log of at least one
        x = tl.load(x_at, mask=own[:, None], other=0.0).to(tl.float32)
        top = tl.maximum(log, more_log)
        share, more_share = tl.exp(log - top), tl.exp(more_log - top)
        total = share + more_share
        x = (x * share[:, None] + more * more_share[:, None]) / total[:, None]
        tl.store(out_at, x.to(out.dtype.element_ty), mask=own[:, None])
        tl.store(lse_at, top + tl.log(total), mask=own)
    elif not IN_PLACE:
        log = tl.load(log_at, mask=own, other=0.0)
        x = tl.load(x_at, mask=own[:, None], other=0.0).to(tl.float32)
        tl.store(out_at, tl.where(count > 0, x, 0.0), mask=own[:, None])
        tl.store(lse_at, tl.where(count > 0, log, float("-inf")), mask=own)


def with_spill(
    q: Tensor, cache: Tensor, cache_format: str, packed: Tensor, counts: Tensor, width: int, scale: float,
    first: Tensor, first_lse: Tensor, in_place: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The partial over all packed slots, from that over packed[:, :width]. Never waits for the device.

    q [T, H, 576], cache as in sparse_partial, packed int32 [T, K] and counts int32 [T] of kernel.pack,
    first [T, H, 512] with its natural first_lse fp32 [T, H] -> out fp32 [T, H, 512], lse fp32 [T, H], neutral where no
    key is. `in_place` writes the rows of tokens that exceed the width into `first` and `first_lse`, and no other.
    """
    tokens, heads, _ = q.shape
    if not q.is_cuda:
        check_interpreter()
    out, lse = first, first_lse
    if not in_place:
        out, lse = torch.empty(tokens, heads, LATENT, device=q.device), torch.empty(tokens, heads, device=q.device)
    _spill[(tokens * triton.cdiv(heads, BLOCKS["BLOCK_H"]),)](
        q, *q.stride()[:2], packed, packed.stride(0), counts, width, heads, scale,
        first, *first.stride()[:2], first_lse, *first_lse.stride(), out, *out.stride()[:2], lse, *lse.stride(),
        **cache_arguments(cache, cache_format), TYPE=TYPES[q.dtype], IN_PLACE=in_place, **BLOCKS,
    )  # fmt: skip
    return out, lse
