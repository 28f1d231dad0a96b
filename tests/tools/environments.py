"""`make environments`: the same tests in other surroundings; report to tests/tools/figures/environments.json.

    python -m tests.tools.environments                       every row, in a folder that is removed afterwards
    python -m tests.tools.environments --folder F wheel      rows whose name holds a word; F keeps what was installed

Each row is an interpreter with a torch, a triton and a numpy, and one thing about its surroundings. It runs QUICK, and
not the whole suite, over a clone of the last commit. What pip installs for the versions of constraints.txt is checked
against the hashes of requirements.lock. Packages are installed once for an interpreter and shared by its rows: a row's
venv names the folders that it takes in a .pth file. Only "wheel" has a venv of its own, with everything in it.

Interpreters are found on PATH as python3.11 and python3.12 or named with --pythons; pip takes its index from its
usual settings (PIP_INDEX_URL, PIP_FIND_LINKS ...). A row whose interpreter or version is not to be had is "not here".
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from dcp_fix.records import machine
from tests.installed import PINS, NotHere, Place, pip, run

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "tests" / "tools" / "figures" / "environments.json"
QUICK = (
    "tests/attention/test_kernel.py", "tests/combine/test_kernel.py", "tests/combine/test_combine.py",
    "tests/test_kv_cache.py",
    "tests/test_cli.py", "tests/records/test_records.py", "tests/base/test_output.py",
    "tests/doctor/test_target.py",
    "-k", "not (hopper or 90 or damaged or sizes or any_record or changes_no_status)",
)  # fmt: skip
SIGNALS = (
    "tests/base/test_process.py", "tests/ranks/test_faults.py", "tests/doctor/test_doctor.py",
    "tests/real_vllm/test_boot.py",
    "-k", "signal or ctrl_c or interrupt or nohup",
)  # fmt: skip
BUILD = ("build==1.6.1", "pyproject_hooks==1.3.3")
LIMIT_S = 3600.0  # of a row: it only catches a hang
NOBODY = 65534
COMMANDS = (["--version"], ["--help"], ["doctor", "--help"], ["reproduce", "--classes", "512", "--json", "r.json"])


@dataclass(frozen=True)
class Row:
    """One environment; None for a triton that is not installed."""

    name: str
    python: str = "3.11"
    torch: str = PINS["torch"]
    triton: str | None = PINS["triton"]
    numpy: str = PINS["numpy"]
    tests: tuple[str, ...] = QUICK
    environment: dict = field(default_factory=dict)


ROWS = (
    Row("Python 3.11"),
    Row("Python 3.12", "3.12"),
    Row("torch 2.11 and triton 3.6", "3.12", torch="2.11.0", triton="3.6.0", numpy="2.3.5"),
    Row("triton 3.6 under numpy 2.4", triton="3.6.0"),
    Row("numpy 2.5", "3.12", numpy="2.5.5"),
    Row("triton 3.6 under numpy 2.5", "3.12", torch="2.11.0", triton="3.6.0", numpy="2.5.5"),
    Row("no triton", triton=None),
    Row("read-only"),
    Row("LC_ALL=C", environment={"LC_ALL": "C", "LANG": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}),
    Row("FORCE_COLOR=3", environment={"FORCE_COLOR": "3", "CLICOLOR_FORCE": "1"}),
    Row("SIGINT ignored", tests=SIGNALS),
    Row("spaces and other letters"),
    Row("wheel", tests=("python -m build", "pip check", *(" ".join(["dcp-fix", *words]) for words in COMMANDS))),
)


def main() -> int:
    """Run the rows, print a line for each, write the report; 1 if one failed."""
    options = argparse.ArgumentParser()
    options.add_argument("words", nargs="*")
    options.add_argument("--folder", type=Path)
    options.add_argument("--pythons", nargs="+", default=["python3.11", "python3.12"])
    asked = options.parse_args()
    chosen = [row for row in ROWS if not asked.words or any(word in row.name for word in asked.words)]
    with contextlib.ExitStack() as stack:
        folder = asked.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)  # the row of another user reads here
        place = Place(folder.resolve(), interpreters(asked.pythons))
        rows = []
        for row in chosen:
            rows.append(outcome(place, row))
            print(json.dumps(rows[-1]), flush=True)
            report(rows)
    return int(any(row["outcome"] == "failed" for row in rows))


def report(rows: list[dict]) -> None:
    """Put these outcomes into the report, in the order of ROWS, beside those of the rows that were not asked for."""
    known = json.loads(REPORT.read_text())["rows"] if REPORT.exists() else []
    last = {row["name"]: row for row in known + rows}
    REPORT.parent.mkdir(exist_ok=True)
    found = {"cpu": machine.cpu_model(), "quick": QUICK, "rows": [last[row.name] for row in ROWS if row.name in last]}
    REPORT.write_text(json.dumps(found, indent=1) + "\n")


def interpreters(names: list[str]) -> dict[str, str]:
    """{"3.11": its path} of those that can be started."""
    found = {}
    for name in names:
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        with contextlib.suppress(OSError):
            done = subprocess.run([name, "-c", code], capture_output=True, text=True)
            if done.returncode == 0:
                found.setdefault(done.stdout.strip(), shutil.which(name))
    return found


def outcome(place: Place, row: Row) -> dict:
    """What became of a row: counts of tests, the commit, and the reason where it is not simply "passed"."""
    told = {"name": row.name, "commit": place.commit, "ran": " ".join(row.tests)}
    try:
        return told | (wheel(place, row) if row.name == "wheel" else tests(place, row))
    except NotHere as reason:
        return told | {"outcome": "not here", "reason": str(reason)}


VERSIONS = """
import importlib, json, platform
found = {"python": platform.python_version()}
for name in ("torch", "triton", "numpy"):
    try:
        found[name] = importlib.import_module(name).__version__
    except ImportError:
        found[name] = None
