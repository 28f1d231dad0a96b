"""Recorded runs: how a run becomes evidence.

A record is one JSON file that names its hardware, driver, versions, commit and command (`Record` is its schema). It
appears whole or not at all (output.py).
"""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dcp_fix.base.bounded import MIB, read_json
from dcp_fix.base.errors import UserError, shown
from dcp_fix.base.output import deliver, write_json
from dcp_fix.base.schema import Schema, allowed, checked
from dcp_fix.records import machine

SCHEMA_VERSION = 1
LARGEST = 64 * MIB
Text = Annotated[str, Field(max_length=20_000)]


class Hardware(Schema):
    """What the run happened on; `gpus` by name, in order."""

    cpu: Text = allowed("the processor's name")
    cores: int = allowed("a number of cores, from 1", ge=1, le=1 << 20)
    gpus: list[Text] = allowed("a list of names")
    driver: Text | None = allowed("a version, or null")


class Versions(Schema):
    """What ran."""

    python: Text = allowed("a version")
    torch: Text = allowed("a version")
    triton: Text | None = allowed("a version, or null")
    cuda: Text | None = allowed("a version, or null")


class Record(Schema):
    """One recorded run. `results` is what the command makes of it: an object or a list, never empty."""

    schema_version: int = allowed(f"{SCHEMA_VERSION}, which this dcp_fix reads", ge=SCHEMA_VERSION, le=SCHEMA_VERSION)
    created: str = allowed("a time such as 2026-11-30T01:02:03+00:00", pattern=r"^\d{4}-\d\d-\d\dT[\d:.]{8,15}\+00:00$")
    command: Text = allowed("a command line")
    commit: str | None = allowed("a commit of 40 hexadecimal digits, or null", pattern="^[0-9a-f]{40}$")
    dirty: bool | None = allowed("true, false or null")
    hardware: Hardware = allowed("an object")
    versions: Versions = allowed("an object")
    results: dict[str, Any] | list[Any] = allowed("an object or a list, not empty", min_length=1)


def make_record(command: str, results) -> dict:
    """A record of `results` (dict or list), made now and here. Raises UserError for results of another kind."""
    sha, dirty = machine.commit()
    made = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": sha,
        "dirty": dirty,
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "results": results,
    }
    checked(Record, made, "this run's record")
    return made


def record(path, command: str, results) -> dict:
    """Write `results` to `path` with hardware, versions, commit and command; returns the record."""
    made = make_record(command, results)
    write_json(path, made)
    return made


def deliver_record(path, results: Callable[[], dict | list], show: Callable, *values) -> None:
    """What results() gives as a record in `path`, if there is one, and then what show(*values) prints."""
    deliver(path, path and make_record(machine.command_line(), results()), show, *values)


def load_record(path) -> dict:
    """Read a record and check its schema. Raises UserError, naming the file and what is wrong with it."""
    try:
        loaded = read_json(Path(path), LARGEST)
    except FileNotFoundError:
        raise UserError(f"{shown(path)}: no such record") from None
    checked(Record, loaded, shown(path))
    return loaded
