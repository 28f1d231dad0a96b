"""A child process that starts processes of its own: followed through a file of JSON lines, and gone afterwards.

The child gets a session of its own, so that Ctrl-C reaches this process alone, and a mark in its environment. When it
has ended, or is to end, every process of that session or with that mark is killed, however it was started. Where this
process is killed outright, the child notices that its standard input has ended (llm_child.py).

It does not: know what the child does, or judge how it ended.
"""

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MARK = "DCP_FIX_CHILD"
LOOK_S = 0.1  # between two looks at the file
GRACE_S = 20.0  # how long a child that has said "end" may take to leave by itself
GONE_S = 15.0  # how long killed processes may take to vanish


@contextmanager
def running(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen]:
    """The command as a child, its output in `log`. On leaving, it and all that it started are gone."""
    mark = uuid.uuid4().hex
    with open(log, "ab") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env=environment | {MARK: mark},
        )  # fmt: skip
    try:
        yield child
    finally:
        stop(child, mark)


def stop(child: subprocess.Popen, mark: str) -> None:
    """Kill the child and what it started, also what has left its group. Raises RuntimeError if something survives."""
    deadline = time.monotonic() + GONE_S
    while found := members(child.pid, mark):
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if child.poll() is None:
            child.kill()
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {found} that vLLM started cannot be killed: end them by hand")
        time.sleep(LOOK_S / 2)
    child.wait()
    child.stdin.close()


def members(session: int, mark: str) -> list[int]:
    """Living processes of a session, or with the mark in their environment."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if belongs(pid, session, mark)]


def belongs(pid: int, session: int, mark: str) -> bool:
    """Whether a process is one of ours; one that has ended, or is another user's, is not."""
    try:
        state, _, _, its_session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
        if state in "ZX":
            return False
        return int(its_session) == session or f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except (OSError, ValueError):
        return False


def follow(child: subprocess.Popen, path: Path, timeout: float, seen: Callable[[dict | None], None]) -> str | None:
    """Give every line of `path` to `seen` as it comes, and None in between; until "end", or how it failed.

    The sentence for a failure begins with a verb: `ended with status 1`, `took longer than 600 s`.
    """
    deadline, ended = time.monotonic() + timeout, False
    with open(path, encoding="utf-8") as lines:
        while not ended:
            over = child.poll() is not None  # before reading: what it wrote last must not be missed
            for event in complete(lines):
                ended = ended or event.get("event") == "end"
                seen(event)
            if over and not ended:
                return ending(child.returncode)
            if time.monotonic() > deadline and not ended:
                return f"took longer than {timeout:.0f} s"
            seen(None)
            time.sleep(0 if ended else LOOK_S)
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        pass  # its answers are whole, and it is killed now
    return None


def complete(lines) -> Iterator[dict]:
    """The whole lines of JSON that have been written since."""
    while True:
        place = lines.tell()
        line = lines.readline()
        if not line.endswith("\n"):
            lines.seek(place)
            return
        yield json.loads(line)


def ending(code: int) -> str:
    """An exit status in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
