"""What a command does with its process: streams that can be written, signals that are noticed, an exit status.

    ready_streams()                      before anything is printed
    with stoppable(): ...                Ctrl-C, SIGTERM and SIGHUP raise Stopped, a KeyboardInterrupt
    sys.exit(flushed(status))            after everything is printed

A signal that this process was told to ignore (nohup, a script's background job) stays ignored.

It does not: start processes (ranks/launch.py), end what they started (leash.py), or decide what a status means.
"""

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from dcp_fix.base.errors import USER_ERROR, UserError

BROKEN_PIPE = 128 + signal.SIGPIPE
AGAIN_S = 0.05  # until a signal that came in an import is tried again


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def status_of(stop: KeyboardInterrupt) -> int:
    """The exit status of a process that a signal ended: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
    return 128 + (stop.number if isinstance(stop, Stopped) else signal.SIGINT)


def ending(code: int) -> str:
    """How a child ended, in words, from its `returncode`: real-time signals have a number and no name."""
    if code >= 0:
        return f"ended with status {code}"
    names = {known.value: known.name for known in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


@contextmanager
def stoppable() -> Iterator[None]:
    """While inside, Ctrl-C, SIGTERM and SIGHUP raise `Stopped`, so that what was begun is tidied up. Main thread only.

    Not in the middle of an import, which may swallow it (torch's does): there it is raised as soon as that has ended.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        if importing(frame):
            signal.signal(signal.SIGALRM, lambda _, later: stop(number, later))
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
            return
        raise Stopped(number)

    heeded = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {signal.SIGALRM: signal.getsignal(signal.SIGALRM)} | {n: signal.signal(n, stop) for n in heeded}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def importing(frame: FrameType | None) -> bool:
    """Whether a frame was reached through an import."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class Forgiving(io.TextIOWrapper):
    """Standard error that may be full or have no reader left: what is said there is lost, and nothing else."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            to_nowhere(self)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            to_nowhere(self)


def ready_streams() -> None:
    """Make standard output and error fit for any text: closed ones lead nowhere, what they cannot encode is escaped.

    Standard error forgives: what cannot be said there must not hide the status, nor keep a file from being written.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
    if sys.stderr is sys.__stderr__:
        sys.stderr = Forgiving(sys.stderr.buffer, sys.stderr.encoding, line_buffering=True)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def printed(show: Callable, *values: object) -> None:
    """show(*values), which prints. A reader that has gone is no error; raises UserError where nothing can be written.

    For results: what they say is written down already, or returned as a status.
    """
    try:
        show(*values)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # the second is what rich makes of the first, with a status of 1
        to_nowhere(sys.stdout)
    except OSError as error:
        to_nowhere(sys.stdout)
        raise UserError(f"standard output cannot be written ({error.strerror}); what follows is lost") from None


def flushed(status: int) -> int:
    """The status, after the last text has left; USER_ERROR instead of 0 where it could not, and nobody said so yet."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            to_nowhere(stream)
        except OSError:
            to_nowhere(stream)
            status = status or USER_ERROR
    return status


def to_nowhere(stream) -> None:
    """Let what the stream still holds, and all that follows, go: else Python would complain at its end, status 120."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
