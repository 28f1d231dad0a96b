"""Does every DCP size give the same answer? The corrected engine alone, at one TP size and several DCP sizes.

Each prompt class is answered at every DCP size. The tokens must be identical, and the logits of every step close: the
ordinary combine adds the same numbers in another order, and then an fp8 code of the cache may round the other way. How
far they are apart is reported in units in the last place of the largest logit. A digest of every sublayer's output, of
every batch, says where two runs part first. With `logits` they must be identical too, which only exact mode promises.

The ranks are threads (LocalGroup) or processes (TorchGroup): with `procs` this module starts them itself, and under
torchrun it finds that it is one of them. All ranks must come to the same numbers, and rank 0 alone writes the record,
after the last rank is done.

    dcp-fix verify --tp 4 --dcp 1,2,4                                      threads on a CPU
    dcp-fix verify --tp 4 --dcp 1,2,4 --procs 4 --device cuda --cuda-graphs
    dcp-fix verify --tp 8 --dcp 1,2,4,8 --combine exact --logits           one digest per step, the same at every size
    torchrun --nproc-per-node 4 -m dcp_fix verify --tp 4 --dcp 1,4 --device cuda

It does not: run a broken step (ladder.py), or judge whether an answer is right.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dcp_fix import combine, exact
from dcp_fix.engine.checkpoint import Config, check_folder
from dcp_fix.engine.engine import Engine, Generation, default_dtype, resolve_device
from dcp_fix.engine.exact_attention import METHODS as EXACT
from dcp_fix.engine.model import Model
from dcp_fix.engine.shard import check_dcp, check_tp
from dcp_fix.equality import digest, first_difference, ulps_apart
from dcp_fix.errors import UserError
from dcp_fix.evidence import ladder, ladder_report, machine, verify_report
from dcp_fix.evidence.records import record
from dcp_fix.evidence.terms import checkpoint_terms, code_terms
from dcp_fix.ranks import launch
from dcp_fix.ranks.group import TIMEOUT_S, Group, GroupError, LocalGroup
from dcp_fix.ranks.place import enough_gpus, inside
from dcp_fix.ranks.torch_group import joined
from dcp_fix.tiny import corpus

CLASSES = tuple(corpus.CLASSES)
COMBINES = (*combine.METHODS, *EXACT)
LOGITS_APART = 0.05  # of the largest logit: beyond rounding. A merge that ignores the lse is further away
NAME_BYTES = 64  # of a device's name, when the ranks tell each other theirs


@dataclass(frozen=True)
class Settings:
    """What every rank must be started with."""

    tp: int = 4
    dcp: tuple[int, ...] = (1, 2, 4)
    classes: tuple[str, ...] = CLASSES
    prompts: int = 1
    combine: str = "ag_rs"
    device: str = "cpu"
    cuda_graphs: bool = False
    share_gpus: bool = False
    checkpoint: Path = corpus.CHECKPOINT
    logits: bool = False

    def check(self) -> None:
        """Raise UserError for what cannot run, before anything is started."""
        check_tp(check_folder(Path(self.checkpoint)), self.tp)
        for size in self.dcp:
            check_dcp(self.tp, size)
        if len(set(self.dcp)) < 2 or len(set(self.dcp)) < len(self.dcp):
            raise UserError(f"DCP sizes {listed(self.dcp)}: name at least two different ones to compare")
        ladder.check_names(self.classes)
        if self.combine not in COMBINES:
            raise UserError(f"combine method {self.combine!r} is not one of {listed(COMBINES)}")
        if self.combine in EXACT:
            for size in self.dcp:
                exact.check_classes(exact.CLASSES, size)
        device = resolve_device(self.device)
        if self.cuda_graphs and (device.type != "cuda" or self.share_gpus):
            raise UserError("--cuda-graphs needs --device cuda, and ranks that do not share a GPU through gloo")

    def terms(self) -> dict:
        """What the ranks compare before they start: settings, code, and the checkpoint's content wherever it lies."""
        told = {name: value for name, value in asdict(self).items() if name != "checkpoint"}
        return told | code_terms() | checkpoint_terms(self.checkpoint)

    @property
    def dtype(self) -> torch.dtype:
        """The type that the model computes in."""
        return default_dtype(torch.device(self.device))


@dataclass(frozen=True)
class Run:
    """The answer to one prompt at one DCP size, and a digest of each sublayer's output in each batch."""

    dcp: int
    prompt_class: str
    number: int
    generation: Generation
    layers: list[str]


@dataclass(frozen=True)
class Row:
    """One run against the same prompt at the first DCP size."""

    dcp: int
    prompt_class: str
    number: int
    cached: int
    text: str
    tokens: list[int]
    sha256: str
    logits: list[str]  # a digest per step
    first_token: int | None  # that differs
    logits_identical: bool
    ulps: float  # between the logits, of the largest one
    apart: float  # the same, as a share of the largest one
    first_layer: str | None  # where the sublayers' outputs part

    @property
    def same(self) -> bool:
        """The same tokens, and logits that only rounding keeps apart."""
        return self.first_token is None and self.apart <= LOGITS_APART


