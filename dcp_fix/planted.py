"""Fourteen defects to plant: mistakes that others made under DCP, beside the four of broken.py.

Each stands in for one step of the corrected engine, with the signature of that function; nothing here is called unless
somebody asks for it. `dcp-fix verify --plant NAME` runs with one at every DCP size but the reference and must fail,
naming the sublayer `shows`. What is planted is the mistake, small enough to read, and no project's code.

It does not: judge (verify/), or say which releases have what (doctor/).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from dcp_fix import attention, indexer
from dcp_fix.combine import query_gather
from dcp_fix.kv_cache import BLOCK, LATENT
from dcp_fix.norm_rope import NormRopeInputs, fused_norm_rope
from dcp_fix.ownership import localise, prefix_hit, row_slots
from dcp_fix.ranks.group import Group


@dataclass(frozen=True)
class Plant:
    """A planted defect: `function` stands in for the engine's step `step` and shows in the sublayer `shows`."""

    step: str
    function: Callable
    shows: str
    who: str  # made this mistake in the field
    case: str = "sparse"  # the smallest prompt that shows it (verify/forced.py)


# --- which keys -------------------------------------------------------------------------------------------------------


class Offers(Group):
    """A group whose ranks offer only the first ceil(k / D) of their candidates to a gather."""

    def __init__(self, group: Group) -> None:
        self.group, self.size, self.rank = group, group.size, group.rank

    def all_gather(self, x: Tensor, dim: int = 0, out: Tensor | None = None) -> Tensor:
        """Candidates int64 [T, k] -> [T, D * ceil(k / D)]."""
        few = -(-x.shape[dim] // self.size)
        return self.group.all_gather(x.topk(few, dim)[0], dim, out)


def select_from_few(q, head_weights, k_local, key_positions, query_positions, k, group):
    """Each rank sends its share of k instead of k candidates: a rank that holds more of the best keys loses some."""
    return indexer.select(q, head_weights, k_local, key_positions, query_positions, k, Offers(group))


def select_by_local_id(q, head_weights, k_local, key_positions, query_positions, k, group):
    """Equal scores are ranked by where the key lies in its shard, then by rank, instead of by its position."""
    scores = indexer.index_scores(q, head_weights, k_local)
    scores = scores.masked_fill(key_positions > query_positions[:, None], -torch.inf)
    best, local = (x[:, :k] for x in scores.sort(dim=1, descending=True, stable=True))
    ids = key_positions[local].masked_fill(best == -torch.inf, indexer.HOLE)
    width = k - best.shape[1]
    fill = ((best, -torch.inf), (local, 0), (ids, indexer.HOLE))
    best, local, ids = (group.all_gather(pad(x, (0, width), value=value), dim=1) for x, value in fill)  # [T, D * k]
    order = local.argsort(dim=1, stable=True)  # of equals the lower rank's first
    order = order.gather(1, best.gather(1, order).argsort(dim=1, descending=True, stable=True)[:, :k])
    last = torch.iinfo(torch.int32).max
    ids = ids.gather(1, order).int()
    ids = ids.masked_fill(ids < 0, last).sort(1)[0]
    return ids.masked_fill(ids == last, indexer.HOLE)


def select_unmasked(q, head_weights, k_local, key_positions, query_positions, k, group):
    """A decode step in fixed memory takes the whole buffer: rows beyond its position, left by others, compete too."""
    whole = len(k_local) * group.size
    if len(q) == 1 and whole - int(query_positions[0]) > group.size * BLOCK:  # more blocks than this request has
        query_positions = torch.full_like(query_positions, whole - 1)
    return indexer.select(q, head_weights, k_local, key_positions, query_positions, k, group)


def length_without_remainder(length, dcp_size, dcp_rank, interleave=1):
    """Only whole rounds are counted: the last positions of a sequence are on no rank."""
    return length if dcp_size == 1 else length // (dcp_size * interleave) * interleave


def localise_without_interleave(topk_ids, dcp_size, dcp_rank, interleave=1):
    """The selected positions are dealt out one by one, though the cache is dealt out `interleave` at a time."""
    return localise(topk_ids, dcp_size, dcp_rank)


# --- what is cached ---------------------------------------------------------------------------------------------------


def norm_rope_from_front(inputs: NormRopeInputs) -> Tensor:
    """The rows to be cached are packed, their positions are not: row i of a rank turns by the angle of token i."""
    out, rows = fused_norm_rope(replace(inputs, kv_cache=None, kv_scale=None)), inputs.slot_mapping >= 0
    packed = {name: getattr(inputs, name)[rows] for name in ("q", "kv", "k_pe", "slot_mapping")}
    packed["positions"] = inputs.positions[: int(rows.sum())]
    cached_only = dict.fromkeys(("q_out", "kv_out", "kpe_out", "indexer", "topk_indices"))
    fused_norm_rope(replace(inputs, **packed, **cached_only))
    return out


def norm_rope_one_slot_mapping(inputs: NormRopeInputs) -> Tensor:
    """The indexer's keys go where the latents go, though its cache has blocks of its own."""
    indexer = None if inputs.indexer is None else replace(inputs.indexer, slot_mapping=None)
    return fused_norm_rope(replace(inputs, indexer=indexer))


def hit_in_one_ranks_blocks(pool, tokens, capacity):
    """A prefix hit counts in blocks of one rank, not in blocks on every rank: it claims tokens that nobody cached."""
    table, cached = pool.open(tokens, capacity)
    before, pool.asked = getattr(pool, "asked", []), list(tokens)
    shared = next((i for i, (a, b) in enumerate(zip(before, tokens[:-1], strict=False)) if a != b), None)
    shared = min(len(before), len(tokens) - 1) if shared is None else shared
    return table, max(cached, prefix_hit(shared, pool.block_size, 1) if pool.dcp_size > 1 else 0)


def context_from_first_chunk(first, rows, block_table, block_size):
    """Every chunk of a cached context is read from the start of the shard."""
    return row_slots(0, rows, block_table, block_size)


# --- partials and combine ---------------------------------------------------------------------------------------------


def partial_empty_lse_zero(q, kv, slots, scale, cache_format=None, kv_scale=None, plan=None):
    """A rank without a key says lse 0, as if it had one of score 0."""
    out, lse = attention.sparse_partial(q, kv, slots, scale, cache_format, kv_scale, plan)
    return out, lse.masked_fill((slots < 0).all(1)[:, None], 0.0)


def route_wrong_base(q, partial, manager, decode_only=False):
    """The kernel's natural lse is taken for one in base 2."""
    out, lse = partial(manager.query_gather(q, decode_only))
    return manager.combine(out, lse * math.log(2.0), decode_only)


def route_infinite_lse(q, partial, manager, decode_only=False):
    """The kernel marks a rank without a key by lse = +inf, and the merge takes that for a number."""
    out, lse = partial(manager.query_gather(q, decode_only))
    everyones = manager.group.all_gather(lse.masked_fill(lse == -torch.inf, torch.inf)[None])
    weights = (everyones - everyones.amax(0)).exp()
    mine = (weights / weights.sum(0))[manager.group.rank]
    return manager.group.reduce_scatter(out * mine[..., None], dim=1)


def route_reversed_heads(q, partial, manager, decode_only=False):
    """The gathered heads stand in another order than the one in which the combine gives them back."""
    gathered = query_gather(q, manager.group).unflatten(1, (manager.group.size, -1)).flip(1).flatten(1, 2)
    out, lse = partial(gathered)
    return manager.combine(out, lse, decode_only)


def route_silent_reduce_scatter(q, partial, manager, decode_only=False):
    """A communicator that could not load its library does nothing: the result is the receive buffer as it was."""
    partial(manager.query_gather(q, decode_only))
    return torch.zeros(*q.shape[:2], LATENT, device=q.device)


PLANTS = {
    "few-candidates": Plant(
        "select", select_from_few, "selection",
        "vLLM PR 46076 discusses a mode in which each rank keeps its own candidates in place of the exact merge.",
    ),
    "short-length": Plant(
        "local_length", length_without_remainder, "lengths",
        "TransformerEngine issue 1930: a sequence of 7 is treated as one of 6 on two ranks.",
        "ties",
    ),
    "rope-from-front": Plant(
        "norm_rope", norm_rope_from_front, "latent cache",
        "aiter PR 4342 and ATOM PR 1701 repaired a fused RoPE kernel whose rows and slots fell out of step under DCP.",
    ),
    "lse-base": Plant(
        "route", route_wrong_base, "combine",
        "vLLM PR 47079: FlashInfer's base 2 read as natural; SGLang issue 33064: FlashMLA's natural read as base 2.",
    ),
    "empty-lse-zero": Plant(
        "partial", partial_empty_lse_zero, "lse",
        "SGLang PR 33325 lists empty KV shards that were not neutral partial states.",
        "short",
    ),
    "infinite-lse": Plant(
        "route", route_infinite_lse, "combine",
        "ATOM PR 1832 guards its merge against ranks without a key; FlashMLA marks them by +inf (vLLM 0.28 to 0.30).",
        "short",
    ),
    "heads-out-of-order": Plant(
        "route", route_reversed_heads, "heads",
        "SGLang PR 34161: each rank of a DCP group paired its query heads with the wrong KV heads.",
    ),
    "one-slot-mapping": Plant(
        "norm_rope", norm_rope_one_slot_mapping, "index cache",
        "vllm-ascend PR 14534: one of two slot mappings, the indexer's and the latents', used for both caches.",
    ),
    "no-interleave": Plant(
        "localise", localise_without_interleave, "selected slots",
        "vLLM PR 26696 brought the interleave to many places at once; vllm-ascend PR 14876 repaired one that was left.",
        "ties",
    ),
    "partial-round-hit": Plant(
        "open", hit_in_one_ranks_blocks, "prefix hit",
        "vLLM PR 26296 and PR 26539: prefix hashes in blocks of one rank, and hits longer than what was cached.",
        "prefix",
    ),
    "first-chunk": Plant(
        "context_slots", context_from_first_chunk, "context",
        "vLLM issues 28476 and 28411, PR 28514: a context of several chunks gathered as if it had one.",
        "prefix",
    ),
    "stale-rows": Plant(
        "select", select_unmasked, "selection",
        "vLLM PR 36070: lengths in a recorded CUDA graph went stale, so that a replay saw another step's keys.",
    ),
    "local-ties": Plant(
        "select", select_by_local_id, "selection",
        "ATOM PR 1832 and vLLM PR 56749: equal indexer scores broken by a rule that is not the same everywhere.",
        "ties",
    ),
    "silent-reduce-scatter": Plant(
        "route", route_silent_reduce_scatter, "combine",
        "vLLM 0.30.0 with an NCCL that it cannot load: reduce_scatter returns memory that nobody wrote.",
    ),
}  # fmt: skip
