"""Query gather and LSE combine: whole attention out of the partial attention of each KV shard.

Rank r attends with the query heads of every rank over the keys that it owns, which gives (out_r, lse_r) with

    lse_r = log sum_j exp(s_j)          over rank r's keys, natural logarithm; -inf if it has none
    out_r = sum_j exp(s_j - lse_r) v_j

and the whole is   w_r = exp(lse_r - m),  m = max_r lse_r,   out = sum_r (w_r / sum w) out_r,   lse = m + log sum w.

Neutral element: out 0, lse -inf, for a shard without a key. FlashMLA marks that shard with lse = +inf and leaves its
output undefined, so +inf becomes -inf at the door and a zero weight *selects* its output away: 0 x NaN is NaN. An lse
of NaN is no mark but a fault, in a query or a key, and makes the whole NaN.

Shapes: T tokens, H heads of the whole group, h = H / P of one rank, P ranks or other partials, D value width. All in
fp32, products before sums, sums in rank order: `ag_rs`, `a2a` and `merge_partials` give the same bits.

The reference is torch, and what CPUs run; CUDA tensors go to kernel.py.

It does not: compute attention (attention/), or choose what to exchange by itself: the caller names the method.
Source: vLLM issue 50095, PR 50005 and PR 52377; the merge is that of split-KV flash decoding.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dcp_fix.ranks.group import Group

NEUTRAL = (0.0, float("-inf"))  # (out, lse) of no keys
BASES = {"e": 1.0, "2": math.log(2.0)}  # natural logarithm = BASES[base] * logarithm in that base
Partial = Callable[[Tensor], tuple[Tensor, Tensor]]  # q [T, H, Dq] -> (out [T, H, D], natural lse [T, H])


def clean_lse(lse: Tensor) -> Tensor:
    """fp32, with the mark of FlashMLA for "no key", +inf, turned into -inf. NaN stays: it is a fault, no mark."""
    lse = lse.float()
    return lse.masked_fill(lse == math.inf, NEUTRAL[1])


def to_natural(lse: Tensor, base: str) -> Tensor:
    """An lse in base "e" (FlashMLA) or "2" (FlashInfer, trtllm) as a natural one, in fp32: convert once, and only here.

    Widened before the multiplication: a bf16 product would be rounded to a step of 1/32 between 4 and 8.
    """
    if base not in BASES:
        raise ValueError(
            f"lse base {base!r} is not one of {', '.join(map(repr, BASES))}; ask the kernel's documentation"
        )
    return lse.float() * BASES[base]


def merge_weights(lse: Tensor) -> tuple[Tensor, Tensor]:
    """lse [P, T, H] -> (weights [P, T, H] that sum to 1, or are all 0 where every partial is neutral; lse [T, H])."""
    lse = clean_lse(lse)
    top = lse.amax(0)
    weights = (lse - torch.where(top == NEUTRAL[1], 0.0, top)).exp()
    total = weights[0].clone()
    for weight in weights[1:]:
        total += weight
    return weights / torch.where(total == 0, 1.0, total), top + total.log()


def weighted(out: Tensor, weight: Tensor) -> Tensor:
    """weight * out in fp32, where a weight of zero gives zero whatever `out` holds. out [T, H, D], weight [T, H]."""
    weight = weight[..., None]
    return (out.float() * weight).masked_fill_(weight == 0, 0.0)


def merge_partials(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """out [P, T, H, D], natural lse [P, T, H] -> (out fp32 [T, H, D], lse fp32 [T, H])."""
    weights, merged_lse = merge_weights(lse)
    merged = weighted(out[0], weights[0])
    for part, weight in zip(out[1:], weights[1:], strict=True):
        merged += weighted(part, weight)
    return merged, merged_lse


def query_gather(q: Tensor, group: Group, out: Tensor | None = None) -> Tensor:
    """q [T, h, D] of this rank's heads -> [T, H, D] of every rank's, in rank order."""
    return group.all_gather(q, dim=1, out=out)


def combine_ag_rs(out: Tensor, lse: Tensor, group: Group, result: Tensor | None = None) -> Tensor:
    """All-gather the lse, weigh the own out, reduce-scatter over heads. out [T, H, D], lse [T, H] -> fp32 [T, h, D].

    On a GPU the reduce-scatter is an all-to-all of the terms and a sum in rank order.
    """
    if out.is_cuda:
        from dcp_fix.combine import kernel as kernels

        lses = group.all_gather(lse.float()[None])
        return kernels.total(group.all_to_all(kernels.weigh(out, lses, group.rank, torch.float32)), result)
    weights, _ = merge_weights(group.all_gather(clean_lse(lse)[None]))
    return group.reduce_scatter(weighted(out, weights[group.rank]), dim=1, out=result)


def combine_a2a(out: Tensor, lse: Tensor, group: Group, result: Tensor | None = None) -> Tensor:
    """Send each rank its heads' outputs and lse, merge what arrives. out [T, H, D], lse [T, H] -> fp32 [T, h, D]."""
    (tokens, heads, width), ranks = out.shape, group.size
    if out.is_cuda:
        from dcp_fix.combine import kernel as kernels

        arrived = group.all_to_all(kernels.to_wire(out, lse, ranks, torch.float32))
        parts = kernels.from_wire(arrived, tokens, heads // ranks, width, torch.float32)
        return kernels.merge(*parts, result, want_lse=False)[0]
    outs, lses = (group.all_to_all(by_receiver(x, ranks)) for x in (out.float(), clean_lse(lse)))
    merged, _ = merge_partials(outs, lses)
    return merged if result is None else result.copy_(merged)


def by_receiver(x: Tensor, ranks: int) -> Tensor:
    """[T, H, ...] -> [P, T, h, ...]: row s holds the heads of rank s."""
    return x.unflatten(1, (ranks, -1)).transpose(0, 1)


METHODS = {"ag_rs": combine_ag_rs, "a2a": combine_a2a}


class CombineManager:
    """The query gather and the combine of one rank, with the buffers of small batches kept.

    A decode-only batch of at most `max_rows` tokens lands in a direct workspace, allocated once, so that addresses stay
    the same from step to step (a CUDA graph needs that). Such a result is a view that the next call overwrites. Any
    other batch takes the plain collective: a batch larger than the workspace is neither an error nor cut short.
    """

    methods: Mapping[str, Callable[..., Tensor]] = METHODS

    def __init__(self, group: Group, method: str = "ag_rs", max_rows: int = 0) -> None:
        if method not in self.methods:
            raise ValueError(f"combine method {method!r} is not one of {', '.join(self.methods)}")
        self.group, self.method, self.max_rows = group, method, max_rows
        self.workspace: dict[tuple, Tensor] = {}

    def path(self, rows: int, decode_only: bool) -> str:
        """Which way a batch goes: "direct" or "plain"."""
        return "direct" if decode_only and rows <= self.max_rows else "plain"

    def query_gather(self, q: Tensor, decode_only: bool = False) -> Tensor:
        """q [T, h, D] -> [T, H, D]."""
        tokens, heads, width = q.shape
        return query_gather(
            q, self.group, self._direct("q", q, (tokens, heads * self.group.size, width), q.dtype, decode_only)
        )

    def combine(self, out: Tensor, lse: Tensor, decode_only: bool = False) -> Tensor:
        """out [T, H, D], natural lse [T, H] -> fp32 [T, h, D]."""
        tokens, heads, width = out.shape
        if lse.shape != out.shape[:2] or heads % self.group.size:
            raise ValueError(
                f"combine needs out [T, H, D] and lse [T, H] with H divisible by {self.group.size} ranks, "
                f"got out {list(out.shape)} and lse {list(lse.shape)}"
            )
        result = self._direct("out", out, (tokens, heads // self.group.size, width), torch.float32, decode_only)
        return self.methods[self.method](out, lse, self.group, result)

    def _direct(self, name, like, shape, dtype, decode_only):
        """The workspace's first rows, or None where the plain collective allocates."""
        tokens, *row = shape
        if self.path(tokens, decode_only) == "plain":
            return None
        key = (name, *row, dtype, like.device)
        if key not in self.workspace:
            self.workspace[key] = torch.empty(self.max_rows, *row, dtype=dtype, device=like.device)
        return self.workspace[key][:tokens]


def attend_routed(q: Tensor, partial: Partial, manager: CombineManager, decode_only: bool = False) -> Tensor:
    """q [T, h, Dq] of this rank's heads -> their whole attention, fp32 [T, h, D].

    `partial` maps a query [T, H, Dq] to (out, lse) over this rank's keys. The gather and the combine belong to every
    group with more than one KV shard; upstream ran them under prefill context parallelism only (vLLM issue 50095,
    PR 50005).
    """
    out, lse = partial(manager.query_gather(q, decode_only))
    return manager.combine(out, lse, decode_only)
