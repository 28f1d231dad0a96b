"""Sparse MLA partial through FlashMLA's sparse kernels, as a vLLM wheel ships them.

Two of them are of use, both in bf16, heads padded to 64, lse natural, +inf or -inf for a token without key:

    prefill(q, rows, packed, counts, scale)       rows decoded once; takes the length of every token's packed slots
    decode(q, cache, slots, scale)                fp8_ds_mla entries; walks every column it is given, holes too

The first spends nothing on holes. The second is fed packed slots cut to a width known beforehand (Plan.width); what a
token has beyond it spill.py adds. Neither waits for the device, so a CUDA graph can hold both, and no key is dropped.
The output is rounded to bf16 once more, half an ulp.
It does not: import vllm, or decide when it attends (backends.py).
"""

from pathlib import Path

import torch
from torch import Tensor

from dcp_fix.attention.kernel import decode_rows, pack
from dcp_fix.attention.spill import with_spill
from dcp_fix.base.errors import UserError
from dcp_fix.combine.kernel import merge
from dcp_fix.kv_cache import LATENT

LIBRARY = "vllm/_flashmla_C.abi3.so"
HEADS = 64  # it computes this many, or twice as many


class FlashMLA:
    """FlashMLA's operators, under the names and shapes of this package."""

    def __init__(self, operators) -> None:
        self.operators = operators
        self.schedules: dict = {}  # of decode, by sizes: how the kernel deals pieces of its work to multiprocessors

    def prefill(self, q: Tensor, rows: Tensor, packed: Tensor, counts: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """q bf16 [T, H, 576], rows bf16 [N, 576], packed int32 [T, K], counts int32 [T] -> out bf16, lse fp32."""
        out, _, lse = self.operators.sparse_prefill_fwd(
            padded(q), rows[:, None], packed[:, None], scale, LATENT, None, counts, None
        )
        return out[:, : q.shape[1]], lse[:, : q.shape[1]]

    def decode(self, q: Tensor, cache: Tensor, slots: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """q bf16 [T, H, 576], cache uint8 [B, 64, 656], slots int32 [T, W] -> out bf16 [T, H, 512], lse fp32 [T, H]."""
        padded_q = padded(q)
        sizes = *padded_q.shape, slots.shape[1], q.device
        out, lse, *schedule = self.operators.sparse_decode_fwd(
            padded_q[None], cache[..., None, :], slots[None], None, None, *self.schedules.get(sizes, (None, None)),
            None, None, None, LATENT, scale, None,
        )  # fmt: skip
        if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):  # what a graph allocates is the graph's
            self.schedules[sizes] = schedule
        return out[0, :, : q.shape[1]], lse[0, : q.shape[1]].T


def load(root: Path) -> FlashMLA:
    """FlashMLA of the vLLM in this folder. Raises UserError where there is none, or none that this torch can load."""
    library = root / LIBRARY
    if not library.exists():
        raise UserError(f"{root}: no {LIBRARY} in it; name a folder that a vLLM wheel was unpacked or installed into")
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise UserError(f"{library}: cannot be loaded ({error}); it wants the torch that its vLLM pins") from error
    return FlashMLA(torch.ops._flashmla_C)


def by_prefill(
    flashmla: FlashMLA, q: Tensor, kv: Tensor, slots: Tensor, scale: float, cache_format: str,
    kv_scale: Tensor | float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """attention.sparse_partial: the cache decoded, then one call."""
    value_scale = 1.0 if kv_scale is None else float(kv_scale)
    rows, (packed, counts) = decode_rows(kv, cache_format, q.dtype), pack(slots, tail=-1)
    out, lse = flashmla.prefill(q, rows, packed, counts, scale * value_scale)
    out, lse = merge(
        out[None], faults_told(lse, counts > 0)[None]
    )  # of one partial: fp32, the marks of "no key" made neutral, in one pass
    return out if value_scale == 1.0 else out.mul_(value_scale), lse


def by_decode(
    flashmla: FlashMLA, q: Tensor, cache: Tensor, slots: Tensor, scale: float, width: int
) -> tuple[Tensor, Tensor]:
    """The same over a cache of fp8_ds_mla: slots packed and cut to `width`, the rest added."""
    if width == slots.shape[1]:
        out, lse = flashmla.decode(q, cache, slots.int(), scale)
        return merge(out[None], faults_told(lse, (slots >= 0).any(1))[None])
    packed, counts = pack(slots, tail=-1)
    out, lse = flashmla.decode(q, cache, packed[:, :width], scale)
    return with_spill(q, cache, "fp8_ds_mla", packed, counts, width, scale, out, faults_told(lse, counts > 0))


def faults_told(lse: Tensor, holds_keys: Tensor) -> Tensor:
    """lse [T, H] with NaN for +inf where a token holds keys [T]: FlashMLA says +inf of "no key" and of a NaN alike."""
    return torch.where((lse == torch.inf) & holds_keys[:, None], torch.nan, lse)


def padded(q: Tensor) -> Tensor:
    """q with zero heads up to a multiple of 64."""
    missing = -q.shape[1] % HEADS
    return torch.nn.functional.pad(q, (0, 0, 0, missing)) if missing else q.contiguous()
