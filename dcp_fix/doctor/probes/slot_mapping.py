"""Does the target's slot mapping put every token where the deal of positions puts it?

`_compute_slot_mappings_kernel` of model runner V2 gives each new token of a batch its cache slot on one rank. Its slots
are compared with a deal done by hand: positions go round the D ranks, `interleave` at a time, and each rank fills the
blocks of its own table in order.

    owned                        table[i // block] * block + i % block, i = how many positions the rank already holds
    another rank's               -1
    after the last token         -1, up to the end of the buffer (CUDA graphs replay it)
    a request without a state    -1 (a padded request, index -1; where the kernel takes `dcp_sharded`)
    a group that is not sharded  every rank holds everything, as with D = 1 (where the kernel takes `dcp_sharded`)
    a group without a mapping    -1 (where the kernel takes `slot_mapping_enabled`)

The control is D = 1, without the padding. Not here: the kernel of model runner V1, which 0.26 to 0.28 still have; slots
beyond 32 bits.
"""

from dataclasses import dataclass

import torch

from dcp_fix.doctor.attempt import NotRun, attempt, judged, one_line
from dcp_fix.doctor.probes.known import arguments, load, parameters
from dcp_fix.doctor.world import World

MODULE, KERNEL = "vllm.v1.worker.gpu.block_table", "_compute_slot_mappings_kernel"
PAD, STALE = -1, 9_999_999
STATES, COLUMNS, LONGEST, TILE = 3, 40, 32, 8  # TILE: several turns of the kernel's loop a request
Request = tuple[int, int, int]  # row of the block table (-1: padded), first position, tokens
REQUESTS: tuple[Request, ...] = ((2, 0, 11), (0, 43, 6), (1, 7, 1))
PADDED: Request = (-1, 0, 3)


@dataclass(frozen=True)
class Group:
    """A KV cache group: what its blocks hold, and whether it is sharded and mapped."""

    block: int
    sharded: bool = True
    mapped: bool = True


@dataclass(frozen=True)
class Rank:
    """One rank of a DCP group. `(D, interleave)` are the group's."""

    size: int = 1
    rank: int = 0
    interleave: int = 1


def load_kernel(world: World):
    """The target's kernel."""
    return getattr(load(world, MODULE, KERNEL), KERNEL)


def table_of(group: Group) -> torch.Tensor:
    """int32 [STATES, COLUMNS]: blocks in no order, none of them twice, none of them 0."""
    generator = torch.Generator().manual_seed(group.block)
    return 1 + torch.randperm(STATES * COLUMNS, generator=generator).to(torch.int32).view(STATES, COLUMNS)


def slots(kernel, groups: list[Group], requests, at: Rank, device: str, longest=LONGEST, tile=TILE) -> torch.Tensor:
    """int64 [groups, longest]: what the kernel writes into a buffer of stale slots."""
    tables = [table_of(group).to(device) for group in groups]
    out = torch.full((len(groups), longest), STALE, dtype=torch.int64, device=device)
    states, firsts, counts = zip(*requests, strict=True)
    positions = torch.cat([torch.arange(first, first + n) for first, n in zip(firsts, counts, strict=True)])

    def tensor(values, dtype):
        return torch.tensor(values, dtype=dtype, device=device)

    blocks = tensor([group.block for group in groups], torch.int32)
    needed = dict(
        max_num_tokens=longest,
        idx_mapping=tensor(states, torch.int32),
        query_start_loc=tensor([0, *torch.tensor(counts).cumsum(0).tolist()], torch.int32),
        pos=positions.to(device),
        block_table_ptrs=tensor([table.data_ptr() for table in tables], torch.uint64),
        block_table_strides=tensor([table.stride(0) for table in tables], torch.int64),
        block_sizes=blocks,
        slot_mappings_ptr=out,
        slot_mappings_stride=out.stride(0),
        cp_rank=at.rank,
        CP_SIZE=at.size,
        CP_INTERLEAVE=at.interleave,
        PAD_ID=PAD,
        TRITON_BLOCK_SIZE=tile,
    )
    optional = dict(
        kernel_block_sizes=blocks,
        slot_mapping_enabled=tensor([group.mapped for group in groups], torch.bool),
        dcp_sharded=tensor([group.sharded for group in groups], torch.bool),
    )
    kernel[(len(groups), len(requests) + 1)](**arguments(kernel, KERNEL, needed, optional))
    return out.cpu()


def dealt(group: Group, requests, at: Rank) -> list[int]:
    """The right slots, position by position."""
    at, table, found = at if group.sharded else Rank(), table_of(group).tolist(), []
    for state, first, count in requests:
        held = 0
        for position in range(first + count):
            mine = position // at.interleave % at.size == at.rank
            slot = table[state][held // group.block] * group.block + held % group.block if mine else PAD
            held += mine
            if position >= first:
                found.append(slot if group.mapped and state >= 0 else PAD)
    return found + [PAD] * (LONGEST - len(found))


def wrong(kernel, groups, requests, at: Rank, device: str, upto: int = LONGEST) -> list[str]:
    """A sentence for each group with a wrong slot among the first `upto`."""
    found = []
    for group, got in zip(groups, slots(kernel, groups, requests, at, device).tolist(), strict=True):
        want = dealt(group, requests, at)
        bad = [token for token in range(upto) if got[token] != want[token]]
        if bad:
            at_rank = f"rank {at.rank} of {at.size}, interleave {at.interleave}"
            which = f"blocks of {group.block}{'' if group.sharded else ', not sharded'}"
            what = f"token {bad[0]} gets slot {got[bad[0]]} for {want[bad[0]]}"
            found.append(f"{at_rank}, {which}: {what} ({len(bad)} of {upto} wrong)")
    return found


def slot_mapping(kernel, device: str, progress) -> tuple[str, str]:
    """(verdict, evidence)"""
    takes = parameters(kernel)
    groups = [Group(4), Group(8)] + [Group(8, mapped=False)] * ("slot_mapping_enabled" in takes)
    requests = REQUESTS
    if "dcp_sharded" in takes:
        groups, requests = [*groups, Group(4, sharded=False)], (*REQUESTS, PADDED)
    progress("no DCP", control=True)
    tokens = sum(count for *_, count in REQUESTS)
    control = attempt(lambda: wrong(kernel, groups, REQUESTS, Rank(), device, upto=tokens))
    if control.raised or control.value:
        why = one_line(control.raised) if control.raised else control.value[0]
        raise NotRun(f"the control, no DCP, fails, so nothing can be said: {why}")
    ranks = [Rank(d, r, i) for d, i in ((2, 1), (3, 2), (4, 4)) for r in range(d)]
    found = []
    for at in ranks:
        progress(f"D={at.size}, rank {at.rank}, interleave {at.interleave}")
        case = attempt(lambda at=at: wrong(kernel, groups, requests, at, device))
        found += [f"rank {at.rank} of {at.size} raises {one_line(case.raised)}"] if case.raised else case.value
    return judged(found, f"{len(ranks)} ranks of D=2, 3 and 4: every slot of {len(groups)} groups, padding included")
