"""Groups: the four collectives that tensor and decode context parallelism need.

`Group` is what the SPMD code sees: a rank, a size, and all_gather, all_reduce, reduce_scatter, all_to_all.
`LocalGroup` runs the ranks as threads of one process on one device, so that a notebook can look at all of them at once;
`SingleGroup` is a group of one, so that DCP1 needs no special case. A transport implements one method, `_exchange`
(and overrides a collective where it can move fewer bytes); the arithmetic is here.

Sums run in rank order, in fp32 (integers in their own type), and are rounded to the input's type once: a result depends
neither on the transport nor on how it schedules. Every collective returns fresh memory, or `out` if one is given.

A communicator that silently does nothing hands back uninitialised memory (vLLM 0.30.0 with an NCCL that it cannot load:
`reduce_scatter` returned an unwritten `torch.empty`). So each group proves itself with known sums before its first use.

It does not: overlap communication with computation, differentiate, or move anything between processes (see TorchGroup).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dcp_fix.ranks.rendezvous import TIMEOUT_S, GroupError, World

ORDER_PROBE = 2.0**24  # the first integer to which fp32 cannot add 1: tells rank order from any other order
T = TypeVar("T")


def ordered_sum(parts: list[Tensor]) -> Tensor:
    """parts[0] + parts[1] + ... in that order: floats in fp32 at least, then rounded once to their own type."""
    dtype = parts[0].dtype
    total = parts[0].to(torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)


class Group:
    """`size` ranks of which this object is number `rank`. All ranks call the same collectives in the same order."""

    rank: int
    size: int
    capturable = True  # whether a CUDA graph can hold the collectives
    captures = True  # whether this rank records a graph of its own

    def _exchange(self, op: str, x: Tensor, read: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Return read([x of rank 0, x of rank 1, ...]); `read` must return fresh memory."""
        raise NotImplementedError

    def all_gather(self, x: Tensor, dim: int = 0, out: Tensor | None = None) -> Tensor:
        """[..., n, ...] on each rank -> [..., size * n, ...] on every rank."""
        return _into(out, self._exchange(f"all_gather(dim={dim})", x, lambda parts: torch.cat(parts, dim)))

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return _into(out, self._exchange("all_reduce", x, ordered_sum))

    def reduce_scatter(self, x: Tensor, dim: int = 0, out: Tensor | None = None) -> Tensor:
        """[..., size * n, ...] -> [..., n, ...]: the sum over ranks of this rank's slice."""
        _divides(self.size, x, dim, "reduce_scatter")
        mine = slice_of(dim, self.rank, x.shape[dim] // self.size)
        read = lambda parts: ordered_sum([part[mine(part)] for part in parts])  # noqa: E731
        return _into(out, self._exchange(f"reduce_scatter(dim={dim})", x, read))

    def all_to_all(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x[s] goes to rank s; row s of the result came from rank s. x [size, ...]."""
        if x.shape[0] != self.size:
            raise GroupError(f"all_to_all needs one row for each of {self.size} ranks, got {list(x.shape)}")
        return _into(out, self._exchange("all_to_all", x, lambda parts: torch.stack([p[self.rank] for p in parts])))

    def replicated(self, fn: Callable[[], T]) -> T:
        """fn(), for work whose result is the same on every rank: `share` of one job."""
        return self.share([fn])[0]

    def share(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """[job() for job in jobs], for jobs whose results are the same on every rank.

        Threads that share a processor would only queue for it, so a LocalGroup computes each job once, dealt out over
        its ranks, and hands every rank the same objects: treat them as read-only. Other groups run all jobs on each
        rank.
        """
        return [job() for job in jobs]

    def subgroup(self, size: int) -> "Group":
        """The group of `size` consecutive ranks that this rank is in; every rank must call it."""
        raise NotImplementedError

    def self_test(self, device: torch.device | str = "cpu") -> None:
        """Run every collective on known numbers; raise GroupError if any answer is not the known one."""
        parts = [_probe(rank, self.size).to(device) for rank in range(self.size)]
        x, row = parts[self.rank], slice(self.rank, self.rank + 1)
        total = ordered_sum(parts)
        known = {
            "all_gather": (self.all_gather(x), torch.cat(parts)),
            "all_reduce": (self.all_reduce(x), total),
            "reduce_scatter": (self.reduce_scatter(x), total[row]),
            "all_to_all": (self.all_to_all(x), torch.cat([part[row] for part in parts])),
        }
        for op, (got, want) in known.items():
            if got.shape != want.shape or not torch.equal(got, want):
                raise GroupError(
                    f"{type(self).__name__} rank {self.rank} of {self.size}: {op} of known numbers gave "
                    f"{got.tolist()}, expected {want.tolist()}; the communicator is broken or disabled (check that its "
                    "library loads), refusing to go on"
                )


class SingleGroup(Group):
    """A group of one rank: the collectives copy."""

    rank, size = 0, 1

    def _exchange(self, op: str, x: Tensor, read: Callable[[list[Tensor]], Tensor]) -> Tensor:
        return read([x])

    def subgroup(self, size: int) -> Group:
        _group_size(size, self.size)
        return self


class LocalGroup(Group):
    """One rank of a group whose ranks are threads of this process. Made by `LocalGroup.run` and `subgroup` only."""

    def __init__(self, world: World, members: range, rank: int, device: torch.device | str) -> None:
        self.world, self.members, self.device = world, members, device
        self.rank, self.size, self.meeting = rank, len(members), world.meeting(members)
        self.captures = rank == 0  # for all: they share a stream, so one graph holds what all do, in that order
        self.self_test(device)

    @staticmethod
    def run(
        size: int, fn: Callable[..., T], *args: Any, timeout: float = TIMEOUT_S, device: torch.device | str = "cpu"
    ) -> list[T]:
        """Call fn(group, *args) once per rank, each in its own thread; return the results in rank order.

        If a rank raises, returns early, calls another collective than the others or stays away longer than `timeout`
        seconds, every waiting rank is released and one GroupError names that rank and the reason.
        Each rank computes with one intra-op thread. `device` is where the self-test runs.
        """
        if size < 1:
            raise GroupError(f"a group needs at least one rank, got size {size}")
        world = World(size, timeout)
        return world.run(lambda rank: fn(LocalGroup(world, range(size), rank, device), *args))

    def _exchange(self, op: str, x: Tensor, read: Callable[[list[Tensor]], Tensor]) -> Tensor:
        signature = f"{op} of {str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device.type}"
        return self.meeting.exchange(self.rank, signature, x, read)

    def share(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        mine = [job() for job in jobs[self.rank :: self.size]]
        deal = lambda parts: [parts[i % self.size][i // self.size] for i in range(len(jobs))]  # noqa: E731
        return self.meeting.exchange(self.rank, f"share of {len(jobs)} jobs", mine, deal)

    def subgroup(self, size: int) -> Group:
        _group_size(size, self.size)
        first = self.rank // size * size
        return LocalGroup(self.world, self.members[first : first + size], self.rank - first, self.device)


def _probe(rank: int, size: int) -> Tensor:
    """[size, 2]: numbers that name rank and row, and a column whose fp32 sum is 0 if the first rank comes first and the
    last one last, and from three ranks on not 0 in the reverse order.
    """
    order = ORDER_PROBE if rank == 0 else -ORDER_PROBE if rank == size - 1 else 1.0
    return torch.stack([1.0 + torch.arange(size) + 100 * rank, torch.full((size,), order)], dim=1)


def slice_of(dim: int, index: int, length: int) -> Callable[[Tensor], tuple[slice, ...]]:
    """Selects the index-th piece of `length` along `dim`."""
    return lambda x: (slice(None),) * (dim % x.dim()) + (slice(index * length, (index + 1) * length),)


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)


def _divides(size: int, x: Tensor, dim: int, op: str) -> None:
    if x.shape[dim] % size:
        raise GroupError(f"{op} over {size} ranks cannot split dimension {dim} of {list(x.shape)} evenly")


def _group_size(size: int, available: int) -> None:
    if size < 1 or available % size:
        raise GroupError(f"a subgroup of {size} ranks does not divide a group of {available}; use a divisor")
