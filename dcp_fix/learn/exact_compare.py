"""What exact mode is for, measured: the same prompt at every DCP size, combined in the ordinary way and exactly.

`compare` says how many logits have other bits than at the first DCP size and by how many units in the last place: data
for one figure. `near_tie` makes a model on which that matters: it scales one row of the output layer so that the two
best tokens of a step lie between the logits of two DCP sizes, which then choose differently.

It does not: judge an answer, or print (notebook 07 does).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcp_fix.base.equality import first_difference, unit_in_last_place
from dcp_fix.engine.engine import Engine, Generation
from dcp_fix.engine.model import Model
from dcp_fix.ranks.group import LocalGroup

OUTPUT = "lm_head.weight"


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

    @property
    def differing(self) -> float:
        """Share of the logits with other bits."""
        return float((self.ulps > 0).float().mean())

    @property
    def furthest(self) -> float:
        """The largest distance, in ulps."""
        return float(self.ulps.max())


def compare(
    model: Model, prompt: list[int], steps: int, *, tp: int = 8, dcp: Sequence[int] = (1, 2, 4, 8),
    combines: Sequence[str] = ("a2a", "exact"), **options,
) -> list[Bits]:  # fmt: skip
    """A row per way to combine and DCP size, in that order; `options` are the engine's."""
    rows = []
    for combine in combines:
        runs = [answer(model, prompt, steps, tp, size, combine, **options) for size in dcp]
        rows += [bits(combine, size, run, runs[0]) for size, run in zip(dcp, runs, strict=True)]
    return rows


def answer(model: Model, prompt: list[int], steps: int, tp: int, size: int, combine: str, **options) -> Generation:
    """One greedy answer on an engine of its own, ranks as threads."""
    options = {"max_length": len(prompt) + steps, "dcp_size": size, "combine": combine} | options
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


def near_tie(model: Model, a: Generation, b: Generation) -> tuple[Model, int]:
    """A model that, on the same prompt, may choose another token where `a` and `b`, equal in tokens, have other bits.

    At the step (returned) where the two runs differ most between their best tokens t and u, row u of the output layer
    is scaled so that the logit of u becomes, on average of both runs, that of t: (t_a + t_b) / (u_a + u_b). Then t is
    ahead in one run and u in the other. Raises ValueError if no step will do.
    """
    ranked = a.logits.double().topk(2, -1).indices  # [steps, 2]
    of = [run.logits.double().gather(1, ranked) for run in (a, b)]
    scale = (of[0][:, 0] + of[1][:, 0]) / (of[0][:, 1] + of[1][:, 1])  # [steps]
    lead = (of[0][:, 0] - scale * of[0][:, 1]).abs()  # of t in one run, of u in the other
    lead[(scale < 1) | (scale > 2) | torch.tensor(a.tokens != b.tokens)] = 0
    step = int(lead.argmax())
    if not lead[step] > 0:
        raise ValueError("no step with other bits and two positive best logits near each other: take a longer answer")
    weights = dict(model.weights)
    weights[OUTPUT] = weights[OUTPUT].clone()
    weights[OUTPUT][ranked[step, 1]] *= float(scale[step])
    return Model(model.config, weights), step
