"""Exact mode, the arithmetic: attention whose bits do not depend on the DCP size D.

The bits of a floating-point sum depend on its order, so a sum over D shards has bits of its own for every D. Here every
order is fixed beforehand. Positions fall into C classes, (p // I) % C (ownership.class_of), C a power of two and a
multiple of D. The classes are the leaves of one binary tree, whose node (r, m) covers the classes congruent to r mod m:

    node(r, C) = one partial (out, lse) over the selected keys of class r
    node(r, m) = merge(node(r, 2m), node(r + m, 2m))                                   node(0, 1) is the attention

Rank r of D owns exactly the classes congruent to r mod D. So node(r, D) is its own to compute, alone, and it sends one
partial per head, as many bytes as the ordinary combine whatever C is. The levels above are merged where the heads are
wanted. Every D cuts the same tree at another height; with C = 8:

    (((0 4) (2 6)) ((1 5) (3 7)))          D = 2: rank 0 has ((0 4) (2 6))          D = 4: rank 0 has (0 4)

(Merging C partials in a row gives D-independent bits as well, but only if all of them are sent: C / D times the bytes.)

A leaf must not know D either. The bits of a matrix product depend on its shape, since 2 heads and 16 heads take
different ways through BLAS, and in some libraries (OpenBLAS) on the row of one shape. So a leaf is computed for the h
heads of one rank at a time and for KEYS selected keys at a time: a head and a key stand in the same row and column of
the same shape whatever D is, how many tokens come together, or how many keys a class has. What is left to trust, and
tested: a batch of products gives each the bits that it has alone, and exp and log do not care where an element stands.

Shapes: T tokens, H heads of the group, h of one rank, K selected keys, n = C / D classes of a rank, P nodes.
It does not: select keys (indexer.py has D-independent bits as it is), or give the same bits for two interleaves I: they
decide what a class is. The kernels for CUDA are in kernel.py, the engine's side in exact_attention.py.
"""

import torch
from torch import Tensor

from dcp_fix import workspace
from dcp_fix.attention.reference import _used_rows
from dcp_fix.base.errors import UserError
from dcp_fix.combine import by_receiver, clean_lse, merge_partials
from dcp_fix.kv_cache import LATENT, ROPE
from dcp_fix.ownership import pack_valid
from dcp_fix.ranks.group import Group

CLASSES = 8  # C: every DCP size up to 8
KEYS = 32  # selected keys of a class in one product
GATHER_FLOATS = 1 << 20  # of gathered rows at once: 4 MiB stay in a core's cache


def check_classes(classes: int, dcp_size: int) -> None:
    """Raise UserError unless a rank of `dcp_size` owns one whole node of the tree."""
    if classes < 1 or classes & (classes - 1):
        raise UserError(f"{classes} canonical classes; exact mode merges them in pairs: choose a power of two")
    if classes % dcp_size:
        raise UserError(
            f"a DCP size of {dcp_size} does not divide the {classes} canonical classes of exact mode; choose 1, 2, 4 "
            "... as DCP size, or more classes"
        )


