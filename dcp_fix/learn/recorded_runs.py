"""The recorded runs of a folder, read alike whichever command wrote them: where each ran, what it says, its tokens.

    for name, record in load_all(Path("records")).items():
        print(name, hardware(record), *facts(record), sep="\\n")

Known are the records of `dcp-fix reproduce` on either engine, `verify`, `multi-gpu` and `bench`, and of `pytest
--record`. What `facts` says of a run stays the same when the run is recorded again: verdicts, counts, whether bits are
equal, bytes; never times, digests or ulps.

It does not: run, judge or write anything (ladder.py, verify.py, multi_gpu.py, records/records.py).
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from dcp_fix.base.errors import UserError
from dcp_fix.ladder import ladder
from dcp_fix.records.records import load_record
from dcp_fix.verify import multi_gpu, verify


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


def has_gpu(record: dict) -> bool:
    """Whether the run happened on GPUs: a host that has some may be asked for its CPU alone."""
    asked = verifications(record) + cabinets(record)
    devices = [run["device"] for run in ladders(record)] + [run["settings"]["device"] for run in asked]
    used = any(device.startswith("cuda") for device in devices) or any(run["graph"] for run in timings(record))
    used = used or bool(outcomes(record) or real_ladders(record) or kernels(record) or packings(record))
    return used and bool(record["hardware"]["gpus"])


def hardware(record: dict) -> str:
    """`1 x NVIDIA H200`, or the CPU where no GPU took part."""
    gpus = record["hardware"]["gpus"]
    if not has_gpu(record):
        return f"CPU, {record['hardware']['cpu']}"
    return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))


def facts(record: dict) -> list[str]:
    """A line per ladder, rung without an answer, verification, workspace size, set of timings and file of tests."""
    lines = []
    for run in ladders(record):
        lines.append(f"ladder, TP{run['tp']}: {run['verdict']}")
        failed = [row for row in run["rows"] if row["failure"]]
        lines += [f"no answer at {row['rung']}, {row['prompt_class']} tokens: {row['failure']}" for row in failed]
    for run in real_ladders(record):
        lines.append(f"ladder in {run['engine']}, TP{run['tp']}: {run['verdict']}")
        failed = dict.fromkeys((row["rung"], row["failure"]) for row in run["rows"] if row["failure"])
        lines += [f"no answer {rung}: {failure}" for rung, failure in failed]
    lines += verified(verifications(record))
    lines += [f"cabinet, TP{run['settings']['tp']}: {run['verdict']}" for run in cabinets(record)]
    for part in parts(record):
        lines += [": ".join(multi_gpu.workspace_row(row)[:2]) for row in part.get("workspace", ())]
    lines += [f"times: {len(run['rows'])} rows, ordinary and exact side by side" for run in timings(record)]
    for run in kernels(record):
        beside = f"beside those of {run['upstream']}" if run["upstream"] else "alone"
        lines.append(f"kernels: {len(run['kernels'])} times, each right by fp64 first, {beside}")
    for run in packings(record):
        lines.append(f"packing in vLLM {run['vllm']}, TP{run['tp']}/DCP{run['dcp']}: {len(run['pack'])} works timed")
    return lines + tested(outcomes(record))


def markdown(*folders: Path | str) -> str:
    """The records of the folders, a section each: name, hardware, command, and a line for everything that it says."""
    sections = []
    for name, record in load_all(*folders).items():
        said = "\n".join(f"- {fact}" for fact in facts(record))
        sections.append(f"### {name}\n\n{hardware(record)}: `{record['command']}`\n\n{said}\n")
    return "\n".join(sections)


def tested(outcome: dict[str, str]) -> list[str]:
    """A line per file of tests or page of cells."""
    counts = Counter((node.split("::")[0], result) for node, result in outcome.items())
    files = {name: [] for name, _ in sorted(counts)}
    for (name, result), number in sorted(counts.items()):
        files[name].append(f"{number} {result}")
    return [f"{name}: {', '.join(results)}" for name, results in files.items()]


def verified(runs: list[dict]) -> list[str]:
    """A line for the runs of one size over one transport that came out alike."""
    methods = {}
    for run in runs:
        settings, identical = run["settings"], all(row["logits_identical"] for row in run["rows"])
        size = f"TP{settings['tp']}, DCP {verify.listed(settings['dcp'])}, {run['transport']}"
        said = f"{run['verdict']} Logits identical in every bit: {'yes' if identical else 'no'}"
        said += " Step by step on the same input: equal or within rounding" if run.get("forced") and run["ok"] else ""
        graphs = " as CUDA graphs" if settings["cuda_graphs"] else ""
        methods.setdefault((size, said), []).append(settings["combine"] + graphs)
    return [f"{size}; {verify.listed(names)}: {said}" for (size, said), names in methods.items()]


def parts(record: dict) -> list[dict]:
    """The parts of a multi-gpu record; else the results as one part of that form. Raises UserError for another kind."""
    results = record["results"]
    if "parts" in results:
        return list(results["parts"].values())
    for field, part in (
        ("boots", {"real ladder": results}),
        ("repaired", {"ladder": results}),
        ("planted", {"cabinet": results}),
        ("settings", {"verify": [results]}),
        ("graph", {"bench": results}),
        ("kernels", {"kernels": results}),
        ("pack", {"pack": results}),
        ("tests", results),
    ):
        if field in results:
            return [part]
    raise UserError(f"a record with the results {', '.join(results) or 'of nothing'}: of no command that is known here")


def ladders(record: dict) -> list[dict]:
    """What ladder_report.as_json wrote."""
    return [part["ladder"] for part in parts(record) if "ladder" in part]


def real_ladders(record: dict) -> list[dict]:
    """What vllm/real_ladder_report.as_json wrote."""
    return [part["real ladder"] for part in parts(record) if "real ladder" in part]


def verifications(record: dict) -> list[dict]:
    """What verify_report.as_json wrote."""
    return [run for part in parts(record) for run in part.get("verify", ())]


def cabinets(record: dict) -> list[dict]:
    """What cabinet.as_json wrote."""
    return [part["cabinet"] for part in parts(record) if "cabinet" in part]


def timings(record: dict) -> list[dict]:
    """What bench/exact_cost.py wrote."""
    return [part["bench"] for part in parts(record) if "bench" in part]


def kernels(record: dict) -> list[dict]:
    """What kernel_bench.py wrote."""
    return [part["kernels"] for part in parts(record) if "kernels" in part]


def packings(record: dict) -> list[dict]:
    """What real_vllm/pack_bench.py wrote."""
    return [part["pack"] for part in parts(record) if "pack" in part]


def outcomes(record: dict) -> dict[str, str]:
    """What became of each test or notebook cell, by its name."""
    return {node: outcome for part in parts(record) for node, outcome in part.get("tests", {}).items()}


def healthy_answers(record: dict) -> list[Recorded]:
    """The answers that any machine must reproduce token by token."""
    found = []
    for run in ladders(record):
        for row in (row for row in run["rows"] if row["rung"] in (ladder.REFERENCE, ladder.LAST)):
            found += recorded_answers(row)
    for run in real_ladders(record):
        for row in (row for row in run["rows"] if row["rung"] == ladder.REFERENCE):
            found += recorded_answers(row)
    for run in verifications(record):
        found += [Recorded(row["prompt_class"], row["number"], row["tokens"], row["sha256"]) for row in run["rows"]]
    return found


def recorded_answers(row: dict) -> list[Recorded]:
    """The answers of one row of a ladder, numbered as their prompts."""
    numbered = enumerate(row["answers"])
    return [Recorded(row["prompt_class"], number, a["tokens"], a["sha256"]) for number, a in numbered]
