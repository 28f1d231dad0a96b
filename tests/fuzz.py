"""`make fuzz`: the property tests with 10,000 examples each instead of 200; report to tests/figures/fuzz.json.

python -m tests.fuzz config            those whose name holds one of these words, no report
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "tests" / "figures" / "fuzz.json"


def properties() -> list[str]:
    """The files that hold property tests which take their number of examples from the profile."""
    texts = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    return [str(p.relative_to(ROOT)) for p, text in texts.items() if "\n@given(" in text and "max_examples" not in text]


def main(wanted: list[str]) -> int:
    """Run them; the exit status is pytest's."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=fuzz"]
    command += [
        "--hypothesis-show-statistics",
        "-m",
        "not gpu",
        *properties(),
        "-k",
        " or ".join(wanted or ["any", "shown"]),
    ]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    passing = {}
    for block in re.split(r"\n(?=\S+::\S+:\n)", done.stdout):
        if name := re.match(r"(\S+::\S+):\n", block):
            phases = re.findall(r"during generate phase.*?(\d+) passing examples", block, re.S)
            passing[name[1]] = sum(map(int, phases))
    if not wanted and passing:
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text(json.dumps({"passed": done.returncode == 0, "examples": passing}, indent=1) + "\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
