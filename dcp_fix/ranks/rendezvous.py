"""Where the ranks of a LocalGroup meet: threads that hand each other values, and faults that release everyone.

`World` is the threads of one run and the first failure among them; a `Meeting` is one group's place of exchange. Who
waits there wakes up when the exchange is complete, or when it cannot be any more: a rank raised, returned, called
something else, waits elsewhere, or stayed away longer than the timeout. The caller gets one error that names the rank.

It knows nothing of tensors or collectives (group.py), except what torch keeps per thread. A thread cannot be killed: a
rank that computes on after a failure is left behind as a daemon.
"""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn

import torch

TIMEOUT_S = 300.0  # how long a rank waits for the others in one collective
GRACE_S = 5.0  # how long a run waits, after a failure, for ranks that still compute


class GroupError(RuntimeError):
    """A collective could not be carried out; the message names the rank and the reason."""


class World:
    """The threads of one `LocalGroup.run`, and the first failure among them."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.changed = threading.Condition()
        self.meetings: dict[range, Meeting] = {}
        self.results: list = [None] * size
        self.done: set[int] = set()
        self.waiting: dict[int, str] = {}  # rank -> what it waits in
        self.failure: tuple[str, BaseException | None] | None = None

    def meeting(self, members: range) -> "Meeting":
        """The place where these ranks meet, the same object for each of them."""
        with self.changed:
            return self.meetings.setdefault(members, Meeting(self, members))

    def run(self, fn: Callable[[int], Any]) -> list:
        """Call fn(rank) in one thread per rank; the results in rank order, or GroupError for the first failure."""
        intra_op, modes = torch.get_num_threads(), _thread_local_modes()
        threads = [
            threading.Thread(target=self._rank_main, args=(rank, fn, modes), daemon=True, name=f"rank{rank}")
            for rank in range(self.size)
        ]
        try:
            for thread in threads:
                thread.start()
            self._wait()
        except BaseException as interrupt:  # Ctrl-C in the caller: let no rank wait for ever
            self.fail("the caller was interrupted", interrupt)
            raise
        finally:
            torch.set_num_threads(intra_op)
        if self.failure:
            reason, cause = self.failure
            raise GroupError(reason) from cause
        return self.results

    def _wait(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.failure or len(self.done) == self.size)
            self.changed.wait_for(lambda: len(self.done) == self.size, GRACE_S)  # after a failure: daemons, left behind

    def _rank_main(self, rank: int, fn: Callable[[int], Any], modes: Callable[[], ExitStack]) -> None:
        try:
            torch.set_num_threads(1)  # the ranks are the parallelism
            with modes():
                self.results[rank] = fn(rank)
        except Released:
            pass  # another rank failed, and that one is reported
        except BaseException as error:  # noqa: BLE001 - re-raised in the caller by `run`
            self.fail(f"rank {rank} of {self.size} failed: {type(error).__name__}: {error}", error)
        finally:
            with self.changed:
                self.done.add(rank)
                self.changed.notify_all()

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """Record the first failure and release everyone who waits."""
        with self.changed:
            self.failure = self.failure or (reason, cause)
            self.changed.notify_all()


class Released(BaseException):
    """Unwinds a rank that waits for a rank that failed."""


class Meeting:
    """Where the members of one group hand each other values: two phases, so that nobody leaves while another reads."""

    def __init__(self, world: World, members: range) -> None:
        self.world, self.members = world, members
        self.slots: list = [None] * len(members)
        self.arrived: set[int] = set()
        self.phase = 0

    def exchange(self, rank: int, signature: str, value: Any, read: Callable[[list], Any]) -> Any:
        """read([value of member 0, of member 1, ...]), if all of them call with the same signature."""
        self.slots[rank] = (signature, value)
        self._meet(rank, signature)
        slots = list(self.slots)
        if any(other != signature for other, _ in slots):
            self._disagree(slots)
        result = read([value for _, value in slots])
        self._meet(rank, signature)
        self.slots[rank] = None  # everyone has read it
        return result

    def _meet(self, rank: int, signature: str) -> None:
        world = self.world
        with world.changed:
            phase = self.phase
            self.arrived.add(self.members[rank])
            world.waiting[self.members[rank]] = signature
            if len(self.arrived) == len(self.members):
                self.arrived, self.phase = set(), phase + 1
                for member in self.members:
                    del world.waiting[member]
                world.changed.notify_all()
            deadline = time.monotonic() + world.timeout
            while self.phase == phase and not world.failure:
                self._wait(signature, deadline)
            if world.failure:
                raise Released

    def _wait(self, signature: str, deadline: float) -> None:
        """Sleep until something changes, or declare that waiting is in vain."""
        world, absent = self.world, set(self.members) - self.arrived
        if absent & world.done:
            world.fail(f"rank {min(absent & world.done)} returned while others wait for it in {signature}")
        elif len(world.waiting) + len(world.done) == world.size:  # in different groups, each for another
            calls = "; ".join(f"rank {rank}: {call}" for rank, call in sorted(world.waiting.items()))
            world.fail(f"every rank waits for another one: {calls}")
        elif not world.changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
            world.fail(f"rank {min(absent)} did not reach {signature} within {world.timeout:g} s")

    def _disagree(self, slots: list[tuple[str, Any]]) -> NoReturn:
        calls = "; ".join(f"rank {rank}: {signature}" for rank, (signature, _) in zip(self.members, slots, strict=True))
        self.world.fail(f"the ranks called different collectives or passed different shapes: {calls}")
        raise Released


def _thread_local_modes() -> Callable[[], ExitStack]:
    """What torch keeps per thread and a rank must take over from the caller: grad mode, inference mode, CUDA stream."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    def modes() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(torch.cuda.stream(stream))
        return stack

    return modes
