"""`make environments`: the same tests in other surroundings; report to tests/tools/figures/environments.json.

    python -m tests.tools.environments                       every row, in a folder that is removed afterwards
    python -m tests.tools.environments --folder F wheel      rows whose name holds a word; F keeps what was installed

Each row is an interpreter with a torch, a triton and a numpy, and one thing about its surroundings. It runs QUICK, and
not the whole suite, over a clone of the last commit. Rows with the same versions share a venv. What pip installs for
the versions of constraints.txt is checked against the hashes of requirements.lock.

Interpreters are those on PATH as python3.11 and python3.12; pip takes its index from its usual settings (PIP_INDEX_URL,
PIP_FIND_LINKS ...). A row whose interpreter or version is not to be had is "not here".
"""

import argparse
import contextlib
import json
import os
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
from tests.tools import figure
from tests.tools.lock import HEADERS, locked

ROOT = Path(__file__).resolve().parents[2]
PINS = {name: version for file in HEADERS for name, version, _ in locked((ROOT / file).read_text())}
VARIED = ("torch", "triton", "numpy")
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
LIMIT_S = 3600.0  # of a row: it only catches a hang
NOBODY = 65534
COMMANDS = (["--version"], ["--help"], ["doctor", "--help"], ["reproduce", "--classes", "512", "--json", "r.json"])


class NotHere(Exception):
    """This machine lacks what the row needs."""


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
    Row("wheel", tests=("pip wheel", "pip check", *(" ".join(["dcp-fix", *words]) for words in COMMANDS))),
)


def main() -> int:
    """Run the rows, print a line for each, write the report; 1 if one failed."""
    options = argparse.ArgumentParser()
    options.add_argument("words", nargs="*")
    options.add_argument("--folder", type=Path)
    asked = options.parse_args()
    chosen = [row for row in ROWS if not asked.words or any(word in row.name for word in asked.words)]
    with contextlib.ExitStack() as stack:
        folder = asked.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)  # the row of another user reads here
        place = Place(folder.resolve())
        rows = []
        for row in chosen:
            rows.append(outcome(place, row))
            print(json.dumps(rows[-1]), flush=True)
            report(rows)
    return int(any(row["outcome"] == "failed" for row in rows))


def report(rows: list[dict]) -> None:
    """Put these outcomes into the report, in the order of ROWS, beside those of the rows that were not asked for."""
    last = {row["name"]: row for row in figure.read("environments")["rows"] + rows}
    found = {"cpu": machine.cpu_model(), "quick": QUICK, "rows": [last[row.name] for row in ROWS if row.name in last]}
    figure.write("environments", found)


def outcome(place: "Place", row: Row) -> dict:
    """What became of a row: counts of tests, the commit, and the reason where it is not simply "passed"."""
    told = {"name": row.name, "commit": place.commit, "ran": " ".join(row.tests)}
    try:
        return told | (wheel(place, row) if row.name == "wheel" else tests(place, row))
    except NotHere as reason:
        return told | {"outcome": "not here", "reason": str(reason)}


# --- what is installed ------------------------------------------------------------------------------------------------


class Place:
    """The folder that holds a clone and the venvs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.venvs = folder, folder / "venvs"
        self.checkout = self.clone(folder / "checkout", ROOT)
        self.commit = run(["git", "-C", self.checkout, "rev-parse", "HEAD"]).stdout.strip()

    def clone(self, path: Path, source: Path | None = None) -> Path:
        """A clone of the last commit, anew; a later one of the first clone, so that all rows run the same."""
        shutil.rmtree(path, ignore_errors=True)
        run(["git", "clone", "--quiet", source or self.checkout, path])
        return path

    def venv(self, row: Row, venv: Path | None = None) -> Path:
        """The interpreter of a venv that has the row's versions: `venv`, or the one of all rows with these versions."""
        venv = venv or self.venvs / f"{row.python} {row.torch} {row.triton} {row.numpy}".replace(" ", "-")
        if not (venv / "whole").exists():
            empty(row, venv)
            pinned(venv)
            chosen = {name: getattr(row, name) for name in VARIED}
            other = [f"{name}=={version}" for name, version in chosen.items() if version not in (None, PINS[name])]
            if row.torch != PINS["torch"]:  # with the libraries of its own
                run([*pip(venv), f"torch=={row.torch}"])
            if other:
                run([*pip(venv), "--no-deps", *other])
            if row.triton is None:
                run([venv / "bin" / "python", "-m", "pip", "uninstall", "--quiet", "--yes", "triton"])
            (venv / "whole").touch()
        return venv / "bin" / "python"


