"""Recorded runs: how a run becomes evidence.

A record is one JSON file that names its hardware, driver, versions, commit and command. It appears whole or not at all.
"""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

from dcp_fix.errors import UserError
from dcp_fix.evidence import machine

SCHEMA_VERSION = 1
FIELDS = {
    "schema_version": int,
    "created": str,
    "command": str,
    "commit": (str, type(None)),
    "dirty": (bool, type(None)),
    "hardware": dict,
    "versions": dict,
    "results": (dict, list),
}
HARDWARE_FIELDS = {"cpu": str, "cores": int, "gpus": list, "driver": (str, type(None))}
VERSION_FIELDS = {"python": str, "torch": str, "triton": (str, type(None)), "cuda": (str, type(None))}


def write_json(path, value) -> None:
    """Write `value` as JSON so that `path` holds all of it or is left as it was.

    Raises ValueError for NaN and infinities, which JSON lacks, and OSError if the folder cannot be written.
    """
    path = Path(path)
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def record(path, command: str, results) -> dict:
    """Write `results` (dict or list) to `path` with hardware, versions, commit and command; returns the record."""
    sha, dirty = machine.commit()
    written = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": sha,
        "dirty": dirty,
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "results": results,
    }
    check_record(written, path)
    write_json(path, written)
    return written


def load_record(path) -> dict:
    """Read a record and check its schema. Raises UserError, naming the file and what is wrong with it."""
    try:
        loaded = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such record") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: not a whole JSON file ({error}): record the run again") from None
    check_record(loaded, path)
    return loaded


def check_record(value, path) -> None:
    """Raise UserError unless `value` has every field of a record, each of its type, in the present schema version."""
    check_fields(value, FIELDS, path, "")
    if value["schema_version"] != SCHEMA_VERSION:
        raise UserError(f"{path}: schema version {value['schema_version']}, this dcp_fix reads {SCHEMA_VERSION}")
    check_fields(value["hardware"], HARDWARE_FIELDS, path, "hardware.")
    check_fields(value["versions"], VERSION_FIELDS, path, "versions.")


def check_fields(value, fields: dict, path, prefix: str) -> None:
    """Raise UserError naming the first of `fields` that is absent from the dict `value` or of another type."""
    if not isinstance(value, dict):
        raise UserError(f"{path}: {prefix or 'the file '}holds {type(value).__name__}, not an object: not a record")
    for name, kind in fields.items():
        if name not in value:
            raise UserError(f"{path}: no field {prefix}{name}: not a record, or one that was cut short")
        if not isinstance(value[name], kind) or (kind is int and isinstance(value[name], bool)):
            raise UserError(f"{path}: field {prefix}{name} is {value[name]!r}, of the wrong type")
