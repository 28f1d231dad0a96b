"""Does every DCP size give the same answer? The engine at one TP size and several DCP sizes, in two passes.

Free: each prompt class is answered at every DCP size; tokens must be identical, logits are reported (free.py).
Forced: every sublayer at DCP D gets DCP1's input, so that what is more than rounding shows, and is named, where it
arises (forced.py, sublayers.py). With `logits` they must be identical too, which only exact mode promises.

The ranks are threads (LocalGroup) or processes (TorchGroup): with `procs` this module starts them itself, and under
torchrun it finds that it is one of them. All ranks must come to the same numbers, and rank 0 alone writes the record,
after the last rank is done.

    dcp-fix verify --tp 4 --dcp 1,2,4                                      threads on a CPU
    dcp-fix verify --tp 4 --dcp 1,2,4 --procs 4 --device cuda --cuda-graphs
    dcp-fix verify --tp 8 --dcp 1,2,4,8 --combine exact --logits           one digest per step, the same at every size
    dcp-fix verify --plant lse-base                                        with a defect planted (planted.py): must fail
    torchrun --nproc-per-node 4 -m dcp_fix verify --tp 4 --dcp 1,4 --device cuda

It does not: climb the ladder of the four defects (ladder.py), or judge whether an answer is right.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from dcp_fix.base.equality import digest
from dcp_fix.base.errors import UserError
from dcp_fix.engine.engine import resolve_device
from dcp_fix.engine.exact_attention import METHODS as EXACT
from dcp_fix.engine.model import Model
from dcp_fix.ladder import ladder
from dcp_fix.ladder import report as ladder_report
from dcp_fix.ranks import launch
from dcp_fix.ranks.group import TIMEOUT_S, Group, LocalGroup
from dcp_fix.ranks.place import enough_gpus, inside
from dcp_fix.ranks.torch_group import joined
from dcp_fix.records import machine
from dcp_fix.records.records import deliver_record
from dcp_fix.tiny import corpus
from dcp_fix.verify import forced as forced_pass
from dcp_fix.verify import report as verify_report
from dcp_fix.verify.free import FreeRow, Run, Traced, answers, compare
from dcp_fix.verify.settings import Settings
from dcp_fix.verify.sublayers import Watcher

NAME_BYTES = 64  # of a device's name, when the ranks tell each other theirs


@dataclass(frozen=True)
class Report:
    """What came out: a row per free run, a row per forced one, and the ranks that had other numbers than rank 0."""

    settings: Settings
    transport: str  # threads, gloo or nccl
    devices: list[str]  # of each process
    rows: list[FreeRow]
    odd_ranks: list[int]
    forced: tuple[forced_pass.ForcedRow, ...] = ()

    @property
    def wrong(self) -> list[FreeRow]:
        """The runs that differ from the reference in what must be the same: exact mode promises the logits."""
        bits = self.settings.logits or self.settings.combine in EXACT
        return [row for row in self.rows if not row.same or (bits and not row.logits_identical)]

    @property
    def parted(self) -> list[forced_pass.ForcedRow]:
        """The forced runs in which a sublayer makes something else of DCP1's input."""
        return [row for row in self.forced if not row.ok]

    @property
    def ok(self) -> bool:
        """Whether every rank and every DCP size gave the same answer, step by step as well."""
        return not self.odd_ranks and not self.wrong and not self.parted


# --- one rank ---------------------------------------------------------------------------------------------------------


def report(group: Group, settings: Settings, model: Model, device, progress: Callable | None = None) -> Report:
    """Every rank calls it and gets the same; `progress(dcp, class, done, total)` is called on rank 0."""
    runs, rows = measure(group, settings, model, device, progress if group.rank == 0 else None)
    rest = compare(runs, settings), odd_ranks(group, runs, device), tuple(rows)
    if isinstance(group, LocalGroup):
        return Report(settings, "threads", [device_name(device)], *rest)
    transport = group.transport  # type: ignore[attr-defined]  # of a TorchGroup
    return Report(settings, transport, device_names(group, device), *rest)