def empty(row: Row, venv: Path) -> None:
    """A venv with pip and nothing else."""
    python = shutil.which(f"python{row.python}")
    if python is None:
        raise NotHere(f"no python{row.python} on PATH")
    run([python, "-m", "venv", "--clear", venv])


def pinned(venv: Path) -> None:
    """Install the lock file into a venv, and the CUDA libraries where torch is not a CPU build."""
    locks = ["requirements.lock", "requirements-cuda.lock"]
    hashed = [*pip(venv), "--no-deps", "--require-hashes", "-r"]
    run([*hashed, ROOT / locks[0]])
    if not list(venv.glob("lib/python3.*/site-packages/torch-*+cpu.dist-info")):
        run([*hashed, ROOT / locks[1]])


def pip(venv: Path) -> list:
    return [venv / "bin" / "python", *"-m pip install --quiet --disable-pip-version-check --only-binary=:all:".split()]


def run(command: list, **options) -> subprocess.CompletedProcess:
    """A step of the set-up; NotHere with its last line of error where it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "ERROR" in line or "rror:" in line] or [done.stderr[-200:]]
        raise NotHere(f"{' '.join(map(str, command[1:4]))}: {said[-1][:300]}")
    return done


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
    checkout, venv, prefix, options = place.checkout, None, "tmp", {}
    if row.name == "spaces and other letters":
        inside, prefix = place.folder / "mit Leerzeichen, é, 日本", "tmp ä "
        checkout, venv = place.clone(inside / "die Kopie ü"), inside / "ein venv ß"
    python = place.venv(row, venv)
    scratch = Path(tempfile.mkdtemp(dir=python.parents[1], prefix=prefix))
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
    (place.folder / f"{row.name}.log").write_bytes(done.stdout)
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
    bad = [case for kind in ("failure", "error") for case in cases if case.find(kind) is not None]
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in bad]
    reasons = Counter(case.find("skipped").get("message") for case in cases if case.find("skipped") is not None)
    skipped = sum(reasons.values())
    commonest = [f"{count} skipped: {reason}" for reason, count in reasons.most_common(2)]
    return {
        "passed": len(cases) - len(failed) - skipped, "failed": len(failed), "skipped": skipped,
        "outcome": "failed" if failed or status else "passed", "reason": "; ".join(failed[:5] or commonest),
    }  # fmt: skip


def wheel(place: Place, row: Row) -> dict:
    """A wheel of the clone, installed into an empty venv by hash, and its commands in an empty folder."""
    built, venv, nowhere = (place.folder / name for name in ("dist", "venvs/wheel", "nowhere"))
    shutil.rmtree(built, ignore_errors=True)
    shutil.rmtree(nowhere, ignore_errors=True)
    nowhere.mkdir()
    build = "-m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir".split()
    run([place.venv(row), *build, built, place.clone(place.folder / "to build")], env=clean())
    empty(row, venv)
    pinned(venv)
    run([*pip(venv), "--no-deps", next(built.glob("*.whl"))])
    options, programs = {"cwd": nowhere, "env": clean()}, venv / "bin"
    found = json.loads(run([programs / "python", "-c", VERSIONS], **options).stdout)
    commands = [[programs / "pip", "check"], *([programs / "dcp-fix", *words] for words in COMMANDS)]
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
