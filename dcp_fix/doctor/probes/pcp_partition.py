"""Does prefill context parallelism hand out every token once, and do its ranks hold equally many rows?

`PCPManager` cuts each prefill into 2 P pieces for P ranks, rank r taking pieces r and 2P - 1 - r, and gives every rank
the whole of what it does not cut: decodes, and under DCP prefills too short to fill every piece. Each batch is dealt to
all ranks by the target's own `_iter_rank_chunks` (`_get_rank_segments` before 0.29), and for each request:

    cut           each token is on one rank, once
    replicated    each rank has each token, once; decodes that are shared out (`shard_decode_requests`): one rank has it
    rows          under DCP every rank has as many pieces of a request as the others, since the gathered keys are laid
                  out by them (vLLM PR 56157, issue 53573); asked of releases that replicate short prefills

The control is a batch of one decode.
"""

import numpy as np
import torch

from dcp_fix.doctor.attempt import NotRun, attempt, judged, one_line
from dcp_fix.doctor.probes.known import arguments, load, parameters
from dcp_fix.doctor.world import World

MODULE, MANAGER = "vllm.v1.worker.gpu.pcp_manager", "PCPManager"
CHUNKS, SEGMENTS, REPLICATED = "_iter_rank_chunks", "_get_rank_segments", "replicated_requests"
Batch = list[tuple[int, bool]]  # (tokens, whether it is a prefill) of each request
CONTROL: Batch = [(1, False)]
BATCHES: tuple[Batch, ...] = (
    [(16, True)],
    [(1, False), (33, True), (0, True), (2, False), (7, True), (1, True)],
    [(n, True) for n in range(1, 26)],
)


def load_manager(world: World):
    """The target's class."""
    manager = getattr(load(world, MODULE, MANAGER), MANAGER)
    if not hasattr(manager, CHUNKS) and not hasattr(manager, SEGMENTS):
        raise NotRun(f"{MANAGER} of this release has neither {CHUNKS} nor {SEGMENTS}")
    return manager


def made(manager, pcp: int, dcp: int, shared_out: bool):
    """An object of the target's class with the attributes that deal out a batch."""
    result = object.__new__(manager)
    sizes = dict(pcp_world_size=pcp, pcp_rank=0, dcp_world_size=dcp, dcp_rank=0, cp_interleave=1)
    vars(result).update(sizes, device=torch.device("cpu"), shard_decode_requests=shared_out)
    return result


def pieces(manager, rank: int, batch: Batch) -> list[tuple[int, int, int]]:
    """(request, first token, tokens) of one rank."""
    lengths, prefill = np.array([n for n, _ in batch]), np.array([p for _, p in batch])
    needed = dict(rank=rank, num_scheduled_tokens=lengths, is_prefilling=prefill)
    if hasattr(manager, CHUNKS):
        call = getattr(manager, CHUNKS)
        return list(call(**arguments(call, CHUNKS, needed)))
    starts, call = np.concatenate([[0], lengths.cumsum()]), getattr(manager, SEGMENTS)
    more = dict(query_start_loc_np=starts, num_computed_tokens=0 * lengths)
    found = call(**arguments(call, SEGMENTS, needed | more))
    return [piece(s.global_batch_req_idx, s.global_batch_slice, starts) for s in found]


def piece(request: int, tokens: slice, starts) -> tuple[int, int, int]:
    """A slice of the batch as (request, first token, tokens)."""
    return request, tokens.start - starts[request], tokens.stop - tokens.start


def whole(manager, batch: Batch) -> list[bool]:
    """Which requests every rank is to have, as the target says it: decodes where it does not say."""
    if not says(manager):
        return [not prefill for _, prefill in batch]
    call = getattr(manager, REPLICATED)
    needed = dict(num_scheduled_tokens=np.array([n for n, _ in batch]), is_prefilling=np.array([p for _, p in batch]))
    return list(call(**arguments(call, REPLICATED, needed)))


def faults(manager, batch: Batch, shared_out: bool) -> list[str]:
    """What is wrong about one batch, a sentence a request."""
    dealt = [pieces(manager, rank, batch) for rank in range(manager.pcp_world_size)]
    found = []
    for request, (length, prefill) in enumerate(batch):
        mine = [[p[1:] for p in of_rank if p[0] == request] for of_rank in dealt]
        everywhere = whole(manager, batch)[request] and (prefill or not shared_out)
        held = [sorted(t for first, n in of_rank for t in range(first, first + n)) for of_rank in mine]
        what = f"a {'prefill' if prefill else 'decode'} of {length} tokens"
        once = held if everywhere else [sorted(sum(held, []))]
        if any(tokens != list(range(length)) for tokens in once):
            found.append(f"{what}: {'each rank' if everywhere else 'one rank'} should have each token once, got {held}")
        rows = [len(of_rank) for of_rank in mine]
        if manager.dcp_world_size > 1 and says(manager) and len(set(rows)) > 1:
            found.append(f"{what}: the ranks have {rows} rows of it, and their gathered keys need equally many")
    return found


def pcp_partition(manager, progress) -> tuple[str, str]:
    """(verdict, evidence)"""
    progress("one decode", control=True)
    control = attempt(lambda: faults(made(manager, 2, 1, False), CONTROL, False))
    if control.raised or control.value:
        why = one_line(control.raised) if control.raised else control.value[0]
        raise NotRun(f"the control, one decode, fails, so nothing can be said: {why}")
    groups = [(2, 1, False), (4, 1, False), (2, 2, False), (4, 4, False)]
    if "shard_decode_requests" in parameters(manager.__init__):
        groups.append((2, 1, True))
    found = []
    for group, batch in [(group, batch) for group in groups for batch in BATCHES]:
        name = f"PCP{group[0]}/DCP{group[1]}{', decodes shared out' * group[2]}"
        progress(name)
        case = attempt(lambda group=group, batch=batch: faults(made(manager, *group), batch, group[2]))
        found += [f"{name}: {m}" for m in ([f"raises {one_line(case.raised)}"] if case.raised else case.value)]
    equal, unasked = "equally many rows", "equal rows are not asked of a release that cuts short prefills too"
    return judged(
        found, f"PCP2 and PCP4, with and without DCP: every token once, {equal if says(manager) else unasked}"
    )


def says(manager) -> bool:
    """Whether this release says which requests it replicates."""
    return hasattr(manager, REPLICATED)
