"""What exact mode is for, measured: one prompt at two DCP sizes, and how far each of their logits lies apart.

It does not: judge an answer, or print (notebook 07 does).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dcp_fix.base.equality import first_difference, unit_in_last_place
from dcp_fix.engine.engine import Engine, Generation
from dcp_fix.engine.model import Model
from dcp_fix.ranks.group import LocalGroup


@dataclass(frozen=True)
class Bits:
    """One way to combine at one DCP size, against the same way at the first size.

    `ulps` [steps, vocabulary]: how far each logit lies apart, in units in the last place of its own fp32 value, for the
    steps before the tokens part; 0 only where all bits are equal, NaN and the sign of zero included.
    """

    combine: str
    dcp: int
    tokens: list[int]
    digests: list[str]  # of each step's logits
    ulps: Tensor
    first_token: int | None  # that differs


def answer(model: Model, prompt: list[int], steps: int, tp: int, size: int, combine: str, **options) -> Generation:
    """One greedy answer on an engine of its own, ranks as threads."""
    options = {"max_length": len(prompt) + steps, "dcp_size": size, "combine": combine, **options}
    return LocalGroup.run(tp, lambda group: Engine(model, group, **options).generate(prompt, steps))[0]


def bits(combine: str, size: int, run: Generation, reference: Generation) -> Bits:
    """One run against the reference."""
    parted = first_difference(run.tokens, reference.tokens)
    steps = len(run.tokens) if parted is None else min(parted + 1, len(run.tokens), len(reference.tokens))
    apart = ulps_of(run.logits[:steps], reference.logits[:steps])
    return Bits(combine, size, run.tokens, run.digests, apart, parted)


def ulps_of(a: Tensor, b: Tensor) -> Tensor:
    """The distance of each pair of fp32 numbers, in units in the last place of the larger; at least the smallest
    positive number where the bits differ, and infinite where one is NaN and the other is not the same NaN.
    """
    x, y = a.double(), b.double()
    apart = ((x - y).abs() / unit_in_last_place(torch.maximum(x.abs(), y.abs()), a.dtype)).float()
    smallest = torch.finfo(torch.float32).smallest_normal
    return torch.where(
        a.view(torch.int32) == b.view(torch.int32), 0.0, apart.nan_to_num(torch.inf, torch.inf).clamp(smallest)
    )