def plan(tokens: int, heads: int, topk: int, classes: int, num_sms: int, budget_bytes: int) -> workspace.Plan:
    """Splits per class and tokens per chunk, of h local heads: the same at every D.

    A rank holds n = C / D leaves of H = h * D heads, so h * C partials per token and split whatever D is, and as many
    again for what they are merged into. Raises WorkspaceError if not even one token fits.
    """
    wide = heads * classes
    fit = budget_bytes // workspace.partial_bytes(wide)
    if fit < 2:
        raise workspace.WorkspaceError(
            f"one token of {heads} heads in {classes} classes needs {2 * workspace.partial_bytes(wide)} bytes of "
            f"workspace, the budget is {budget_bytes}: raise the budget or use more tensor-parallel ranks"
        )
    wanted = workspace.wanted_splits(tokens, wide, -(-topk // classes), num_sms)
    splits = 1 << max(1, min(wanted, fit // tokens - 1)).bit_length() - 1  # a power of two: the lowest levels of a tree
    return workspace.Plan(tokens, wide, topk, splits, min(tokens, fit // (1 + splits)), splits)


def merge_tree(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """P nodes of one residue, ascending, -> their common ancestor: out [P, T, H, 512], natural lse [P, T, H] -> fp32
    out [T, H, 512], lse [T, H]. On a rank the classes r, r + D, r + 2D ...; over ranks, nodes in rank order.
    """
    if out.is_cuda:
        from dcp_fix.exact.kernel import merge_tree_triton

        return merge_tree_triton(out, lse)
    return merge_tree_reference(out, lse)


def merge_tree_reference(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The same in torch, level by level: node j of P meets node j + P / 2."""
    while len(out) > 1:
        out, lse = merge_partials(out.unflatten(0, (2, -1)), lse.unflatten(0, (2, -1)))
    return out[0], lse[0]


def node_partial(
    q: Tensor, kv: Tensor, slots: Tensor, ids: Tensor, leaf_of: Tensor, classes: int, heads: int, scale: float,
    cache_format: str | None = None, kv_scale: Tensor | float | None = None, plan: workspace.Plan | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """This rank's node: q [T, H, 576] -> out fp32 [T, H, 512], natural lse fp32 [T, H].

    attention.sparse_partial, with h = `heads`, the positions `ids` int [T, K] that the slots hold, and `leaf_of` int16
    [positions]: to which of this rank's n `classes` each belongs. `plan` bounds how many tokens' leaves are held at
    once; without one, all. The node itself, H * 2052 bytes a token, is the caller's to bound.
    """
    step, splits = (plan.token_chunk, plan.splits) if plan else (len(q), 1)

    def attend(rows: slice) -> tuple[Tensor, Tensor]:
        given = (q[rows], kv, slots[rows], ids[rows], leaf_of, classes, heads, scale, cache_format, kv_scale, splits)
        return merge_tree(*leaf_partials(*given))

    if len(q) <= step:
        return attend(slice(None))
    out, lse = q.new_empty(*q.shape[:2], LATENT, dtype=torch.float32), q.new_empty(q.shape[:2], dtype=torch.float32)
    for start in range(0, len(q), step):
        rows = slice(start, start + step)
        out[rows], lse[rows] = attend(rows)
    return out, lse


def combine_exact(
    out: Tensor, lse: Tensor, group: Group, result: Tensor | None = None, transport: str = "a2a"
) -> Tensor:
    """Send each rank its heads' nodes and merge what arrives: out [T, H, 512], lse [T, H] -> fp32 [T, h, 512].

    `transport` "a2a" sends the lse in the same way, "ag_rs" gathers it whole; a reducing collective cannot follow the
    tree. The bits are the same. Over a wire narrower than fp32 D would decide which nodes are rounded.
    """
    merged, _ = merge_tree(*_exchange(out, clean_lse(lse), group, transport))
    return merged if result is None else result.copy_(merged)


def _exchange(out: Tensor, lse: Tensor, group: Group, transport: str) -> tuple[Tensor, Tensor]:
    """The nodes of this rank's heads, in rank order: out [D, T, h, 512], lse [D, T, h]."""
    (tokens, heads, width), ranks = out.shape, group.size
    if out.is_cuda and transport == "a2a":
        from dcp_fix.combine.kernel import from_wire, to_wire

        arrived = group.all_to_all(to_wire(out, lse, ranks, out.dtype))
        return from_wire(arrived, tokens, heads // ranks, width, out.dtype)
    outs, by_rank = group.all_to_all(by_receiver(out, ranks)), by_receiver(lse, ranks)
    return outs, group.all_to_all(by_rank) if transport == "a2a" else group.all_gather(by_rank[None])[:, group.rank]


# --- the leaves -------------------------------------------------------------------------------------------------------


def leaf_partials(
    q: Tensor, kv: Tensor, slots: Tensor, ids: Tensor, leaf_of: Tensor, classes: int, heads: int, scale: float,
    cache_format: str | None = None, kv_scale: Tensor | float | None = None, splits: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Each class of this rank in `splits` pieces: out fp32 [splits * n, T, H, 512], lse [splits * n, T, H], classes
    innermost. The reference never splits.
    """
    if q.is_cuda:
        from dcp_fix.exact.kernel import leaf_partials_triton as implementation
    else:
        implementation = leaf_partials_reference
    return implementation(q, kv, slots, ids, leaf_of, classes, heads, scale, cache_format, kv_scale, splits)


def leaf_partials_reference(
    q: Tensor, kv: Tensor, slots: Tensor, ids: Tensor, leaf_of: Tensor, classes: int, heads: int, scale: float,
    cache_format: str | None = None, kv_scale: Tensor | float | None = None, splits: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same in torch."""
    leaves = leaf_of[ids.clamp(min=0)]
    q = (q.float() * scale).unflatten(1, (-1, heads)).transpose(0, 1).contiguous()  # [D, T, h, 576]
    rows, slots = _used_rows(kv, slots, cache_format, kv_scale)
    parts = [_leaf(q, rows, *pack_valid(torch.where(leaves == leaf, slots, -1))) for leaf in range(classes)]
    out, lse = zip(*parts, strict=True)
    return torch.stack(out), torch.stack(lse)


def _leaf(q, rows, packed, counts):
    """Scaled q [D, T, h, 576], rows [N, 576], packed ids [T, K], counts [T] -> out [T, H, 512], lse [T, H]."""
    groups, tokens, heads, width = q.shape
    out, lse = q.new_zeros(tokens, groups * heads, LATENT), q.new_full((tokens, groups * heads), -torch.inf)
    step = GATHER_FLOATS // (KEYS * width)
    for start in range(0, tokens, step):
        chunk = slice(start, start + step)
        values, logs = _walk(q[:, chunk].contiguous(), rows, packed[chunk], counts[chunk])
        empty = counts[chunk] == 0
        out[chunk] = values.transpose(0, 1).flatten(1, 2).masked_fill_(empty[:, None, None], 0.0)
        lse[chunk] = logs.transpose(0, 1).flatten(1, 2).masked_fill_(empty[:, None], -torch.inf)
    return out, lse


def _walk(q, rows, packed, counts):
    """Online softmax over KEYS keys at a time, for all tokens alike: out [D, t, h, 512], lse [D, t, h].

    A token whose keys have ended keeps what it has, so how far the others go leaves no trace.
    """
    top, total = q.new_full(q.shape[:3], -torch.inf), q.new_zeros(q.shape[:3])
    acc, part = q.new_zeros(*q.shape[:3], LATENT), q.new_empty(*q.shape[:3], LATENT)
    scores = q.new_empty(*q.shape[:3], KEYS)
    for start in range(0, int(counts.max()), KEYS):
        live = torch.arange(start, start + KEYS) < counts[:, None]  # [t, KEYS]
        keys = _gather(rows, packed, start, live)
        for group in range(len(q)):
            torch.bmm(q[group], keys.transpose(1, 2), out=scores[group])
        scores.masked_fill_(~live[:, None], -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1))
        scores.sub_(new_top[..., None]).exp_()
        keep = (top - new_top).exp_()
        for group in range(len(q)):
            torch.bmm(scores[group], keys[..., :LATENT], out=part[group])
        part.add_(acc.mul(keep[..., None]))
        total_now = total * keep + scores.sum(-1)
        ended = ~live[:, :1]  # [t, 1]
        if ended.any():
            part, total_now = torch.where(ended[..., None], acc, part), torch.where(ended, total, total_now)
            new_top = torch.where(ended, top, new_top)
        acc, part, total, top = part, acc, total_now, new_top
    return acc.div_(total[..., None]), top + total.log()


def _gather(rows, packed, start, live):
    """The rows at columns start .. start + KEYS of `packed`: [t, KEYS, 576]; a dead one repeats the row's first key."""
    ids = torch.nn.functional.pad(packed[:, start : start + KEYS], (0, max(0, start + KEYS - packed.shape[1])))
    ids = torch.where(live, ids, packed[:, :1].clamp(min=0))  # an own key: 0 x NaN is NaN
    return rows.index_select(0, ids.flatten()).view(*ids.shape, LATENT + ROPE)
