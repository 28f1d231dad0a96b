"""Sparse MLA partial, a second backend: FlashMLA's sparse kernels as a vLLM wheel ships them, where a user names one.

    flashmla = load(Path("site-packages"))        the folder that holds vllm/_flashmla_C.abi3.so
    use(flashmla)                                 from now on it attends where `way` says that it is faster

Two of its kernels are of use, both in bf16, heads padded to 64, lse natural, +inf or -inf for a token without key:

    prefill(q, rows, packed, counts, scale)       rows unpacked once; takes the length of every token's packed slots
    decode(q, cache, slots, scale)                fp8_ds_mla entries; walks every column it is given, holes too

Many tokens take the first: it spends nothing on holes. Few tokens, for which nothing is unpacked, take the second, fed
packed slots cut to a width known beforehand (Plan.width); what a token has beyond it spill.py adds. Neither
waits for the device, so a CUDA graph can hold both, and no key is dropped.

Its decode allocates accumulators of its own, one partial for each piece of its schedule and one for each token, which
no plan counts (workspace.py tells that story): so it is taken for MOST tokens at most.
Source of the table behind `way`: h200_kernels_bench, KERNELS.md. The output is rounded to bf16 once more, half an ulp.
It does not: import vllm, or look for one by itself.
"""

from pathlib import Path

import torch
from torch import Tensor

from dcp_fix.attention import kernel as attention_kernel
from dcp_fix.attention.kernel import pack, unpack
from dcp_fix.attention.spill import with_spill
from dcp_fix.base.errors import UserError
from dcp_fix.combine.kernel import merge
from dcp_fix.kv_cache import LATENT
from dcp_fix.workspace import Plan

LIBRARY = "vllm/_flashmla_C.abi3.so"
HEADS = 64  # it computes this many, or twice as many
PAYS_ABOVE = 32  # heads, below 64 it pads; where every key is here, above 16
FEWEST, MOST = 8, 512  # tokens of a decode
WIDE, PADDED_FEWEST = 1024, 32  # columns and tokens from which on a decode pays for 17 to 32 heads too
CHOSEN: list = []  # the one backend in use, or nothing


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


def use(backend: FlashMLA | None) -> None:
    """Make `backend` the one that `sparse_partial_chosen` may take; None: none."""
    CHOSEN[:] = [] if backend is None else [backend]


def way(plan: Plan, tokens: int, heads: int, dtype: torch.dtype, cache_format: str | None) -> str:
    """ "prefill" or "decode" where a backend is in use and was measured faster with it, else "here"."""
    if not CHOSEN or dtype != torch.bfloat16 or cache_format in (None, "bf16"):
        return "here"
    if plan.unpacked:
        return "prefill" if heads > (PAYS_ABOVE if plan.ranks > 1 else 16) else "here"
    pays = tokens >= FEWEST if heads > PAYS_ABOVE else heads > 16 and plan.width >= WIDE and tokens >= PADDED_FEWEST
    return "decode" if pays and tokens <= MOST and cache_format == "fp8_ds_mla" else "here"


def sparse_partial_chosen(q, kv, slots, scale, cache_format=None, kv_scale=None, plan=None) -> tuple[Tensor, Tensor]:
    """attention.sparse_partial on a GPU, by the backend in use where that is faster, else by kernel.py."""
    plan = plan or attention_kernel.planned(q, kv, slots.shape[1], cache_format)
    chosen = way(plan, *q.shape[:2], q.dtype, cache_format)
    if chosen == "here" or slots.numel() == 0:
        return attention_kernel.sparse_partial_triton(q, kv, slots, scale, cache_format, kv_scale, plan)
    if chosen == "prefill":
        return by_prefill(q, kv, slots, scale, cache_format, kv_scale)
    return by_decode(q, kv, slots, scale, plan.width)


def by_prefill(q, kv, slots, scale: float, cache_format: str, kv_scale) -> tuple[Tensor, Tensor]:
    """The cache unpacked, then one call."""
    value_scale = 1.0 if kv_scale is None else float(kv_scale)
    rows, (packed, counts) = unpack(kv, cache_format, q.dtype), pack(slots, tail=-1)
    out, lse = CHOSEN[0].prefill(q, rows, packed, counts, scale * value_scale)
    out, lse = merge(out[None], lse[None])  # of one partial: fp32, the marks of "no key" made neutral, in one pass
    return out if value_scale == 1.0 else out.mul_(value_scale), lse


def by_decode(q, cache, slots, scale: float, width: int) -> tuple[Tensor, Tensor]:
    """A cache of fp8_ds_mla, slots packed and cut to `width`, the rest added; what has no holes is not packed."""
    if width == slots.shape[1]:
        out, lse = CHOSEN[0].decode(q, cache, slots.int(), scale)
        return merge(out[None], lse[None])
    packed, counts = pack(slots, tail=-1)
    out, lse = CHOSEN[0].decode(q, cache, packed[:, :width], scale)
    return with_spill(q, cache, "fp8_ds_mla", packed, counts, width, scale, out, lse)


def padded(q: Tensor) -> Tensor:
    """q with zero heads up to a multiple of 64."""
    missing = -q.shape[1] % HEADS
    return torch.nn.functional.pad(q, (0, 0, 0, missing)) if missing else q.contiguous()