@dataclass(frozen=True)
class Report:
    """What came out: a row per run, and the ranks that had other numbers than rank 0."""

    settings: Settings
    transport: str  # threads, gloo or nccl
    devices: list[str]  # of each process
    rows: list[Row]
    odd_ranks: list[int]

    @property
    def wrong(self) -> list[Row]:
        """The runs that differ from the reference in what must be the same: exact mode promises the logits."""
        bits = self.settings.logits or self.settings.combine in EXACT
        return [row for row in self.rows if not row.same or (bits and not row.logits_identical)]

    @property
    def ok(self) -> bool:
        """Whether every rank and every DCP size gave the same answer."""
        return not self.odd_ranks and not self.wrong


class Traced:
    """A group that keeps a digest of every all_reduce: a sublayer's output, whole and the same on every rank."""

    def __init__(self, group: Group) -> None:
        self.group, self.digests = group, []

    def __getattr__(self, name):
        return getattr(self.group, name)

    def all_reduce(self, x, out=None):
        """The group's, and a digest of the result, except while a CUDA graph is recorded: nothing is there yet."""
        whole = self.group.all_reduce(x, out)
        if not (whole.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.digests.append(digest(whole))
        return whole


# --- one rank ---------------------------------------------------------------------------------------------------------


def report(group: Group, settings: Settings, model: Model, device, progress: Callable | None = None) -> Report:
    """Every rank calls it and gets the same; `progress(dcp, class, done, total)` is called on rank 0."""
    runs = measure(group, settings, model, device, progress if group.rank == 0 else None)
    rows, odd = compare(runs, settings, model.config), odd_ranks(group, runs, device)
    if isinstance(group, LocalGroup):
        return Report(settings, "threads", [device_name(device)], rows, odd)
    return Report(settings, group.transport, device_names(group, device), rows, odd)


def measure(group: Group, settings: Settings, model: Model, device, progress: Callable | None = None) -> list[Run]:
    """Every prompt at every DCP size, in that order."""
    asked = {name: corpus.prompts(name, settings.prompts) for name in settings.classes}
    return [
        run
        for size in settings.dcp
        for name, prompts in asked.items()
        for run in answers(group, settings, model, device, size, name, prompts, progress)
    ]


def answers(group, settings: Settings, model: Model, device, size: int, name: str, prompts, progress) -> list[Run]:
    """One class at one DCP size, on an engine of its own. Unwritten scratch rows hold noise: reading one would show."""
    traced = Traced(group)
    engine = Engine(
        model, traced, dcp_size=size, combine=settings.combine, stale="noise", device=device,
        max_length=max(len(prompt.ids) for prompt in prompts) + ladder.NEW_TOKENS, static_decode=settings.cuda_graphs,
    )  # fmt: skip
    report = (lambda done, total: progress(f"DCP{size}", name, done, total)) if progress else None
    runs = []
    for number, prompt in enumerate(prompts):
        traced.digests = []
        generation = ladder.answer(engine, prompt.ids, corpus.CACHED.get(name, 0), report)
        runs.append(Run(size, name, number, generation, traced.digests))
    return runs


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


# --- two runs ---------------------------------------------------------------------------------------------------------


def compare(runs: list[Run], settings: Settings, config: Config) -> list[Row]:
    """Each run against the first DCP size's of the same prompt."""
    reference = {(run.prompt_class, run.number): run for run in runs if run.dcp == settings.dcp[0]}
    return [row(run, reference[run.prompt_class, run.number], settings.dtype, config) for run in runs]


def row(run: Run, reference: Run, dtype: torch.dtype, config: Config) -> Row:
    """One run against the reference; logits as far as they follow the same tokens."""
    mine, other = run.generation, reference.generation
    first_token = first_difference(mine.tokens, other.tokens)
    steps = len(mine.tokens) if first_token is None else min(first_token + 1, len(mine.tokens), len(other.tokens))
    a, b = mine.logits[:steps], other.logits[:steps]
    largest = b.abs().max()
    return Row(
        run.dcp, run.prompt_class, run.number, mine.cached, corpus.decode(mine.tokens), mine.tokens,
        digest(mine.tokens), mine.digests, first_token, mine.digests == other.digests,
        ulps=ulps_apart(a.to(dtype), b.to(dtype), largest.to(dtype)), apart=float((a - b).abs().max() / largest),
        first_layer=sublayer(first_difference(run.layers, reference.layers), config),
    )  # fmt: skip


def sublayer(index: int | None, config: Config) -> str | None:
    """What the digest number `index` of a run belongs to."""
    if index is None:
        return None
    batch, place = divmod(index, 2 * config.num_hidden_layers)
    return f"batch {batch}, layer {place // 2}, {('attention', 'mlp')[place % 2]}"


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
        return launch.launch([sys.executable, "-m", "dcp_fix", *sys.argv[1:]], procs)
    return finish(as_threads(settings, timeout), 0, record_path)


def as_threads(settings: Settings, timeout: float = TIMEOUT_S) -> Report:
    """All ranks in this process, on one device."""
    device = resolve_device(settings.device)
    model = Model.load(settings.checkpoint, device, settings.dtype)
    with ladder_report.progress() as progress:
        rank = lambda group: report(group, settings, model, device, progress)  # noqa: E731
        try:
            return LocalGroup.run(settings.tp, rank, timeout=timeout, device=device)[0]
        except GroupError as error:
            raise error.__cause__ or error from None


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
    """Rank 0 prints and records; the exit status is the same on all."""
    if rank == 0:
        verify_report.show(whole)
        if record_path:
            record(record_path, machine.command_line(), verify_report.as_json(whole))
    return 0 if whole.ok else launch.DIFFERS


def listed(values) -> str:
    """Values for a message."""
    return ", ".join(map(str, values))
