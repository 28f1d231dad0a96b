"""Packed and cut: holes taken out of what vLLM's fp8 path hands to FlashMLA's sparse decode. Opt-in, DCP_FIX_PACK=1.

Under DCP a rank owns a part of the selected ids; vLLM leaves -1 in the place of the others, and FlashMLA spends as much
time on a hole as on a key. Here the ids of each token come first and the tensor ends with the longest row, rounded up
to 64 columns. The keys are the same in the same order, so results are, up to where FlashMLA's blocks begin.

The longest row is read on the host, which waits for it: nothing is cut while a CUDA graph is captured, nor for fewer
than MANY tokens, where waiting costs what is won. Nothing is ever dropped: a row that is longer is never cut shorter.
Source: vLLM 0.28 to 0.33, v1/attention/backends/mla/flashmla_sparse.py. Not here: the bf16 path, which packs already.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the plugin must not load torch before vLLM does
    import torch

VARIABLE = "DCP_FIX_PACK"
MODULE = "vllm.v1.attention.backends.mla.flashmla_sparse"
MANY = 256  # tokens
COLUMNS = 64  # that FlashMLA takes at a time


def hooks(asked: str) -> dict:
    """{module name: functions to call with that module}, for the value of DCP_FIX_PACK."""
    return {MODULE: [pack_and_cut]} if asked == "1" else {}


def pack_and_cut(module) -> None:
    """Wrap the FlashMLA that the backend has imported; once."""
    original = module.flash_mla_with_kvcache
    if not getattr(original, "packs", False):
        module.flash_mla_with_kvcache = packing(original, module.get_mla_metadata)


def packing(original, new_schedule):
    """`original`, given packed and cut indices where that is worth a wait; a cut call has a schedule of its own."""

    @functools.wraps(original)
    def flash_mla_with_kvcache(*args, **arguments):
        cut = shorter(arguments.get("indices"))
        if cut is not None:
            arguments |= {"indices": cut, "tile_scheduler_metadata": new_schedule()[0]}
        return original(*args, **arguments)

    flash_mla_with_kvcache.packs = True
    return flash_mla_with_kvcache


def shorter(indices: torch.Tensor | None) -> torch.Tensor | None:
    """indices int32 [B, S, K] with holes -> [B, S, W] with W < K, a multiple of 64; None where it stays as it is."""
    if indices is None or indices.shape[0] * indices.shape[1] < MANY or capturing(indices):
        return None
    from dcp_fix.attention_triton import pack

    packed, counts = pack(indices.flatten(0, 1), tail=-1)
    width = max(1, -(-int(counts.max()) // COLUMNS)) * COLUMNS
    return packed[:, :width].contiguous().view(*indices.shape[:2], width) if width < indices.shape[2] else None


def capturing(x: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured on x's device, so that the host must not wait."""
    import torch

    return x.is_cuda and torch.cuda.is_current_stream_capturing()
