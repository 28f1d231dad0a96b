"""`make mutants`: put a defect into the sources, one at a time, and see a test go red.

    python -m tests.tools.mutants                 every one
    python -m tests.tools.mutants blocks exact    those whose file or change holds one of these words

The report, tests/tools/figures/mutants.json, holds the last outcome of each, and at which commit.

A mutant is (file, what stands there, what is put there, the tests that must notice). Each runs in a copy of this
checkout, in a process forked from one that has imported torch, and is "killed" when a test fails. It "lives" when all
pass, "breaks" when nothing can be imported or the process dies, which no test can miss, "hangs" when the limit of time
ends it, and has "moved" when its text is no longer there exactly once. A defect is let loose on this machine: the tests
must be safe to run with it, above all as root. Before that, the tests must pass without any mutant.
"""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.tools import figure
from tests.tools.mutant_list import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
HARNESS = 99  # exit status of a child in which not the tests failed
OUTCOMES = {0: "lives", 1: "killed", HARNESS: "untried"}  # by pytest's exit status
LIMIT_S = 900.0  # of one mutant: who hangs has been noticed


def main(words: list[str]) -> int:
    """Run the mutants, print a line for each, write the report; 1 if one lives or has moved."""
    chosen = [m for m in MUTANTS if not words or any(word in " ".join(m[:3]) for word in words)]
    here = figure.surroundings()
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder) / "tree")
        preload()
        rows, healthy = [], {}
        for mutant in chosen:
            tests = mutant[3]
            if tests not in healthy:
                healthy[tests] = outcome(tree, tests) == "lives"
                print(f"{'pass' if healthy[tests] else 'FAIL'} without a mutant: {tests}", flush=True)
            rows += [run(tree, *mutant) | {"commit": here["commit"]}] if healthy[tests] else []
            assert stat.S_ISCHR(os.stat(os.devnull).st_mode), f"a mutant has replaced {os.devnull}"
            report(here, rows)
    return 0 if len(rows) == len(chosen) and all(row["outcome"] == "killed" for row in rows) else 1


def report(here: dict, rows: list[dict]) -> None:
    """Put these outcomes into the report, beside those of the other mutants of the present list."""
    known = figure.read("mutants")["rows"] if (figure.FOLDER / "mutants.json").exists() else []
    last = {(row["file"], row["old"], row["new"], row["tests"]): row for row in known + rows}
    figure.write("mutants", here | {"rows": [last[mutant] for mutant in MUTANTS if mutant in last]})


def copied(tree: Path) -> Path:
    """The files of this checkout that git knows, or would."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def preload() -> None:
    """What every test needs and no mutant changes."""
    import anyio.pytest_plugin  # noqa: F401
    import hypothesis.strategies  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch

    torch.set_num_threads(1)


def run(tree: Path, file: str, old: str, new: str, tests: str) -> dict:
    """One mutant."""
    path, began = tree / file, time.monotonic()
    sound = path.read_text()
    result = "moved"
    if sound.count(old) == 1:
        path.write_text(sound.replace(old, new))
        result = outcome(tree, tests)
        path.write_text(sound)
    print(f"{result:7} {time.monotonic() - began:5.0f} s  {file}: {old.strip()!r} -> {new.strip()!r}", flush=True)
    return {"outcome": result, "file": file, "old": old, "new": new, "tests": tests}


def outcome(tree: Path, tests: str) -> str:
    """Whether the tests, words of a pytest command, notice: killed, lives or hangs."""
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            os._exit(in_child(tree, tests))
        finally:
            os._exit(HARNESS)  # whatever it was: a child must not go on as its parent
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return OUTCOMES.get(os.waitstatus_to_exitcode(status), "breaks")
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


def in_child(tree: Path, tests: str) -> int:
    """Pytest over the copy. Its output goes into a file beside it: what a mutant replaces must not be a device."""
    import pytest

    nowhere = os.open(tree.parent / "output", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[:] = [str(tree), *(p for p in sys.path if p not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "dcp_fix")]:
        del sys.modules[name]
    sys.dont_write_bytecode = True
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:nbval", *words(tests)]))


def words(tests: str) -> list[str]:
    """Files, and after -k one expression."""
    files, _, expression = tests.partition(" -k ")
    return files.split() + (["-k", expression] if expression else [])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
