"""The committed figures of the long runs, tests/tools/figures/NAME.json: what was found, and on what.

tests/README.md shows them as tables, which `write` writes anew; so does `python -m tests.tools.figure`.
"""

import json
import re
from pathlib import Path

from dcp_fix.records import machine

FOLDER = Path(__file__).resolve().parent / "figures"
README = FOLDER.parents[1] / "README.md"
SECTION = re.compile(r"(?s)(?<=<!-- figures: written by python -m tests.tools.figure -->\n\n).*?(?=\n<!-- end of)")


def surroundings() -> dict:
    """Command, commit, hardware and versions; asked before a long run, whose checkout may move on meanwhile."""
    sha, dirty = machine.commit()
    command = machine.command_line()
    return {
        "command": command, "commit": sha, "dirty": dirty,
        "hardware": machine.hardware(), "versions": machine.versions(),
    }  # fmt: skip


def write(name: str, found: dict) -> None:
    """Write tests/tools/figures/NAME.json, and the tables."""
    (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    README.write_text(SECTION.sub(lambda _: markdown(), README.read_text()))


def read(name: str) -> dict:
    """The committed figure NAME."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def markdown() -> str:
    """The tables of tests/README.md."""
    mutants, properties = read("mutants")["rows"], read("fuzz")["properties"].values()
    killed = sum(row["outcome"] == "killed" for row in mutants)
    passed, fewest = sum(row["passed"] for row in properties), min(row["examples"] for row in properties)
    counts = [
        ("`make mutants`", f"{len(mutants)} defects put in", f"{killed} noticed"),
        ("`make fuzz`", f"{len(properties)} properties, {fewest:,} examples of each", f"{passed} hold"),
    ]
    parts = [
        table(("run", "asked", "found"), counts),
        table(
            ("`make endure`", "prefix hits", "evictions", "differing answers", "largest difference of a logit", "MiB"),
            [endured(part, read("endure")[part]) for part in ("exact", "ordinary", "groups")],
        ),
        table(
            ("`make environments`", "Python", "torch", "triton", "numpy", "passed", "failed", "skipped"),
            [surrounded(row) for row in read("environments")["rows"]],
        ),
    ]
    return "\n".join(parts)


def endured(part: str, found: dict) -> tuple:
    """One line of the second table."""
    memory = f"{found['mib'][1]:.1f} to {found['mib'][-1]:.1f} ({found['growth']:+.2%})"
    if part == "groups":
        return f"{found['cycles']:,} groups of four ranks", "", "", "", "", memory
    hits, evictions, differing = f"{found['prefix_hits']:,}", f"{found['evictions']:,}", len(found["differing"])
    return f"{found['requests']:,} {part} requests", hits, evictions, differing, found["largest_difference"], memory


def surrounded(row: dict) -> tuple:
    """One line of the third table."""
    versions = (row.get("versions", {}).get(name) or "none" for name in ("python", "torch", "triton", "numpy"))
    return row["name"], *versions, *(row.get(name, row["outcome"]) for name in ("passed", "failed", "skipped"))


def table(head: tuple, rows: list[tuple]) -> str:
    """Markdown of these cells."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


if __name__ == "__main__":
    README.write_text(SECTION.sub(lambda _: markdown(), README.read_text()))
