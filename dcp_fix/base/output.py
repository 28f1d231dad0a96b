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
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dcp_fix.base.errors import UserError, shown
from dcp_fix.base.process import printed

STDOUT = "-"
READER_S = 10.0  # how long a FIFO is waited for that nobody reads
NEW_MODE = 0o666  # of a new file, before the umask


def check(path) -> None:
    """Raise UserError unless `path` can be written; leaves everything as it is."""
    if path is None or to_stdout(path):
        return
    with named(path):
        target, kind = resolved(path)
        if kind in (None, stat.S_IFREG):
            if kind and not os.access(target, os.W_OK):
                raise UserError(f"{shown(path)}: is write-protected; name another file")
            os.close(beside(target)[0])
        elif not os.access(path, os.W_OK):
            raise UserError(f"{shown(path)}: cannot be written; name another file")


def check_folder(path: Path) -> None:
    """Raise UserError unless files can be made in the folder `path`, or it can be made itself."""
    with named(path):
        first = Path(os.path.abspath(path))
        while not os.path.lexists(first):
            first = first.parent
        if not first.is_dir():
            raise UserError(f"{shown(path)}: {shown(first)} is no folder; name another one")
        os.close(beside(first / "any")[0])


def to_stdout(path) -> bool:
    """Whether a path means standard output: `-`, or a name of the file that is open as it (/dev/stdout)."""
    if str(path) == STDOUT:
        return True
    try:
        return str(path) in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1") and bool(os.fstat(1))
    except OSError:
        return False


@contextmanager
def named(path) -> Iterator[None]:
    """While inside, what the system says of a path becomes one UserError that names it."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null character, a surrogate
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{shown(path)}: cannot be written ({shown(reason)}); name another file") from None


def resolved(path) -> tuple[Path, int | None]:
    """Where a path leads, and what is there (None: nothing yet). Raises UserError for what cannot hold evidence."""
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
    except FileNotFoundError:
        kind = None
    target = Path(os.path.realpath(path, strict=False))
    if kind is None and os.path.islink(target):
        raise UserError(f"{shown(path)}: is a link that leads to itself; name another file")
    if kind is None and not target.parent.is_dir():
        raise UserError(f"{shown(path)}: {shown(target.parent)} is no folder; make it first")
    if kind is None and str(path).endswith("/"):
        raise UserError(f"{shown(path)}: ends as a folder does; name a file")
    if kind not in (None, stat.S_IFREG, stat.S_IFIFO, stat.S_IFCHR):
        what = {stat.S_IFDIR: "a folder", stat.S_IFBLK: "a disk", stat.S_IFSOCK: "a socket"}.get(kind, "no file")
        raise UserError(f"{shown(path)}: is {what}; name a file")
    return target, kind


def beside(target: Path, keep: bool = False) -> tuple[int, str]:
    """A new empty file in the folder of `target`: (descriptor, name). Its name is gone already, unless `keep`."""
    descriptor, name = tempfile.mkstemp(prefix=".dcp_fix-", dir=target.parent)
    if not keep:
        os.unlink(name)
    return descriptor, name


def write(path, text: str) -> None:
    """Put `text` at `path`. Raises UserError, and then a file is as it was before."""
    if to_stdout(path):
        printed(sys.stdout.write, text)
        return
    with named(path):
        target, kind = resolved(path)
        if kind in (None, stat.S_IFREG):
            replace(target, text, exists=kind is not None)
        else:
            write_special(path, text)


def replace(target: Path, text: str, exists: bool) -> None:
    """The whole text under the name of `target`, or nothing new."""
    descriptor, name = beside(target, keep=True)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            like(descriptor, target if exists else None)
            os.fsync(descriptor)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def like(descriptor: int, old: Path | None) -> None:
    """Give a new file mode and owner of the one that it replaces; else the mode that any new file gets."""
    if old is None:
        mask = os.umask(0)
        os.umask(mask)
        os.fchmod(descriptor, NEW_MODE & ~mask)
        return
    was = os.stat(old)
    if (was.st_uid, was.st_gid) != (os.geteuid(), os.getegid()):
        with suppress(PermissionError):  # only root may give files away
            os.fchown(descriptor, was.st_uid, was.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(was.st_mode))


def write_special(path, text: str) -> None:
    """Into a device or a FIFO, which stays one. A FIFO gets READER_S for somebody to read it."""
    deadline = time.monotonic() + READER_S
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            break
        except OSError:  # ENXIO: nobody reads yet
            if time.monotonic() > deadline or not stat.S_ISFIFO(os.stat(path).st_mode):
                raise
            time.sleep(0.05)
    os.set_blocking(descriptor, True)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def write_json(path, value) -> None:
    """Put `value` as JSON at `path`. Raises ValueError for NaN and infinities, which JSON lacks, and UserError."""
    write(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def deliver(path, value: dict | list | None, show: Callable, *values) -> None:
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
