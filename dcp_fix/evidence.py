"""Equality, digests and recorded runs: what "identical" and "close" mean here, and how a run becomes evidence.

`same_bytes` compares bits: equal NaN payloads are the same, 0.0 and -0.0 are not. `close` counts units in the last
place of the compared dtype, and NaN is close to nothing. Only the first may be called identical.

A record is one JSON file that names its hardware, driver, versions, commit and command. It appears whole or not at all.

This file does not decide what to compare, and it never rounds a number.
"""

import hashlib
import json
import math
import os
from datetime import UTC, datetime
from pathlib import Path

import torch

from dcp_fix import machine
from dcp_fix.errors import UserError

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


def raw_bytes(data) -> bytes:
    """The bytes of a tensor (row-major, its own dtype), of a list of ints (as int64), or bytes as they are."""
    if isinstance(data, bytes):
        return data
    if not isinstance(data, torch.Tensor):
        data = torch.tensor(list(data), dtype=torch.int64)
    return data.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def digest(data) -> str:
    """SHA256, in hex, of `raw_bytes(data)`. Shape and dtype are not part of it; compare those with `same_bytes`.

    >>> digest([1, 2]) == digest(torch.tensor([[1], [2]]))
    True
    """
    return hashlib.sha256(raw_bytes(data)).hexdigest()


def same_bytes(a, b) -> bool:
    """Whether two tensors (or lists of ints, or bytes) agree in dtype, shape and every bit."""
    if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
        raise ValueError(f"cannot compare {type(a).__name__} with {type(b).__name__}: pass two of a kind")
    if isinstance(a, torch.Tensor) and (a.dtype != b.dtype or a.shape != b.shape):
        return False
    return raw_bytes(a) == raw_bytes(b)


def ulps_apart(a: torch.Tensor, b: torch.Tensor, floor=0.0) -> float:
    """The largest difference between two floating-point tensors of one dtype and shape, in units in the last place.

    The unit is that of the larger of |a|, |b| and `floor`, so 1.0 and its neighbour below are half a unit apart. Sums
    that cancel leave tiny elements with the rounding of large ones: name the magnitude of the summands as `floor` (a
    number, or a tensor that broadcasts). A NaN anywhere, or an infinity that the other side lacks, is `math.inf` apart.
    """
    if a.dtype != b.dtype or a.shape != b.shape or not a.is_floating_point():
        raise ValueError(
            f"cannot count ulps between {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}: "
            "pass floating-point tensors of one dtype and shape"
        )
    if a.numel() == 0:
        return 0.0
    x, y = a.detach().cpu().double(), b.detach().cpu().double()
    same = x == y  # equal infinities too, whose difference is NaN
    magnitude = torch.maximum(torch.maximum(x.abs(), y.abs()), torch.as_tensor(floor).detach().cpu().double())
    apart = torch.where(same, 0.0, (x - y).abs() / unit_in_last_place(magnitude, a.dtype))
    return apart.nan_to_num(nan=math.inf, posinf=math.inf).max().item()


def unit_in_last_place(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The spacing of `dtype` at each magnitude (fp64): 2**exponent * eps, and never below the smallest subnormal."""
    info = torch.finfo(dtype)
    bits = magnitude.clamp_min(info.smallest_normal).contiguous().view(torch.int64)
    power_of_two = (bits & 0x7FF0_0000_0000_0000).view(torch.float64)  # exponent field alone: exact, unlike pow or log2
    return power_of_two * info.eps


def close(a: torch.Tensor, b: torch.Tensor, ulps: float, floor=0.0) -> bool:
    """Whether no element of `a` is further than `ulps` units from `b`; `ulps_apart` defines the unit and `floor`."""
    return ulps_apart(a, b, floor) <= ulps


def first_difference(a, b):
    """Where two token lists, bytes or tensors first differ in a bit: an index, a tuple for a tensor of several dims.

    None if they are the same. A list that is the start of the other differs where it ends.
    """
    if not isinstance(a, torch.Tensor):
        pairs = enumerate(zip(a, b, strict=False))
        end = None if len(a) == len(b) else min(len(a), len(b))
        return next((i for i, (x, y) in pairs if x != y), end)
    if a.dtype != b.dtype or a.shape != b.shape:
        raise ValueError(
            f"cannot compare {a.dtype} {tuple(a.shape)} with {b.dtype} {tuple(b.shape)} element by element"
        )
    if same_bytes(a, b):
        return None
    rows = [t.detach().cpu().contiguous().view(-1).view(torch.uint8).view(a.numel(), -1) for t in (a, b)]
    differs = (rows[0] != rows[1]).any(dim=1).nonzero()
    index = tuple(int(i) for i in torch.unravel_index(differs[0, 0], a.shape))
    return index[0] if a.dim() == 1 else index


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
