"""`make fuzz`: every property test with 10,000 examples instead of 200; report to tests/tools/figures/fuzz.json.

    python -m tests.tools.fuzz                    all of them
    python -m tests.tools.fuzz config records     those whose file or name holds one of these words

The report holds, for each property, how many examples its last run generated that passed, and at which commit. `make
test` and this differ in the profile of tests/conftest.py alone.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

from tests.tools import figure

ROOT = Path(__file__).resolve().parents[2]
PYTEST = [sys.executable, *"-m pytest -q -p no:cacheprovider -p no:xdist -p no:nbval -m".split()]
PYTEST.append("hypothesis and not gpu")
FUZZ = ["--hypothesis-profile=fuzz", "--hypothesis-show-statistics"]


def main(words: list[str]) -> int:
    """Run them one after the other, each written to the report once it has ended; 1 if one failed."""
    chosen = [name for name in properties() if not words or any(word in name for word in words)]
    known = figure.read("fuzz")["properties"] if (figure.FOLDER / "fuzz.json").exists() else {}
    rows, here = {name: known[name] for name in properties() if name in known}, figure.surroundings()
    for name in chosen:
        began = time.monotonic()
        done = subprocess.run([*PYTEST, *FUZZ, name], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        passed = done.returncode == 0
        rows[name] = {"passed": passed, "examples": examples(done.stdout), "commit": here["commit"]}
        print(f"{time.monotonic() - began:5.0f} s  {rows[name]['examples']:6}  {name}", flush=True)
        print("" if passed else done.stdout, end="", flush=True)
        figure.write("fuzz", here | {"properties": dict(sorted(rows.items()))})
    return 0 if chosen and all(rows[name]["passed"] for name in chosen) else 1


def properties() -> list[str]:
    """The node ids of all property tests, found by hypothesis's own mark; parameters of one count as one."""
    listed = subprocess.run([*PYTEST, "--collect-only", "tests"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return list(dict.fromkeys(re.findall(r"^(\S+\.py::\w+)", listed.stdout, re.M)))


def examples(statistics: str) -> int:
    """How many passing examples the phase that generates them had, the fewest of its parameters."""
    return min(map(int, re.findall(r"during generate phase.*?(\d+) passing", statistics, re.S)), default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
