"""The recorded runs of a folder, read alike whichever command wrote them: where each ran, what it says, its answers.

    for name, record in load_all(Path("records")).items():
        print(name, hardware(record), *facts(record), sep="\\n")

It does not: run, judge or write anything (ladder.py, verify.py, multi_gpu.py, records/records.py).
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dcp_fix.ladder import ladder
from dcp_fix.records.records import load_record


@dataclass(frozen=True)
class Recorded:
    """A recorded answer of a run that should be right: DCP1, the last rung, or any size that `verify` ran."""

    prompt_class: str
    number: int
    tokens: list[int]
    sha256: str


def load_all(*folders: Path | str) -> dict[str, dict]:
    """Every record of the folders by its name, sorted. Raises UserError for a file that is no whole record."""
    paths = [path for folder in folders for path in Path(folder).glob("*.json")]
    return {path.stem: load_record(path) for path in sorted(paths, key=lambda path: path.stem)}


def runs(record: dict, field: str | None = None) -> list[dict]:
    """The runs that a record holds: itself, or those of its parts; with `field`, of the command that writes it."""
    parts = record["results"].get("parts", {"": record["results"]}).values()
    found = [run for part in parts for run in (part, part.get("ladder"), *part.get("verify", ())) if run]
    return [run for run in found if field is None or field in run]


ladders = partial(runs, field="stale")  # of `reproduce`
real_ladders = partial(runs, field="boots")  # of `reproduce-vllm`
verifications = partial(runs, field="transport")  # of `verify`
all_planted = partial(runs, field="planted")  # of `verify --plant all`
timings = partial(runs, field="graph")  # of `bench exact`
kernels = partial(runs, field="kernels")  # of `bench kernels`
packings = partial(runs, field="pack")  # of `bench pack`
workspaces = partial(runs, field="workspace")  # of `multi-gpu`
outcomes = partial(runs, field="tests")  # of `pytest --record`


def hardware(record: dict) -> str:
    """`1 x NVIDIA H200`, or the CPU where no GPU took part, though the host may have some."""
    gpus, found = record["hardware"]["gpus"], runs(record)
    devices = {run.get("device", run.get("settings", {}).get("device")) for run in found}
    if not gpus or "cpu" in devices or any(run.get("graph") is False for run in found):
        return f"CPU, {record['hardware']['cpu']}"
    return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))


def facts(record: dict) -> list[str]:
    """The verdict of each run. The same when it is recorded again: no times, digests or ulps."""
    return list(dict.fromkeys(f"TP{tp_of(run)}: {run['verdict']}" for run in runs(record, "verdict")))


def tp_of(run: dict) -> int:
    """The tensor-parallel size of a run with a verdict."""
    return run["tp"] if "tp" in run else run["settings"]["tp"]


def markdown(*folders: Path | str) -> str:
    """The records of the folders, a section each: name, hardware, command and verdicts."""
    sections = []
    for name, record in load_all(*folders).items():
        said = "".join(f"- {fact}\n" for fact in facts(record))
        sections.append(f"### {name}\n\n{hardware(record)}: `{record['command']}`\n{chr(10) + said if said else ''}")
    return "\n".join(sections)


def healthy_answers(record: dict) -> list[Recorded]:
    """The answers that any machine must reproduce token by token."""
    rows = [row for run in ladders(record) for row in run["rows"] if row["rung"] in (ladder.REFERENCE, ladder.LAST)]
    rows += [row for run in real_ladders(record) for row in run["rows"] if row["rung"] == ladder.REFERENCE]
    found = [
        Recorded(row["prompt_class"], number, answer["tokens"], answer["sha256"])
        for row in rows
        for number, answer in enumerate(row["answers"])
    ]
    rows = [row for run in verifications(record) for row in run["rows"]]
    return found + [Recorded(row["prompt_class"], row["number"], row["tokens"], row["sha256"]) for row in rows]
