"""A committed figure of the long runs, tests/tools/figures/NAME.json: what was found, and on what."""

import json
from pathlib import Path

from dcp_fix.records import machine

FOLDER = Path(__file__).resolve().parent / "figures"


def surroundings() -> dict:
    """Command, commit, hardware and versions; asked before a long run, whose checkout may move on meanwhile."""
    sha, dirty = machine.commit()
    command = machine.command_line()
    return {
        "command": command, "commit": sha, "dirty": dirty,
        "hardware": machine.hardware(), "versions": machine.versions(),
    }  # fmt: skip


def write(name: str, found: dict) -> None:
    """Write tests/tools/figures/NAME.json."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


def read(name: str) -> dict:
    """The committed figure NAME."""
    return json.loads((FOLDER / f"{name}.json").read_text())
