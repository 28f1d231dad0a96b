"""The steps of a sublayer in their order, how far each may differ on the same input, and how that is measured.

It does not: watch a run (sublayers.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dcp_fix.base.equality import ulps_apart

STEPS = (
    "prefix hit", "lengths", "slots", "query norm", "new rows", "latent cache", "index cache", "context",
    "dense attention", "selection", "queries", "heads", "selected slots", "partial", "lse", "combine", "attention",
    "output projection", "mlp", "logits",
)  # fmt: skip
# Ulps allowed where numbers are added in another order, in fp32 ulps for ALWAYS_FP32 and in those of the model's type
# elsewhere; a step that is not here must have equal bits. Largest of healthy runs on a CPU (classes and cases, DCP 2, 4
# and 8, ag_rs and a2a, three cache formats): fp32 partial 53, lse 7, combine 10, attention 72, the rest 0, so the
# margin is three- to sevenfold. In bf16 a kernel rounds its weights to bf16 once, half an ulp, and adds scores in
# tensor cores. The planted defects that move numbers move them by 2e5 ulps and more.
BOUNDS = {
    torch.float32: {
        "dense attention": 2, "partial": 256, "lse": 32, "combine": 32, "attention": 512, "output projection": 2,
        "mlp": 2, "logits": 2,
    },
    torch.bfloat16: {
        "dense attention": 2, "partial": 4, "lse": 1024, "combine": 32, "attention": 4, "output projection": 2,
        "mlp": 2, "logits": 2,
    },
}  # fmt: skip
ALWAYS_FP32 = ("lse", "combine")


@dataclass(frozen=True)
class Finding:
    """A step of one rank that differs by more than it may. `size` in ulps, or in rows where every bit must agree."""

    batch: int
    layer: int
    step: str
    rank: int
    size: float
    bound: float
    what: str  # the batch in words
    told: str  # the difference in words

    @property
    def order(self) -> tuple:
        """Earlier in the run comes first."""
        return self.batch, self.layer, STEPS.index(self.step), self.rank


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """fp64 partials [D, n, h, 512], [D, n, h] -> their merge [n, h, 512], and the largest |summand| [n, h, 1]."""
    weights = (lses - lses.logsumexp(0).nan_to_num(neginf=0.0)).exp()[..., None]
    parts = torch.where(weights > 0, weights * outs, 0.0)
    return parts.sum(0), parts.abs().amax((0, -1)).unsqueeze(-1)


def ulps(value: Tensor, expected: Tensor, floor: Tensor, dtype: torch.dtype) -> float:
    """equality.ulps_apart in units of `dtype`, for tensors that may be wider."""
    if value.dtype == expected.dtype == dtype:
        return ulps_apart(value, expected, floor)
    return ulps_apart(value.to(torch.float32), expected.to(torch.float32), floor.float()) * (
        torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
    )


def differing_rows(a: Tensor, b: Tensor) -> float:
    """How many rows of two tensors differ in a bit; all, if shape or type do."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float(max(len(a), len(b), 1))
    if a.numel() == 0:
        return 0.0
    x, y = (t.contiguous().view(len(t), -1).view(torch.uint8) for t in (a, b))
    return float((x != y).any(1).sum())
