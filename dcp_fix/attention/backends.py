"""Which kernel attends on a GPU: the Triton kernel here, or FlashMLA of a vLLM wheel where a user names one.

    use(flashmla.load(Path("site-packages")))     from now on it attends where `way` says that it is faster

Many tokens take FlashMLA's prefill over rows that are decoded once; few, for which nothing is decoded, its decode, and
for MOST tokens at most: it allocates accumulators of its own, which no plan counts (workspace.py tells that story).
Source of the table behind `way`: h200_kernels_bench, KERNELS.md.
It does not: look for a FlashMLA by itself, or attend (kernel.py, flashmla.py).
"""

import torch
from torch import Tensor

from dcp_fix.attention.flashmla import FlashMLA, by_decode, by_prefill
from dcp_fix.attention.kernel import planned, sparse_partial_triton
from dcp_fix.workspace import Plan

PAYS_ABOVE = 32  # heads, below 64 FlashMLA pads; where every key is here, above 16
FEWEST, MOST = 8, 512  # tokens of a decode
WIDE, PADDED_FEWEST = 1024, 32  # columns and tokens from which on a decode pays for 17 to 32 heads too
CHOSEN: list[FlashMLA] = []  # the one in use, or nothing


def use(backend: FlashMLA | None) -> None:
    """Make `backend` the one that `sparse_partial_cuda` may take; None: none."""
    CHOSEN[:] = [] if backend is None else [backend]


def way(plan: Plan, tokens: int, heads: int, dtype: torch.dtype, cache_format: str | None) -> str:
    """ "prefill" or "decode" where a FlashMLA is in use and was measured faster with it, else "here"."""
    if not CHOSEN or dtype != torch.bfloat16 or cache_format in (None, "bf16"):
        return "here"
    if plan.decoded:
        return "prefill" if heads > (PAYS_ABOVE if plan.ranks > 1 else 16) else "here"
    pays = tokens >= FEWEST if heads > PAYS_ABOVE else heads > 16 and plan.width >= WIDE and tokens >= PADDED_FEWEST
    return "decode" if pays and tokens <= MOST and cache_format == "fp8_ds_mla" else "here"


def sparse_partial_cuda(
    q: Tensor, kv: Tensor, slots: Tensor, scale: float, cache_format: str | None = None,
    kv_scale: Tensor | float | None = None, plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """attention.sparse_partial on a GPU."""
    plan = plan or planned(q, kv, slots.shape[1], cache_format)
    chosen = way(plan, len(q), q.shape[1], q.dtype, cache_format)
    if chosen == "here" or slots.numel() == 0:
        return sparse_partial_triton(q, kv, slots, scale, cache_format, kv_scale, plan)
    if chosen == "prefill":
        return by_prefill(CHOSEN[0], q, kv, slots, scale, cache_format, kv_scale)
    return by_decode(CHOSEN[0], q, kv, slots, scale, plan.width)
