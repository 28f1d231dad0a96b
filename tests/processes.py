"""Ranks as real processes for tests: forked from a server that has imported torch once, so that one costs 50 ms.

`run_processes` plays the launcher: it keeps the store, sets torchrun's environment, collects what each rank returns or
raises, and fails the test if a process is left.
"""

import multiprocessing
import os
import signal
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dcp_fix.ranks.torch_group import joined

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "dcp_fix.ranks.torch_group"])
LIMIT_S = 600.0  # it only catches a hang
ENTERED = "entered"  # what a rank says once it has joined


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: its `value` or its `error`, and its exit status."""

    value: Any
    error: str | None
    status: int


def run_ranks(size, fn, *args, terms=None, **options) -> list[Outcome]:
    """fn(group, *args) in `size` processes. `terms` maps a rank to its own; options of `run_processes` and `joined`."""
    names = {"environment", "meanwhile"}
    joining = {name: options.pop(name) for name in set(options) - names}
    own = [(joining | {"terms": (terms or {}).get(rank, {})}, fn, args) for rank in range(size)]
    return run_processes(in_group, own, **options)


def in_group(joining, fn, args):
    with joined(**joining) as group:
        rank_main.entered()
        return fn(group, *args)


def run_processes(main, arguments, environment=None, meanwhile=None) -> list[Outcome]:
    """main(*arguments[rank]) in one process per rank, with torchrun's environment, and a rank's own `environment`.

    `meanwhile(processes, servers)` may do harm once all ranks have joined; the store ends with the list `servers`.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    size, processes = len(arguments), []
    ends = [CONTEXT.Pipe(duplex=False) for _ in arguments]
    for rank, (_, end) in enumerate(ends):
        told = place(rank, size, server.port) | (environment or {}).get(rank, {})
        processes.append(CONTEXT.Process(target=rank_main, args=(end, told, main, arguments[rank]), daemon=True))
        processes[-1].start()
        end.close()
    servers = [server]
    del server
    if meanwhile:
        assert all(end.poll(LIMIT_S) for end, _ in ends)
        meanwhile(processes, servers)
    return [outcome(process, end) for process, (end, _) in zip(processes, ends, strict=True)]


def place(rank, size, port):
    """The environment of one rank, as torchrun sets it."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    told |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": True, "GLOO_SOCKET_IFNAME": "lo"}
    return {name: str(value) for name, value in told.items()}


def rank_main(end, told, main, arguments):
    """One rank's life; it leaves without destructors, which may wait for a rank that is dead."""
    os.environ.update(told)
    torch.set_num_threads(1)
    rank_main.entered = lambda: end.send(ENTERED)
    try:
        answer = main(*arguments), None
    except Exception as error:  # noqa: BLE001 - the test looks at it
        answer = None, f"{type(error).__name__}: {error}"
    end.send(answer)
    os._exit(0)


def outcome(process, end) -> Outcome:
    """Wait for a rank, but not for ever."""
    process.join(LIMIT_S)
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
        raise AssertionError(f"rank process {process.pid} is still there")
    value, error = next((told for told in received(end) if told != ENTERED), (None, None))  # without a word: killed
    return Outcome(value, error, process.exitcode)


def received(end):
    """What a process has sent before it ended."""
    while True:
        try:
            yield end.recv()
        except EOFError:
            return