print(json.dumps(found))
"""


# --- what is run ------------------------------------------------------------------------------------------------------


def tests(place: Place, row: Row) -> dict:
    """Pytest over a clone, in the row's surroundings."""
    checkout, folder, options = place.checkout, place.folder / "venvs" / re.sub(r"\W+", "-", row.name), {}
    if row.name == "spaces and other letters":
        inside = place.folder / "mit Leerzeichen, é, 日本"
        checkout, folder = place.clone(inside / "die Kopie ü"), inside / "ein venv ß"
    python = place.venv(row, folder)
    scratch = Path(tempfile.mkdtemp(dir=folder, prefix="tmp ä " if " " in folder.name else "tmp"))
    settings = {"PYTHONPATH": str(checkout), "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}
    if row.name == "read-only":
        settings |= {"HOME": str(scratch)}
        options = elsewhere(checkout, scratch)
    if row.name == "SIGINT ignored":
        options = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    options |= {"cwd": checkout, "env": clean() | settings | row.environment}
    found = json.loads(run([python, "-c", VERSIONS], **options).stdout)
    xml = scratch / "results of ä.xml"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={xml}", *row.tests]
    done = subprocess.run(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S, **options
    )
    (place.folder / f"{re.sub(chr(92) + 'W+', '-', row.name)}.log").write_bytes(done.stdout)
    if not xml.exists():
        return {"versions": found, "outcome": "failed", "reason": done.stdout.decode(errors="replace")[-300:]}
    return {"versions": found} | counted(xml, done.returncode)


def clean() -> dict:
    """This process's environment without what it was told about itself."""
    return {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "VIRTUAL_ENV", "TRITON_", "MAKE"))
    }


def elsewhere(checkout: Path, scratch: Path) -> dict:
    """Options of a process that may not write into the checkout: as root those of another user, whom modes bind."""
    if os.geteuid():
        run(["chmod", "-R", "a-w", checkout])
        return {}
    os.chown(scratch, NOBODY, NOBODY)
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []}


def counted(xml: Path, status: int) -> dict:
    """Counts of a run, its outcome and, of what failed or was skipped, the commonest reason."""
    cases = list(ElementTree.parse(xml).iter("testcase"))
    failed = [case.get("classname") + "::" + case.get("name") for case in cases if case.find("failure") is not None]
    failed += [case.get("classname", "") + "::" + case.get("name") for case in cases if case.find("error") is not None]
    reasons = Counter(case.find("skipped").get("message") for case in cases if case.find("skipped") is not None)
    skipped = sum(reasons.values())
    commonest = [f"{count} skipped: {reason}" for reason, count in reasons.most_common(2)]
    return {
        "passed": len(cases) - len(failed) - skipped, "failed": len(failed), "skipped": skipped,
        "outcome": "failed" if failed or status else "passed", "reason": "; ".join(failed[:5] or commonest),
    }  # fmt: skip


def wheel(place: Place, row: Row) -> dict:
    """`python -m build` of the clone, installed into an empty venv by hash, run in an empty folder."""
    tools, built = place.folder / row.python / "build", place.folder / "dist"
    shutil.rmtree(built, ignore_errors=True)
    run([*pip(place.base(row.python)), "--no-deps", "--upgrade", "--target", tools, *BUILD])
    python = place.base(row.python) / "bin" / "python"
    command = [python, "-m", "build", "--no-isolation", "--outdir", built, place.clone(place.folder / "to build")]
    run(command, env=clean() | {"PYTHONPATH": str(tools)})
    venv, nowhere = place.folder / "venvs" / "wheel", place.folder / "nowhere"
    run([place.python(row.python), "-m", "venv", "--clear", venv])
    cpu = list(place.package(row.python, "torch", row.torch).glob("torch-*+cpu.dist-info"))
    locks = [
        word for file in ("requirements.lock", *(() if cpu else ("requirements-cuda.lock",))) for word in ("-r", file)
    ]
    run([*pip(venv), "--require-hashes", *locks], cwd=ROOT)
    run([*pip(venv), "--no-deps", next(built.glob("*.whl"))])
    shutil.rmtree(nowhere, ignore_errors=True)
    nowhere.mkdir()
    options = {"cwd": nowhere, "env": clean()}
    found = json.loads(run([venv / "bin" / "python", "-c", VERSIONS], **options).stdout)
    commands = [
        [venv / "bin" / "python", "-m", "pip", "check"],
        *([venv / "bin" / "dcp-fix", *words] for words in COMMANDS),
    ]
    ended = [
        subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, **options) for command in commands
    ]
    failed = [f"{' '.join(map(str, done.args[1:]))}: {done.stderr[-200:]}" for done in ended if done.returncode]
    return {
        "versions": found, "passed": len(ended) - len(failed), "failed": len(failed), "skipped": 0,
        "outcome": "failed" if failed else "passed", "reason": "; ".join(failed),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
