"""Everything that a host with GPUs can prove, in one command: runs, one record, a short table.

    dcp-fix multi-gpu --record FILE                 as many GPUs as there are
    dcp-fix multi-gpu --device cpu --ranks 4        processes on CPUs, over gloo

    threads      one GPU, four ranks as threads: the whole ladder from garbage to identical; every DCP size against DCP1
                 for each combine, decode steps plain and as CUDA graphs; workspace before and after
    processes    one process per GPU, over NCCL (on CPUs gloo, and this part alone): ladder and sizes with real ranks,
                 and the time of combine and decode step

Each part with processes is started, watched and ended by launch.py. The record appears when all parts are done.

It does not: span hosts (`torchrun ... -m dcp_fix verify`), compare with other systems, or tune anything.
"""

import json
import math
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from dcp_fix import combine, workspace
from dcp_fix.base.errors import UserError
from dcp_fix.base.output import write_json
from dcp_fix.bench.costs import combine_time, decode_times, workspace_peak
from dcp_fix.engine.engine import default_dtype, resolve_device
from dcp_fix.engine.model import Model
from dcp_fix.ladder import ladder
from dcp_fix.ladder import report as ladder_report
from dcp_fix.ranks import launch
from dcp_fix.ranks.group import Group
from dcp_fix.ranks.place import enough_gpus, inside
from dcp_fix.ranks.torch_group import joined
from dcp_fix.records.fingerprints import checkpoint_terms, code_terms
from dcp_fix.records.records import deliver_record
from dcp_fix.tiny import corpus
from dcp_fix.verify import report as verify_report
from dcp_fix.verify import verify
from dcp_fix.verify.settings import CLASSES, Settings, listed

FEW = 4  # ranks of the threads
MOST = 8  # ranks: DCP sizes that exact mode has classes for
COMBINES = (*combine.METHODS, "exact")
COMBINE_TOKENS = {"cuda": (1, 64, 1024, 8192), "cpu": (1, 64)}
WORKSPACE_TOKENS = (2048, 8192, 32768)


@dataclass(frozen=True)
class Plan:
    """What to run. `ranks`: how many processes, one per GPU where there are GPUs."""

    device: str
    ranks: int
    classes: tuple[str, ...] = CLASSES
    prompts: int = 1
    checkpoint: Path = corpus.CHECKPOINT

    def parts(self) -> dict[str, int]:
        """The parts and how many ranks each has."""
        if self.device == "cpu":
            return {"processes": self.ranks}
        return {"threads": FEW} | ({"processes": self.ranks} if self.ranks > 1 else {})

    def settings(self, part: str) -> list[Settings]:
        """The verifications of a part: each combine, decode steps plain and as CUDA graphs; bits under exact."""
        tp, graphs = self.parts()[part], (False, True) if self.device == "cuda" else (False,)
        common = Settings(
            tp, divisors(tp), self.classes, self.prompts, device=self.device, checkpoint=self.checkpoint
        )  # fmt: skip
        return [
            replace(
                common,
                combine=method,
                logits=method == "exact",
                cuda_graphs=graph,
                # The forced pass replays no graph, and exact mode is held to equal bits without it.
                passes=common.passes[:1] if graph or method == "exact" else common.passes,
            )  # fmt: skip
            for method in COMBINES
            for graph in graphs
        ]


def most_ranks(device: str) -> int:
    """One rank per GPU, as many as divide the model's heads: a power of two. Raises UserError without a GPU."""
    gpus = torch.cuda.device_count() if device == "cuda" else 2
    if not gpus:
        raise UserError("no GPU here; --device cpu runs the same over gloo")
    return min(MOST, 1 << gpus.bit_length() - 1)


def divisors(tp: int) -> tuple[int, ...]:
    """The DCP sizes that a TP size allows."""
    return tuple(size for size in range(1, tp + 1) if tp % size == 0)


def main(plan: Plan, record_path: Path | None = None, part: str | None = None, out: Path | None = None) -> int:
    """Run every part, print the table, write the record; 0 if all is as it should be, 1 if not, else a part's status.

    A process that launch.py started runs one rank of `part` and, on rank 0, leaves its results in `out`.
    """
    if inside():
        if part is None:
            raise UserError("multi-gpu starts its ranks itself: run it without torchrun, once per host")
        return launch.rank_process(lambda: as_process(plan, part, out))
    if part or out:
        raise UserError("--part and --out are for the ranks that multi-gpu starts itself")
    if plan.device == "cpu" and plan.ranks < 2:
        raise UserError("--ranks 1 on a CPU leaves no DCP sizes to compare; choose 2, 4 or 8")
    if plan.device == "cuda":
        enough_gpus(plan.ranks, share=False)
    ladder.check_classes(plan.classes)
    for settings in (settings for name in plan.parts() for settings in plan.settings(name)):
        settings.check()
    results, rows, status = {}, [], 0
    for name, ranks in plan.parts().items():
        print(f"{name}: {ranks} ranks", file=sys.stderr, flush=True)
        status, results[name] = (0, as_threads(plan)) if name == "threads" else processes(plan, name)
        if status:
            break
        rows += summary(name, ranks, results[name])
    whole = lambda: {"parts": results, "summary": rows}  # noqa: E731
    deliver_record(record_path if status == 0 else None, whole, show, rows)
    return status or (0 if all(row[-1] for row in rows) else launch.DIFFERS)


