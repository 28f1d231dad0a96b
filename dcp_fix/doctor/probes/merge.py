"""The target's own merge of partial attention outputs, on rows and ranks without a key.

Two ranks are run one after the other through `cp_lse_ag_out_rs` (all-gather the LSE, rescale, reduce-scatter) and
`dcp_a2a_lse_reduce` (exchange, merge locally), in both log bases. A rank without a key reports -inf, +inf (FlashMLA) or
NaN, and its output may be anything; the merge must drop it, and give (0, -inf) where no rank has a key:

    out = sum(w out) / sum(w),   w = base^(lse - max lse),   w = 0 selects the output away
"""

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from dcp_fix.doctor.attempt import NotRun, attempt, judged, one_line
from dcp_fix.doctor.unwritten import unwritten_memory_is_nan
from dcp_fix.doctor.world import World

MERGES = ("vllm.v1.attention.ops.dcp", "vllm.v1.attention.ops.common", "vllm.v1.attention.ops.dcp_alltoall")
WORLD, HEADS, DIM = 2, 2, 8
NAN, INF = math.nan, math.inf
# (what, [(sum of exp(logit), output) of each rank], the merged output); a sum of 0 means no key, and gives lse -inf
CASES = (
    ("two ranks with keys", [(2.0, 0.0), (8.0, 10.0)], 8.0),
    ("a rank without keys that reports +inf and NaN", [(INF, NAN), (2.0, 3.0)], 3.0),
    ("a rank without keys that reports -inf and NaN", [(0.0, NAN), (2.0, 3.0)], 3.0),
    ("a rank without keys that reports -inf and inf", [(2.0, 3.0), (0.0, INF)], 3.0),
    ("a rank without keys that reports NaN", [(NAN, NAN), (2.0, 3.0)], 3.0),
    ("no rank has a key, one reports +inf", [(INF, NAN), (0.0, 0.0)], 0.0),
    ("no rank has a key", [(0.0, 0.0), (0.0, 0.0)], 0.0),
)


class TwoRanks:
    """A DCP group whose other rank is run before or after, with everybody's LSE at hand."""

    world_size, device_group = WORLD, None

    def __init__(self, rank: int, lses):
        self.rank_in_group, self.lses, self.partial = rank, lses, None

    def all_gather(self, x, dim):
        return self.lses.flatten(0, 1)

    def reduce_scatter(self, x, dim):
        self.partial = x.clone()
        return x


class Sent(BaseException):
    """A rank's message is known; the rest of its merge has to wait for the others'."""


class Exchange:
    """`torch.distributed` as the all-to-all merge uses it: collects what each rank sends, then delivers."""

    def __init__(self):
        self.sent, self.rank = {}, 0

    def all_to_all_single(self, received, sent, group=None, async_op=False):
        if self.rank not in self.sent:
            self.sent[self.rank] = sent.clone()
            raise Sent
        received.copy_(torch.cat([self.sent[r].chunk(WORLD)[self.rank] for r in range(WORLD)]))
        return self

    def wait(self):
        pass


def inputs(natural: bool, device):
    """(out [N, T, H, D], lse [N, T, H]) of all CASES."""
    sums = torch.tensor([[z for z, _ in ranks] for _, ranks, _ in CASES], device=device).T
    outs = torch.tensor([[o for _, o in ranks] for _, ranks, _ in CASES], device=device).T
    lse = sums.log() if natural else sums.log2()
    return outs[:, :, None, None].expand(-1, -1, HEADS, DIM), lse[:, :, None].expand(-1, -1, HEADS).contiguous()


def merge_ag_rs(merge, outs, lses, natural):
    """(out [T, H, D], lse [T, H]): the ranks' rescaled partials, added as reduce-scatter would."""
    total: Tensor | int = 0
    lse: list[Tensor] = []
    for rank in range(WORLD):
        group = TwoRanks(rank, lses)
        _, part = merge(outs[rank].clone(), lses[rank].clone(), group, return_lse=True, is_lse_base_on_e=natural)
        total, lse = total + group.partial, [*lse, part]
    return total, torch.cat(lse, dim=1)


def merge_a2a(merge, outs, lses, natural):
    """(out [T, H, D], lse [T, H]): each rank merges its heads after the exchange."""
    exchange = Exchange()
    merge.__globals__["dist"] = exchange

    def rank_part(rank):
        exchange.rank = rank
        arguments = (outs[rank].clone(), lses[rank].clone(), TwoRanks(rank, lses))
        return merge(*arguments, return_lse=True, is_lse_base_on_e=natural)

    for rank in range(WORLD):
        with contextlib.suppress(Sent):
            rank_part(rank)
    parts = [rank_part(rank) for rank in range(WORLD)]
    return torch.cat([out for out, _ in parts], dim=1), torch.cat([lse for _, lse in parts], dim=1)


RUN = {"cp_lse_ag_out_rs": merge_ag_rs, "dcp_a2a_lse_reduce": merge_a2a}


def faults(out, lse, natural) -> list[str]:
    """Sentences about the CASES whose merged output or LSE is wrong."""
    found = []
    for row, (what, ranks, want) in enumerate(CASES):
        total = sum(z for z, _ in ranks if math.isfinite(z))
        want_lse = -INF if total == 0 else math.log(total) if natural else math.log2(total)
        if not torch.allclose(out[row], torch.full_like(out[row], want), rtol=1e-4, atol=1e-5):
            found.append(f"{what} gives {out[row].flatten()[0].item():.4g} for {want:.4g}")
        elif not torch.allclose(lse[row], torch.full_like(lse[row], want_lse), rtol=1e-4, atol=1e-5):
            found.append(f"{what} gives lse {lse[row].flatten()[0].item():.4g} for {want_lse:.4g}")
    return found


def find_merges(world: World) -> dict:
    """{name: (function, how to run it)} of the merges that the target has."""
    loaded: dict[str, Any] = {}
    for name in MERGES:
        if world.path_of(name).with_suffix(".py").is_file():
            loaded |= vars(world.load(name))
    found = {name: (loaded[name], run) for name, run in RUN.items() if name in loaded}
    if not found:
        raise NotRun(f"this vLLM has no merge that we know: no {' and no '.join(RUN)} in {', '.join(MERGES)}")
    return found


def empty_rows(merges: dict, device: str, progress) -> tuple[str, str]:
    """(verdict, evidence)"""
    found: list[str] = []
    for name, (function, run) in merges.items():
        for natural, base in ((True, "natural log"), (False, "base 2")):
            progress(f"{name}, {base}", control=not found)
            outs, lses = inputs(natural, device)
            with unwritten_memory_is_nan():
                result = attempt(lambda: run(function, outs, lses, natural))  # noqa: B023 called at once
            if result.raised:
                raise NotRun(f"{name} raises {one_line(result.raised)}")
            out, lse = result.value
            found += [f"{name} ({base}): {fault}" for fault in faults(out, lse, natural)]
    good = f"{' and '.join(merges)} drop ranks without a key and give (0, -inf) for empty rows"
    return judged(found, good)