def measure(
    group: Group, settings: Settings, model: Model, device, progress
) -> tuple[list[Run], list[forced_pass.ForcedRow]]:
    """Every prompt at every DCP size, in that order, and the rows of the forced pass."""
    runs, rows = [], []
    for name in settings.classes:
        by_step = forced_pass.Forced(group, model, settings.combine, progress)  # a class's records go with it
        case, prompts = forced_pass.class_case(name), corpus.prompts(name, settings.prompts)
        for size in settings.dcp if "free" in settings.passes else ():
            keeps = size == 1 and "forced" in settings.passes and not settings.cuda_graphs
            watcher = Watcher(Traced(group)) if keeps else None
            runs += answers(group, settings, model, device, size, name, prompts, progress, watcher)
            if watcher:
                by_step.keep(case, settings.dcp, watcher.seen)
        if "forced" in settings.passes:
            rows += by_step.rows(case, settings.dcp, settings.ops)
    if "forced" in settings.passes:
        by_step = forced_pass.Forced(group, model, settings.combine, progress)
        rows += [row for case in forced_pass.small_cases() for row in by_step.rows(case, settings.dcp, settings.ops)]
    return sorted(runs, key=lambda run: settings.dcp.index(run.dcp)), rows


def odd_ranks(group: Group, runs: list[Run], device) -> list[int]:
    """The ranks that have other numbers than rank 0: none may."""
    everything = [(run.generation.tokens, run.generation.digests, run.layers) for run in runs]
    mine = torch.tensor(list(bytes.fromhex(digest(repr(everything).encode()))), dtype=torch.uint8, device=device)
    everyones = group.all_gather(mine[None])
    return [rank for rank in range(group.size) if not torch.equal(everyones[rank], everyones[0])]


def device_name(device: torch.device) -> str:
    """A device as its maker calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else machine.cpu_model()


def device_names(group: Group, device: torch.device) -> list[str]:
    """The device of each rank."""
    name = device_name(device).encode()[:NAME_BYTES].ljust(NAME_BYTES)
    mine = torch.tensor(list(name), dtype=torch.uint8, device=device)
    return [bytes(row).decode().strip() for row in group.all_gather(mine[None]).tolist()]


# --- all ranks --------------------------------------------------------------------------------------------------------


def main(
    settings: Settings, procs: int | None = None, timeout: float = TIMEOUT_S, record_path: Path | None = None
) -> int:
    """Verify, print and record; 0 if every DCP size gives the same answer, 1 if one does not, else what launch.py says.

    Raises UserError for settings that cannot run, before anything is started.
    """
    settings.check()
    if inside():
        return launch.rank_process(lambda: finish(*as_process(settings, timeout), record_path))
    if procs is not None:
        if procs != settings.tp:
            raise UserError(f"--procs {procs} with --tp {settings.tp}: a process is a rank; give both the same number")
        if settings.device == "cuda":
            enough_gpus(procs, settings.share_gpus)
        elif settings.share_gpus:
            raise UserError("--share-gpus needs --device cuda")
        return launch.launch([sys.executable, "-m", "dcp_fix", *sys.argv[1:]], procs)
    if settings.share_gpus:
        raise UserError("--share-gpus is for processes, --procs; threads share one device anyway")
    return finish(as_threads(settings, timeout), 0, record_path)


def as_threads(settings: Settings, timeout: float = TIMEOUT_S) -> Report:
    """All ranks in this process, on one device."""
    device = resolve_device(settings.device)
    model = Model.load(settings.checkpoint, device, settings.dtype)
    with ladder_report.progress() as progress:
        asked = settings, model, device, progress
        return ladder.on_threads(settings.tp, report, *asked, timeout=timeout, device=device)


def as_process(settings: Settings, timeout: float = TIMEOUT_S) -> tuple[Report, int]:
    """This process's rank: the report, which every rank has when all are done, and its number."""
    torch.set_num_threads(1)  # as a thread of a LocalGroup has, for the same bits
    with joined(settings.device, settings.terms(), timeout, settings.share_gpus) as group:
        if group.size != settings.tp:
            raise UserError(f"--tp {settings.tp} with {group.size} processes: a process is a rank; start {settings.tp}")
        model = Model.load(settings.checkpoint, group.device, settings.dtype)
        with ladder_report.progress() if group.rank == 0 else nullcontext() as progress:
            return report(group, settings, model, group.device, progress), group.rank


def finish(whole: Report, rank: int, record_path: Path | None) -> int:
    """Rank 0 records and prints; the exit status is the same on all."""
    if rank == 0:
        deliver_record(record_path, lambda: verify_report.as_json(whole), verify_report.show, whole)
    return 0 if whole.ok else launch.DIFFERS