# --- parts ------------------------------------------------------------------------------------------------------------


def as_threads(plan: Plan) -> dict:
    """The part of one device."""
    device = resolve_device(plan.device)
    model = Model.load(plan.checkpoint, device, default_dtype(device))
    with ladder_report.progress() as progress:
        results = ladder.on_threads(FEW, on_rank, plan, "threads", model, progress, device=device)
    return results | {"workspace": [workspace_peak(tokens, device) for tokens in WORKSPACE_TOKENS]}


def processes(plan: Plan, part: str) -> tuple[int, dict | None]:
    """A part of several processes: their exit status and what rank 0 left."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        command = [sys.executable, "-m", "dcp_fix", *sys.argv[1:], "--part", part, "--out", str(out)]
        status = launch.launch(command, plan.parts()[part])
        return status, json.loads(out.read_text()) if status == 0 else None


def as_process(plan: Plan, part: str, out: Path) -> int:
    """One rank of a part of processes."""
    torch.set_num_threads(1)
    terms = asdict(replace(plan, checkpoint=None)) | {"part": part} | code_terms() | checkpoint_terms(plan.checkpoint)
    with joined(plan.device, terms) as group:
        model = Model.load(plan.checkpoint, group.device, default_dtype(group.device))
        with ladder_report.progress() if group.rank == 0 else nullcontext() as progress:
            results = on_rank(group, plan, part, model, progress)
    if group.rank == 0:
        write_json(out, results)
    return 0


def on_rank(group: Group, plan: Plan, part: str, model: Model, progress: Callable | None) -> dict:
    """What each rank does; all of them get the same results, times aside."""
    device = model.weights["model.norm.weight"].device
    reports = [verify.report(group, settings, model, device, progress) for settings in plan.settings(part)]
    setup = ladder.Setup(model, group.size, group.size, "previous", str(device))
    answers = lambda rung, name, asked: ladder.on_rank(group, setup, rung, name, asked, progress)  # noqa: E731
    rows = ladder.climb(answers, plan.prompts, plan.classes)
    results = {
        "verify": [verify_report.as_json(report) for report in reports],
        "ladder": ladder_report.as_json(rows, plan.prompts, setup, ladder.repaired(rows, plan.prompts)),
        "decode": decode_times(group, corpus.prompts(plan.classes[0], 1)[0].ids, model, device),
    }
    if part == "processes":
        tokens = COMBINE_TOKENS[device.type]
        results["combine"] = [combine_time(group, method, count) for count in tokens for method in combine.METHODS]
    return results


# --- the table --------------------------------------------------------------------------------------------------------


def summary(part: str, ranks: int, result: dict) -> list[tuple[str, str, str, bool]]:
    """Rows (part, what, result, whether it is as it should be)."""
    device = result["verify"][0]["devices"][0]
    where = f"{part}, {ranks} ranks, {device}"
    rows = [("ladder", result["ladder"]["verdict"], result["ladder"]["repaired"])]
    rows += [verify_row(report) for report in result["verify"]]
    rows.append(("decode step", listed_ms(result["decode"]), True))
    for tokens in dict.fromkeys(row["tokens"] for row in result.get("combine", ())):
        times = {row["method"]: row["ms"] for row in result["combine"] if row["tokens"] == tokens}
        rows.append((f"combine, {tokens} tokens", listed_ms(times), True))
    rows += [workspace_row(row) for row in result.get("workspace", ())]
    return [(where, *row) for row in rows]


def verify_row(report: dict) -> tuple[str, str, bool]:
    """One verification."""
    settings = report["settings"]
    ulps = max(math.inf if row["ulps"] is None else row["ulps"] for row in report["rows"])
    graphs = ", CUDA graphs" if settings["cuda_graphs"] else ""
    return (
        f"DCP {listed(settings['dcp'])}: {settings['combine']}{graphs}",
        (f"{report['verdict']} Logits: {ulps:.3g} ulps apart at most"),
        report["ok"],
    )


def workspace_row(row: dict) -> tuple[str, str, bool]:
    """The workspace of one row count; where nothing was measured, as planned."""
    kind = "planned" if row["fixed_peak_bytes"] is None else "peak"
    before, after = (row[f"{name}_{kind}_bytes"] for name in ("broken", "fixed"))
    text = f"{before / workspace.MIB:.0f} MiB {kind} before the fix, {after / workspace.MIB:.0f} MiB after"
    return f"workspace, {row['tokens']} rows", text, after < before


def listed_ms(times: dict[str, float]) -> str:
    """Times by name."""
    return ", ".join(f"{name} {ms:.3g} ms" for name, ms in times.items())


def show(rows: list[tuple]) -> None:
    """Print a line for each row, on standard output."""
    for where, what, text, ok in rows:
        print(f"{where}, {what}: {text}{'' if ok else '   <- NOT as it should be'}")
