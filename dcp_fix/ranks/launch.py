"""Start a command once per rank on this host, as torchrun does, and leave no process behind.

The ranks find what torchrun would tell them in the environment. The store that they meet in lives in this process, so
that it outlives any rank; it listens on the loopback interface alone, and its keys begin with a token that only the
ranks are told. The first rank that ends badly is named in the store: the others learn of it at once
(watch.py) and have STOP_S to leave, then they are killed. An interrupt, or the end of this process, ends them all;
where this process is killed outright they notice that the store is gone.

It does not: span hosts (use torchrun), restart ranks, or choose which GPU a rank takes.
"""

import os
import secrets
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable

import torch.distributed as dist

from dcp_fix.base.errors import DIFFERS, FAULT, UserError, shown_lines
from dcp_fix.base.process import ending, status_of, stoppable
from dcp_fix.ranks.group import GroupError
from dcp_fix.ranks.place import TOKEN, prefix
from dcp_fix.ranks.watch import GRACE_S, STOPPED, known_failure, report_failure

HOST = "127.0.0.1"
STOP_S = GRACE_S + 5.0  # how long the other ranks may take to leave after one has failed
KILL_S = 2.0  # between asking a rank to end and killing it
SOCKETS = 64  # that the store or a rank may need
CONNECT_S = 5.0  # how long a connection of this host to itself may take
LOOK_S = 0.02  # between two looks at the ranks
RANK_DIFFERS = 4  # how a rank tells its launcher DIFFERS: Python itself ends with 1 when it cannot even import


def launch(command: list[str], procs: int) -> int:
    """Run `command` as ranks 0 .. procs - 1 and wait for all; 0, or the exit status of the first one that failed."""
    token, server = secrets.token_hex(16), loopback_store()
    store, ranks = dist.PrefixStore(prefix(token), server), []
    try:
        with stoppable():
            for rank in range(procs):
                ranks.append(start(command, rank, procs, server.port, token))
            status = wait(ranks, store)
    except KeyboardInterrupt as stop_asked:
        print("interrupted: stopping the ranks", file=sys.stderr)
        return status_of(stop_asked)
    finally:
        stop(ranks)
    if status not in (0, DIFFERS):
        print(f"error: {shown_lines(known_failure(store))}", file=sys.stderr)
    return status


def loopback_store() -> dist.TCPStore:
    """A store that no other host can reach: left to itself, torch's listens on every interface.

    Raises UserError where there is no loopback interface or no socket left: torch would try for minutes.
    """
    spare = []
    try:
        spare += [socket.socket() for _ in range(SOCKETS)]
        listener = socket.create_server((HOST, 0))
        spare += [socket.create_connection(listener.getsockname(), CONNECT_S), listener.accept()[0]]
    except OSError as error:
        raise UserError(
            f"the ranks cannot meet at {HOST} ({error.strerror}): bring the loopback interface up, or allow more open "
            f"files than {SOCKETS} (ulimit -n)"
        ) from None
    finally:
        for one in spare:
            one.close()
    port = listener.getsockname()[1]
    return dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def rank_process(main: Callable[[], int]) -> int:
    """What a rank runs: the status of `main`, or the end of the process if the group has failed.

    Without destructors, since torch's would wait for the ranks that are gone.
    """
    try:
        status = main()
        return RANK_DIFFERS if status == DIFFERS else status
    except UserError:
        raise
    except GroupError as error:
        print(f"rank {os.environ['RANK']} stops: {shown_lines(error)}", file=sys.stderr)
        status = STOPPED
    except KeyboardInterrupt as stop_asked:
        status = status_of(stop_asked)
    except BaseException:  # noqa: BLE001 - printed, and the process ends
        print(shown_lines(traceback.format_exc()), file=sys.stderr)
        status = FAULT
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def start(command: list[str], rank: int, procs: int, port: int, token: str) -> subprocess.Popen:
    """One rank. In a session of its own, so that an interrupt from the terminal reaches the launcher alone."""
    told = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": procs, "LOCAL_WORLD_SIZE": procs,
        "MASTER_ADDR": HOST, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True, TOKEN: token,
    }  # fmt: skip
    environment = {"GLOO_SOCKET_IFNAME": "lo"} | os.environ | {name: str(value) for name, value in told.items()}
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)


def wait(ranks: list[subprocess.Popen], store) -> int:
    """Until every rank has ended, or STOP_S after the first one that failed; returns that one's exit status."""
    while first_failed(ranks) is None and running(ranks):
        time.sleep(LOOK_S)
    failed = first_failed(ranks)
    if failed is None:
        return DIFFERS if any(rank.returncode == RANK_DIFFERS for rank in ranks) else 0
    code, deadline = ranks[failed].returncode, time.monotonic() + STOP_S
    report_failure(store, f"rank {failed} of {len(ranks)} {ending(code)}")
    while running(ranks) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return 128 - code if code < 0 else FAULT if code == DIFFERS else code


def first_failed(ranks: list[subprocess.Popen]) -> int | None:
    """The lowest rank that has ended without doing its work."""
    done = (None, 0, RANK_DIFFERS)
    return next((number for number, rank in enumerate(ranks) if rank.poll() not in done), None)


def running(ranks: list[subprocess.Popen]) -> bool:
    """Whether any rank has not ended yet."""
    return any(rank.poll() is None for rank in ranks)


def stop(ranks: list[subprocess.Popen]) -> None:
    """Ask the ranks that still run to end, then kill them."""
    for ask in (subprocess.Popen.terminate, subprocess.Popen.kill):
        left = [rank for rank in ranks if rank.poll() is None]
        for rank in left:
            ask(rank)
        deadline = time.monotonic() + KILL_S
        while running(left) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
