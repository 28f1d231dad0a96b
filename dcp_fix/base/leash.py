"""A process and everything that it starts end when it ends, when the caller says so, or when the caller dies.

    leashed(lifeline, work)     forks: the child does `work()`, this process waits and then ends all that is left

`lifeline` is the read end of a pipe whose write end the caller holds: a byte, or the end of the pipe, means "enough".
This process becomes the parent of every orphan below it (Linux, PR_SET_CHILD_SUBREAPER), so a process that left the
session and the process group is still found. It ends as its child ended, by the same status or signal.

Not covered: what runs elsewhere on request (a job given to cron, systemd or a container), what changed its user, and,
where the kernel lacks subreapers, what left the process group.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import time
from collections.abc import Callable

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PATIENCE = 5.0  # seconds that killed processes get


def leashed(lifeline: int, work: Callable[[], None], keep: int | None = None, patience: float = PATIENCE) -> None:
    """Does not return. `keep` is a file descriptor that the child alone holds; `patience`: seconds for the killed."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    child = os.fork()
    if child == 0:
        os.close(lifeline)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a target may kill its parent, which would end it
        work()
        os._exit(0)
    if keep is not None:
        os.close(keep)
    status = wait(child, lifeline)
    end_all(patience)
    leave(status)


def prctl(option: int, value: int) -> None:
    """Linux's prctl(2); where there is no such call, the process group is all there is."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def wait(child: int, lifeline: int) -> int | None:
    """The child's wait status, None where the caller had enough before it ended."""
    watched = os.pidfd_open(child)
    ready, _, _ = select.select([watched, lifeline], [], [])
    os.close(watched)
    return os.waitpid(child, 0)[1] if watched in ready else None


def end_all(patience: float) -> None:
    """Kill every descendant: those below a killed one become ours, and are next."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        for pid in children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
        except ChildProcessError:
            return


def children() -> list[int]:
    """Process ids whose parent this process is."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    found.append(int(name))
    return found


def leave(status: int | None) -> None:
    """End as `status` says."""
    if status is None:
        os._exit(1)
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
