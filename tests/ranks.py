"""Ranks as real processes for tests: forked from a server that has imported torch once, so that one costs 50 ms.

`run_ranks` plays the launcher: it keeps the store, sets torchrun's environment, collects what each rank returns or
raises, and fails the test if a process is left.
"""

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dcp_fix.torch_group import joined

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "dcp_fix.torch_group"])
LIMIT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: its `value` or its `error`, its exit status, seconds from the start to the end."""

    value: Any
    error: str | None
    status: int
    seconds: float


def run_ranks(size, fn, *args, terms=None, environment=None, at_start=None, **joining) -> list[Outcome]:
    """fn(group, *args) in `size` processes. `terms` and `environment` map a rank to what it alone has.

    `at_start(processes)` may do harm. `joining` goes to `joined`.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = [CONTEXT.Pipe(duplex=False) for _ in range(size)]
    processes, began = [], time.monotonic()
    for rank, (_, end) in enumerate(ends):
        own = {"terms": (terms or {}).get(rank, {})} | joining
        told = place(rank, size, server.port) | (environment or {}).get(rank, {})
        processes.append(CONTEXT.Process(target=rank_main, args=(end, told, fn, args, own), daemon=True))
        processes[-1].start()
        end.close()
    if at_start:
        at_start(processes)
    return [outcome(process, end, began) for process, (end, _) in zip(processes, ends, strict=True)]


def place(rank, size, port):
    """The environment of one rank, as torchrun sets it."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    told |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": True, "GLOO_SOCKET_IFNAME": "lo"}
    return {name: str(value) for name, value in told.items()}


def rank_main(end, told, fn, args, joining):
    """One rank's life; it leaves without destructors, which may wait for a rank that is dead."""
    os.environ.update(told)
    torch.set_num_threads(1)
    answer = None, None
    try:
        with joined(**joining) as group:
            value = fn(group, *args)
        answer = value, None
    except Exception as error:  # noqa: BLE001 - the test looks at it
        answer = None, f"{type(error).__name__}: {error}"
    end.send(answer)
    os._exit(0)


def outcome(process, end, began) -> Outcome:
    """Wait for a rank, but not for ever."""
    process.join(max(0.1, began + LIMIT_S - time.monotonic()))
    seconds = time.monotonic() - began
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
        raise AssertionError(f"rank process {process.pid} is still there after {seconds:.0f} s")
    value, error = end.recv() if end.poll() else (None, None)
    return Outcome(value, error, process.exitcode, seconds)
