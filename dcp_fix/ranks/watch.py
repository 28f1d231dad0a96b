"""Who of the ranks is alive, how far each one is, and who failed first: the ranks watch each other through a store.

A collective cannot say why it does not return. So every rank has a thread that writes a beat (a count of the
collectives that the rank has begun, and the last one's name) to the store of the run, reads the beats of the others,
and knows within BEAT_S seconds

    failed     a rank raised, or its launcher saw it end: whoever learns it first writes it down, once
    silent     a rank's beats stopped for SILENCE_S: dead, stopped, or cut off with its host
    late       a rank is behind the others and has not moved for `timeout`: it hangs, or went another way
    stuck      all are equally far, and none has moved for `timeout`
    returned   a rank is finished while others wait for it
    no store   the launcher is gone, and the ranks would be orphans

The first of these is the failure of the whole group. The main thread raises it at its next look (`check`). A rank that
cannot look, because it waits for a GPU or computes, is ended GRACE_S later: so nobody outlives a failure by more.

It does not: move tensors (torch_group.py), start processes (launch.py), or restart anything.
"""

import json
import os
import sys
import threading
import time

import torch.distributed as dist

from dcp_fix.base.errors import shown_lines
from dcp_fix.ranks.group import GroupError

BEAT_S = 0.25  # between two looks
SILENCE_S = 30.0  # without a beat, a rank is taken for dead (a launcher on the same host sees a death at once)
GRACE_S = 5.0  # after a failure is known, a rank that has not left by itself is ended
STOPPED = 3  # exit status of a rank that another rank's failure stopped


