"""Who owns a position: the arithmetic of decode context parallelism (DCP).

DCP cuts the KV cache of one sequence into D shards, one per rank. Positions are dealt out like cards, I at a time: the
first I positions go to rank 0, the next I to rank 1, and after rank D - 1 the deal starts again at rank 0. With D = 2:

    position               0  1  2  3  4  5  6  7
    owner, I = 1           0  1  0  1  0  1  0  1
    local index, I = 1     0  0  1  1  2  2  3  3
    owner, I = 2           0  0  1  1  0  0  1  1
    local index, I = 2     0  1  0  1  2  3  2  3

    owner         (p // I) % D
    local index   p // (D * I) * I + p % I                                 where p lies in its owner's shard
    local length  L // (D * I) * I + clamp(L % (D * I) - r * I, 0, I)      how many of positions 0 .. L - 1 rank r holds

A local index becomes a *slot* (a row of the paged cache) through the rank's own block table. Where another rank owns
the position the slot is -1. That -1 says "do not write the cache here" and nothing more: reading it as "padding,
nothing to do" is the origin of two of the defects that this project repairs (vLLM issues 50095 and 54907).

Units: positions, lengths and indices count tokens; D = `dcp_size` ranks, r = `dcp_rank`, I = `interleave` tokens.
Every function takes ints or integer tensors of any shape, and D = 1 is no special case. Source of the formulas: vLLM's
DCP slot mapping and `get_dcp_local_seq_lens`, restated. This is the only file that divides by the number of ranks.
It moves no data, knows no process group, and does not decide which rank holds which heads.
"""

from typing import TypeVar

import torch
from torch import Tensor

NOT_OWNED = -1
Count = TypeVar("Count", int, Tensor)


def owner(position: Count, dcp_size: int, interleave: int = 1) -> Count:
    """The rank whose cache holds `position`.

    >>> [owner(p, dcp_size=2, interleave=2) for p in range(6)]
    [0, 0, 1, 1, 0, 0]
    """
    _check(dcp_size, interleave)
    return position // interleave % dcp_size


def local_index(position: Count, dcp_size: int, interleave: int = 1) -> Count:
    """Where `position` lies in its owner's shard, counted in tokens from 0.

    >>> [local_index(p, dcp_size=2, interleave=2) for p in range(6)]
    [0, 1, 0, 1, 2, 3]
    """
    _check(dcp_size, interleave)
    return position // (dcp_size * interleave) * interleave + position % interleave


