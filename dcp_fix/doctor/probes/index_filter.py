"""Does a selected token lead to the slot that it was written to, on the rank that owns it and on no other?

The indexer selects global positions. `triton_filter_and_convert_dcp_index` keeps those that this rank owns and turns
them into slots of its cache. The right slots are those of the *write* side: the target's own slot mapping kernel, asked
for the same positions (slot_mapping.py). For rows of ids with holes (-1), one of them with a single id:

    in place   every column holds its id's slot, or -1 where another rank owns it or there is a hole
    packed     the owned slots stand in front, each once, and -1 behind them; their order is upstream's to choose
    counts     how many the rank owns

The control is D = 1 without holes. Rows of 64 and of 96 ids: one tile, and several where a release takes several. Not
here: prefill rows, which lead into a gathered workspace and not into the cache.
"""

import torch

from dcp_fix.doctor.attempt import NotRun, attempt, judged, one_line
from dcp_fix.doctor.probes.known import arguments, load
from dcp_fix.doctor.probes.slot_mapping import STATES, Group, Rank, slots, table_of
from dcp_fix.doctor.stand_ins import module
from dcp_fix.doctor.unwritten import unwritten_memory_is_nan
from dcp_fix.doctor.world import World

MODULE, FILTER = "vllm.v1.attention.backends.mla.sparse_utils", "triton_filter_and_convert_dcp_index"
# Imported for its sizes at start-up, and imports half of the engine.
STAND_INS = {"vllm.v1.worker.block_table": module()}
GROUP, REACH = Group(block=8), 128  # positions of each request
WIDTHS, TILE = (64, 96), 32
STATE_OF_ROW = [2, 0, 0, 1]


def load_filter(world: World):
    """The target's function."""
    return getattr(load(world, MODULE, FILTER), FILTER)


def selected(width: int, holes: bool) -> torch.Tensor:
    """int32 [rows, width]: positions in no order, none twice in a row. With `holes` a quarter is -1, and the last row
    selects one position only."""
    generator = torch.Generator().manual_seed(width)
    ids = torch.stack([torch.randperm(REACH, generator=generator)[:width] for _ in STATE_OF_ROW]).to(torch.int32)
    keep = torch.rand(ids.shape, generator=generator) > 0.25
    keep[-1] = torch.arange(width) == width // 2
    return torch.where(keep, ids, -1) if holes else ids


def written(kernel, at: Rank, device: str) -> torch.Tensor:
    """int64 [requests, REACH]: the slot that the write side gives each position on this rank, -1 for none."""
    everything = [(state, 0, REACH) for state in range(STATES)]
    return slots(kernel, [GROUP], everything, at, device, STATES * REACH, REACH).view(STATES, REACH)


def filtered(function, ids: torch.Tensor, at: Rank, packed: bool, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots [rows, width], counts [rows]) that the target gives for this rank."""
    needed = dict(
        req_id=torch.tensor(STATE_OF_ROW, dtype=torch.int32, device=device),
        block_table=table_of(GROUP).to(device),
        token_indices=ids.to(device),
        dcp_size=at.size,
        dcp_rank=at.rank,
        cp_kv_cache_interleave_size=at.interleave,
        BLOCK_SIZE=GROUP.block,
        NUM_TOPK_TOKENS=ids.shape[1],
        BLOCK_N=TILE,
        return_valid_counts=True,
        compact_valid_to_front=packed,
    )
    with unwritten_memory_is_nan():
        out, counts = function(**arguments(function, FILTER, needed))
    return out.cpu().long(), counts.cpu().long()


def faults(got: torch.Tensor, counts: torch.Tensor, want: torch.Tensor, packed: bool) -> list[str]:
    """What is wrong about the rows, a sentence a kind."""
    owned = want >= 0
    found = [] if (counts == owned.sum(1)).all() else [f"counts {counts.tolist()} for {owned.sum(1).tolist()}"]
    if not packed:
        bad = (got != want).nonzero().tolist()
        what = [f"column {c} of row {r} holds {got[r, c]} for {want[r, c]}" for r, c in bad[:1]]
        return found + [f"{w} ({len(bad)} wrong)" for w in what]
    front = torch.arange(got.shape[1]) < owned.sum(1, keepdim=True)
    if ((got >= 0) != front).any():
        found.append("the owned slots do not stand in front, with -1 behind them")
    if (got.sort(1).values != want.sort(1).values).any():
        found.append("the slots are not those that the write side has for these positions")
    return found


def index_filter(function, write, device: str, progress) -> tuple[str, str]:
    """(verdict, evidence). `write`: the target's slot mapping kernel."""

    def judge(at: Rank, width: int, packed: bool, holes: bool = True) -> list[str]:
        ids = selected(width, holes)
        if at not in of_rank:
            of_rank[at] = written(write, at, device)
        want = of_rank[at][STATE_OF_ROW].gather(1, ids.clamp(min=0).long())
        return faults(*filtered(function, ids, at, packed, device), torch.where(ids >= 0, want, -1), packed)

    of_rank = {}

    progress("no DCP, no holes", control=True)
    control = attempt(lambda: judge(Rank(), WIDTHS[0], packed=True, holes=False))
    if control.raised or control.value:
        why = one_line(control.raised) if control.raised else control.value[0]
        raise NotRun(f"the control, no DCP, fails, so nothing can be said: {why}")
    found, ranks = [], [Rank(2, 0, 1), Rank(2, 1, 1), Rank(4, 0, 4), Rank(4, 3, 4)]
    for at, width, packed in [(at, width, packed) for at in ranks for width in WIDTHS for packed in (False, True)]:
        name = f"rank {at.rank} of {at.size}, interleave {at.interleave}, {width} ids{', packed' * packed}"
        progress(name)
        case = attempt(lambda case=(at, width, packed): judge(*case))
        found += [f"{name}: {m}" for m in ([f"raises {one_line(case.raised)}"] if case.raised else case.value)]
    return judged(found, f"{len(ranks)} ranks of D=2 and 4: each selected token leads to the slot it was written to")