class Watch:
    """Rank `rank` of `size`. `timeout` seconds is how long a rank may lag behind the others."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: float,
        silence: float = SILENCE_S, grace: float = GRACE_S,
    ) -> None:  # fmt: skip
        self.store, self.rank, self.size = store, rank, size
        self.timeout, self.silence, self.grace = timeout, silence, grace
        self.at, self.finished = (0, "the start"), False  # collectives begun and the last one: one value, never torn
        self.failure: str | None = None
        self.beats = 0
        # rank -> (its beat, since when I know it, since when its count has stood still)
        self.seen: dict[int, tuple[dict, float, float]] = {}
        self.closed, self.writing = threading.Event(), threading.Lock()
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"watch{rank}")
        self.beat()

    def start(self) -> None:
        """Watch from now on; every rank has written its first beat."""
        self.thread.start()

    def reach(self, what: str) -> None:
        """The main thread begins a collective."""
        self.at = self.at[0] + 1, what

    def check(self) -> None:
        """Raise GroupError if the group has failed."""
        if self.failure:
            raise GroupError(self.failure)

    def fail(self, reason: str) -> None:
        """Write down why the group fails, unless an earlier reason is known."""
        try:
            self.failure = self.failure or report_failure(self.store, reason)
        except RuntimeError:  # no store any more: nobody to tell
            self.failure = reason

    def blame(self, error: Exception) -> GroupError:
        """What to raise where a transport broke: its message names no rank, so wait for the reason to be known."""
        deadline = time.monotonic() + self.silence + 4 * BEAT_S
        while not self.failure and time.monotonic() < deadline:
            time.sleep(2 * BEAT_S)
            if not self.failure and (reason := self.differing()):
                self.fail(reason)
        return GroupError(self.failure or f"rank {self.rank} of {self.size}: {self.at[1]} failed: {error}")

    def differing(self) -> str | None:
        """Ranks that are in the same collective by number and in another by name."""
        here = {rank: beat["where"] for rank, (beat, *_) in self.seen.items() if beat["count"] == self.at[0]}
        calls = "; ".join(f"rank {rank}: {where}" for rank, where in sorted(here.items()))
        return f"the ranks called different collectives: {calls}" if len(set(here.values())) > 1 else None

    def finish(self) -> None:
        """This rank is done: return once every rank is, or raise GroupError."""
        self.finished = True
        self.beat()
        while not all(self.known(rank)["finished"] for rank in range(self.size)):
            self.check()
            time.sleep(BEAT_S / 5)
        self.closed.set()
        self.thread.join()  # no thread may be inside the store when the process ends

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self.failure and not self.closed.wait(BEAT_S):
            try:
                self.beat()
                self.look()
            except RuntimeError as error:  # what torch's stores raise
                lost = f"rank {self.rank} of {self.size} lost the store: the launcher, or rank 0, has ended"
                self.failure = self.failure or f"{lost} ({str(error).splitlines()[0]})"
        if self.failure and not self.closed.wait(self.grace):
            end(self.rank, self.failure)

    def beat(self) -> None:
        """Tell the others where this rank is."""
        with self.writing:  # two threads write it, and the older beat must not come last
            self.beats, (count, where) = self.beats + 1, self.at
            mine = {"beat": self.beats, "count": count, "where": where, "finished": self.finished}
            self.store.set(f"beat/{self.rank}", json.dumps(mine))

    def known(self, rank: int) -> dict:
        """The last beat of a rank."""
        return json.loads(self.store.get(f"beat/{rank}"))

    def look(self) -> None:
        """Read every beat and find the first reason to fail."""
        now = time.monotonic()
        for rank in range(self.size):
            beat = self.known(rank)
            old, heard, moved = self.seen.get(rank, (beat, now, now))
            heard = heard if old["beat"] == beat["beat"] else now
            moved = moved if old["count"] == beat["count"] else now
            self.seen[rank] = beat, heard, moved
        self.failure = self.failure or known_failure(self.store)
        reason = self.failure or self.silent(now) or self.behind(now)
        if reason:
            self.fail(reason)

    def silent(self, now: float) -> str | None:
        """A rank whose beats have stopped."""
        for rank, (beat, heard, _) in self.seen.items():
            if not beat["finished"] and now - heard > self.silence:
                return (
                    f"rank {rank} of {self.size} has given no sign of life for {self.silence:g} s: it was killed or "
                    f"stopped, or its host is cut off; its last sign came from {place(beat)}"
                )
        return None

    def behind(self, now: float) -> str | None:
        """A rank that the others wait for: it has returned, has not moved for `timeout`, or went another way; or all
        ranks, if none has moved.
        """
        last = min(self.seen, key=lambda rank: self.seen[rank][0]["count"])
        first = max(self.seen, key=lambda rank: self.seen[rank][0]["count"])
        (beat, _, moved), ahead = self.seen[last], self.seen[first][0]
        if beat["count"] == ahead["count"]:
            return self.differing() or self.stuck(now) if now - moved > self.timeout else None
        if beat["finished"]:
            return f"rank {last} of {self.size} returned while others wait for it in {place(ahead)}"
        if now - moved > self.timeout:
            return (
                f"rank {last} of {self.size} did not reach the others within {self.timeout:g} s: it is still at "
                f"{place(beat)}, rank {first} at {place(ahead)}"
            )
        return None

    def stuck(self, now: float) -> str | None:
        """All ranks, if none has moved for `timeout` and not all are done."""
        beats, moved = [beat for beat, *_ in self.seen.values()], max(moved for *_, moved in self.seen.values())
        if all(beat["finished"] for beat in beats) or now - moved <= self.timeout:
            return None
        return f"no rank of {self.size} has moved for {self.timeout:g} s: all are at {place(beats[0])}"


def place(beat: dict) -> str:
    """Where a rank is, for a message."""
    return f"{beat['where']} (collective {beat['count']})"


def report_failure(store: dist.Store, reason: str) -> str:
    """Write `reason` down as the failure of the group; returns the first one that was written."""
    return store.compare_set("failure", "", reason).decode()


def known_failure(store: dist.Store) -> str | None:
    """Why the group failed, or None."""
    return store.get("failure").decode() if store.check(["failure"]) else None


def wait_for_all(store: dist.Store, name: str, size: int, timeout: float) -> list[str]:
    """The values of `name`/0 .. `name`/size - 1. Raises GroupError naming the ranks that do not arrive in time."""
    deadline, keys = time.monotonic() + timeout, {rank: f"{name}/{rank}" for rank in range(size)}
    while absent := [str(rank) for rank, key in keys.items() if not store.check([key])]:
        if failure := known_failure(store):
            raise GroupError(failure)
        if time.monotonic() > deadline:
            raise GroupError(f"rank {', '.join(absent)} of {size} did not start within {timeout:g} s")
        time.sleep(BEAT_S / 5)
    return [store.get(key).decode() for key in keys.values()]


def end(rank: int, reason: str) -> None:
    """End this process now, whatever its main thread is waiting for."""
    print(f"rank {rank} is ended: {shown_lines(reason)}", file=sys.stderr, flush=True)
    os._exit(STOPPED)