def global_position(local_index: Count, dcp_size: int, dcp_rank: int, interleave: int = 1) -> Count:
    """The position that row `local_index` of rank `dcp_rank`'s shard holds: the inverse of `local_index` on that rank.

    >>> [global_position(i, dcp_size=2, dcp_rank=1, interleave=2) for i in range(4)]
    [2, 3, 6, 7]
    """
    _check(dcp_size, interleave, dcp_rank)
    return (local_index // interleave * dcp_size + dcp_rank) * interleave + local_index % interleave


def local_length(length: Count, dcp_size: int, dcp_rank: int, interleave: int = 1) -> Count:
    """How many of the positions 0 .. length - 1 rank `dcp_rank` holds.

    A negative length is clamped to 0, in ints and tensors alike: to refuse one would mean to read a tensor's value,
    which stalls a GPU.

    For several query tokens of one request localise each *global* length; subtracting from a localised one is wrong.
    The last three tokens of a sequence of 10 see 8, 9 and 10 positions:

    >>> [local_length(n, dcp_size=2, dcp_rank=0) for n in (8, 9, 10)]
    [4, 5, 5]
    >>> [local_length(n, dcp_size=2, dcp_rank=1) for n in (8, 9, 10)]
    [4, 4, 5]
    """
    _check(dcp_size, interleave, dcp_rank)
    round_of, length = dcp_size * interleave, _at_least_0(length)
    return length // round_of * interleave + _clamp(length % round_of - dcp_rank * interleave, 0, interleave)


def slot_mapping(
    positions: Tensor, block_table: Tensor, block_size: int, dcp_size: int = 1, dcp_rank: int = 0, interleave: int = 1
) -> Tensor:
    """The cache slot of each of one request's positions on this rank, int64 [T]; -1 where another rank owns it.

    `block_table` [B] lists this rank's blocks. A cache that every rank holds in full (a replicated indexer cache) uses
    the same function with `dcp_size=1` and its own, longer, table. Raises IndexError if the table is too short.

    >>> slot_mapping(torch.arange(10), torch.tensor([7, 3]), block_size=4, dcp_size=2, dcp_rank=1).tolist()
    [-1, 28, -1, 29, -1, 30, -1, 31, -1, 12]
    """
    return slots_of(localise(positions, dcp_size, dcp_rank, interleave), block_table, block_size)


def localise(topk_ids: Tensor, dcp_size: int, dcp_rank: int, interleave: int = 1) -> Tensor:
    """Turns global positions (-1 = hole) into local indices on this rank; -1 where another rank owns the position.

    Over the ranks of a group every valid id is owned exactly once. The holes stay where they are: `pack_valid` moves
    them to the end of a row.

    >>> localise(torch.tensor([[5, -1, 2, 8]]), dcp_size=2, dcp_rank=0).tolist()
    [[-1, -1, 1, 4]]
    """
    _check(dcp_size, interleave, dcp_rank)
    mine = (topk_ids >= 0) & (owner(topk_ids, dcp_size, interleave) == dcp_rank)
    return torch.where(mine, local_index(topk_ids, dcp_size, interleave), NOT_OWNED)


def slots_of(local_indices: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """The cache slot of each local index of one request, int64, same shape; -1 stays -1.

    `block_table` [B] lists this rank's blocks of `block_size` tokens. Raises IndexError if the table is too short.

    >>> slots_of(torch.tensor([0, 5, -1]), torch.tensor([7, 3]), block_size=4).tolist()
    [28, 13, -1]
    """
    local = local_indices.long()  # slot * entry bytes passes 2**31 at slot 3,273,604: 64-bit from here on
    _check_table(local, block_table, block_size)
    if block_table.numel() == 0:  # a short prompt can leave a rank without a block
        return torch.full_like(local, NOT_OWNED)
    inside = local.clamp(min=0)
    slots = block_table.long()[inside // block_size] * block_size + inside % block_size
    return torch.where(local >= 0, slots, NOT_OWNED)


def row_slots(first: int, rows: int, block_table: Tensor, block_size: int) -> Tensor:
    """Slots of the local rows first .. first + rows - 1 of one request, int64 [rows].

    >>> row_slots(first=3, rows=2, block_table=torch.tensor([7, 3]), block_size=4).tolist()
    [31, 12]
    """
    return slots_of(torch.arange(first, first + rows, device=block_table.device), block_table, block_size)


def pack_valid(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Moves the valid ids (>= 0) of each row to its front, order kept: (packed [T, K], counts int64 [T]).

    After `localise` the holes lie anywhere in the row, so cutting the row at the local length would lose keys.

    >>> packed, counts = pack_valid(torch.tensor([[-1, 2, -1, -1, 0, -1, 1, -1]]))
    >>> packed.tolist(), counts.tolist()
    ([[2, 0, 1, -1, -1, -1, -1, -1]], [3])
    """
    valid = ids >= 0
    place = valid.cumsum(dim=-1) - 1
    spill = ids.shape[-1]  # one column too many, which takes every hole and is then cut off
    packed = ids.new_full((*ids.shape[:-1], spill + 1), NOT_OWNED)
    packed.scatter_(-1, torch.where(valid, place, spill), ids)
    return packed[..., :spill].contiguous(), valid.sum(dim=-1)


def class_of(position: Count, classes: int = 8, interleave: int = 1) -> Count:
    """The canonical class of a position: its owner if there were `classes` ranks, whatever the number really is.

    With `classes` a multiple of D, rank r owns exactly the classes congruent to r modulo D. A reduction that runs over
    classes in order therefore gives the same bits for every such D.

    >>> [class_of(p, classes=8, interleave=4) for p in (0, 3, 4, 31, 32)]
    [0, 0, 1, 7, 0]
    """
    return owner(position, classes, interleave)


def local_class(position: Count, classes: int, dcp_size: int, interleave: int = 1) -> Count:
    """Which of its owner's `classes / dcp_size` canonical classes a position falls into, ascending: class_of // D.

    >>> [(owner(p, 4), class_of(p), local_class(p, classes=8, dcp_size=4)) for p in (1, 5, 9)]
    [(1, 1, 0), (1, 5, 1), (1, 1, 0)]
    """
    _check(dcp_size, interleave)
    return class_of(position, classes, interleave) // dcp_size


def chunk_local_lengths(context_length: int, dcp_size: int, interleave: int, chunk: int) -> list[list[int]]:
    """How many local rows each rank has in each chunk of at most `chunk` local rows: [chunks][D].

    Gathering a cached context chunk by chunk needs one length per chunk *and* rank. Chunk c holds exactly the positions
    from c * chunk * D on, which needs whole interleave runs: raises ValueError if `chunk` is no multiple of it.

    >>> chunk_local_lengths(context_length=11, dcp_size=2, interleave=1, chunk=4)
    [[4, 4], [2, 1]]
    """
    if chunk < 1 or chunk % interleave:
        raise ValueError(f"chunk={chunk} is not a multiple of interleave={interleave}; round it up to one")
    lengths = [local_length(context_length, dcp_size, rank, interleave) for rank in range(dcp_size)]
    return [[_clamp(n - start, 0, chunk) for n in lengths] for start in range(0, max(lengths), chunk)]


def prefix_hit(shared_tokens: int, block_size: int, dcp_size: int) -> int:
    """How many of `shared_tokens` leading tokens a prefix cache can reuse: whole blocks on every rank.

    One block on each of D ranks holds `block_size * dcp_size` tokens, so that is the unit; never more than shared,
    and 0 for a negative number.

    >>> prefix_hit(shared_tokens=150, block_size=16, dcp_size=2)
    128
    """
    _check(dcp_size, block_size)
    unit = block_size * dcp_size
    return _at_least_0(shared_tokens) // unit * unit


def _at_least_0(x: Count) -> Count:
    return x.clamp(min=0) if isinstance(x, Tensor) else max(x, 0)


def _clamp(x: Count, low: int, high: int) -> Count:
    return x.clamp(low, high) if isinstance(x, Tensor) else min(max(x, low), high)


def _check(dcp_size: int, interleave: int, dcp_rank: int = 0) -> None:
    if dcp_size < 1 or interleave < 1:
        raise ValueError(f"dcp_size={dcp_size} and interleave={interleave} must both be at least 1")
    if not 0 <= dcp_rank < dcp_size:
        raise ValueError(f"dcp_rank={dcp_rank} is not one of the {dcp_size} ranks 0 .. {dcp_size - 1}")


def _check_table(local: Tensor, block_table: Tensor, block_size: int) -> None:
    if local.numel() == 0 or local.is_cuda:  # on a GPU the lookup itself asserts; reading a value here would stall it
        return
    last, capacity = int(local.max()), block_table.numel() * block_size
    if last >= capacity:
        blocks = last // block_size + 1
        raise IndexError(
            f"local index {last} lies outside the block table: {block_table.numel()} blocks of {block_size} tokens "
            f"hold {capacity}; allocate {blocks} blocks for this request"
        )
