"""Where evidence goes: the one way in which every command writes a file.

    check(path)                   at the door: can it be written later? Nothing is changed
    deliver(path, value, show)    the file first, then what is printed, whatever became of the file

A file appears whole or stays as it was: its text goes into a new file beside it, of a name that nobody can guess, which
then takes its place and keeps its mode. Links are followed. A device or a FIFO is written to, not replaced. `-` is
standard output, which then holds the JSON and nothing else.
"""

import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dcp_fix.base.errors import UserError, shown
from dcp_fix.base.process import printed

STDOUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
NEW_MODE = 0o666  # of a new file, before the umask


def check(path: Path | str | None) -> None:
    """Raise UserError unless `path` can be written; leaves everything as it is."""
    if path is None or to_stdout(path):
        return
    with named(path):
        mode = mode_of(path)
        if stat.S_ISDIR(mode):
            raise UserError(f"{shown(path)}: is a folder; name a file")
        if os.path.exists(path) and not os.access(path, os.W_OK):
            raise UserError(f"{shown(path)}: is write-protected; name another file")
        if stat.S_ISREG(mode):
            check_folder(Path(os.path.realpath(path)).parent, make=False)


def check_folder(path: Path, make: bool = True) -> None:
    """Raise UserError unless files can be made in the folder `path`, or with `make` it can be made itself."""
    with named(path):
        first = Path(os.path.abspath(path))
        while make and not os.path.lexists(first):
            first = first.parent
        if not first.is_dir():
            raise UserError(f"{shown(path)}: {shown(first)} is no folder; make it first, or name another one")
        descriptor, name = tempfile.mkstemp(prefix=".dcp_fix-", dir=first)
        os.close(descriptor)
        os.unlink(name)


def to_stdout(path: Path | str | None) -> bool:
    """Whether a path means standard output: `-`, or a name of the file that is open as it (/dev/stdout)."""
    return str(path) in STDOUT


@contextmanager
def named(path: Path | str) -> Iterator[None]:
    """While inside, what the system says of a path becomes one UserError that names it."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null character, a surrogate
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{shown(path)}: cannot be written ({shown(reason)}); name another file") from None


def mode_of(path: Path | str) -> int:
    """Kind and permissions of what is there; those of a new file where nothing is."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return stat.S_IFREG | NEW_MODE & ~mask


def write(path: Path | str, text: str) -> None:
    """Put `text` at `path`. Raises UserError, and then a file is as it was before."""
    if to_stdout(path):
        printed(sys.stdout.write, text)
        return
    with named(path):
        mode = mode_of(path)
        if stat.S_ISREG(mode):
            replace(Path(os.path.realpath(path)), text, stat.S_IMODE(mode))
        else:
            Path(path).write_text(text, encoding="utf-8")


def replace(target: Path, text: str, mode: int) -> None:
    """The whole text under the name of `target`, or nothing new."""
    descriptor, name = tempfile.mkstemp(prefix=".dcp_fix-", dir=target.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def write_json(path: Path | str, value: dict | list) -> None:
    """Put `value` as JSON at `path`. Raises ValueError for NaN and infinities, which JSON lacks, and UserError."""
    write(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def deliver(path: Path | str | None, value: dict | list | None, show: Callable, *values) -> None:
    """`value` as JSON into `path`, if there is one; then show(*values), which prints, though the file failed.

    With `-` the JSON is all that is printed. Raises UserError at the end.
    """
    failed = None
    if path is not None:
        try:
            write_json(path, value)
        except UserError as error:
            failed = error
    if path is None or not to_stdout(path):
        printed(show, *values)
    if failed:
        raise failed
