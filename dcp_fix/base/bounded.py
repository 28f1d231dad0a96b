"""Reading a file that somebody else wrote: what kind it is, how large, how deep, before anything in it is believed.

    read_json(Path("config.json"), most=MIB)

A path may name a folder, a FIFO that nobody writes to, a device without an end, a loop of links. The file is opened
without waiting, must be a regular one (links are followed) and of `most` bytes at most; of JSON every integer is short,
no name of an object comes twice, and NaN is none (but where files of Python's writer are to be read, `nan`). Whatever
is wrong is one UserError that begins with the path.

It does not: say what the values may be (schema.py), or guard against a file that changes while it is read.
"""

import json
import math
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from dcp_fix.base.errors import UserError, shown

MIB = 1 << 20
DIGITS = 30  # of an integer: a 64-bit one has 20
KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}  # fmt: skip


def check_regular(path: Path) -> int:
    """Its size in bytes, if the file can be opened and is a regular one; else UserError."""
    descriptor = opened(path)
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def opened(path: Path) -> int:
    """A descriptor of a regular file. Raises UserError; FileNotFoundError where there is nothing of that name."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{shown(path)}: cannot be read ({reason}); name a file that can") from None
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise UserError(f"{shown(path)}: is {KINDS.get(kind, 'no file')}; name a regular file")
    return descriptor


def read_bytes(path: Path, most: int) -> bytes:
    """All of a regular file of at most `most` bytes. Raises UserError; FileNotFoundError where there is none."""
    with os.fdopen(opened(path), "rb") as file:
        try:
            data = file.read(most + 1)
        except OSError as error:
            raise UserError(f"{shown(path)}: cannot be read ({error.strerror}); restore the file") from None
    if len(data) > most:
        raise UserError(f"{shown(path)}: longer than {most} bytes, which is the most that is read here")
    return data


def read_json(path: Path, most: int, nan: bool = False) -> Any:
    """The value that a JSON file of at most `most` bytes holds. Raises UserError; FileNotFoundError."""
    return parse_json(read_bytes(path, most), shown(path), nan)


def parse_json(data: bytes, name: str, nan: bool = False) -> Any:
    """The value of JSON text that came from `name`. Raises UserError for anything that is not plain JSON.

    `nan`: let NaN and the infinities pass, which are none, but which Python writes.
    """
    hooks: dict[str, Any] = {} if nan else {"parse_constant": no_constant, "parse_float": finite}
    try:
        return json.loads(data.decode("utf-8"), parse_int=short_int, object_pairs_hook=named_once, **hooks)
    except RecursionError:
        raise UserError(f"{name}: nested too deeply; restore the file") from None
    except ValueError as error:  # of the decoder, of JSON or of a hook
        raise UserError(f"{name}: not a whole JSON file ({shown(error)}); restore the file") from None


def short_int(text: str) -> int:
    """An integer of at most DIGITS digits: Python would convert thousands, and then refuse to print them."""
    if len(text) > DIGITS:
        raise ValueError(f"an integer of {len(text)} digits; at most {DIGITS} are read")
    return int(text)


def no_constant(text: str) -> float:
    """NaN and the infinities, which Python reads and JSON lacks."""
    raise ValueError(f"{text} is no JSON")


def finite(text: str) -> float:
    """A number that a float can hold: Python would take 1e999 for infinity."""
    if math.isinf(value := float(text)):
        raise ValueError(f"{shown(text, 60)} is beyond what a float holds")
    return value


def named_once(pairs: list[tuple]) -> dict:
    """An object, each of whose names comes once: else the last one would count without a word."""
    values = dict(pairs)
    if len(values) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {shown(twice, 60)!r} comes twice in one object")
    return values
