"""TorchGroup: the ranks are processes under torch.distributed, over NCCL between GPUs and over gloo between CPUs.

    torchrun --nproc-per-node 4 script.py       or  dcp-fix verify --procs 4

    with joined("cuda", terms={"dcp": 4}) as group:
        Engine(folder, group, dcp_size=4, device=group.device).generate(prompt, 24)

Only bytes travel: every tensor is sent as uint8, so that no transport needs to know fp8 or bf16, and the sums are made
here, in rank order and in fp32, as in every other group. So the results are those of LocalGroup, bit for bit, whichever
transport carries them and however it schedules.

    all_gather               the transport's own
    all_to_all               the transport's own
    reduce_scatter           all_to_all of the slices, then a sum: each byte moves once
    all_reduce               small: all_gather and a sum; large: reduce_scatter, then all_gather

`joined` compares the terms of all ranks (settings, commit, checkpoint) before the first collective, builds the group,
lets it prove itself with known sums, and keeps the ranks watching each other (watch.py). It needs the environment that
torchrun sets (place.py); one host or several.

A rank has a GPU to itself, since NCCL refuses two ranks on one. With `share_gpus` several ranks may use one GPU; their
collectives then go over gloo, through the host's memory.

It does not: overlap communication with computation, or survive the loss of a rank.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from dcp_fix.ranks.group import TIMEOUT_S, Group, GroupError, SingleGroup, _divides, _group_size, _into, ordered_sum
from dcp_fix.ranks.place import Place, agree, connect, leave
from dcp_fix.ranks.watch import Watch

POLL = timedelta(seconds=0.1)  # between two looks at the watch while a collective runs
SMALL_BYTES = 1 << 16  # an all_reduce up to here is one all_gather: fewer messages, though more bytes
# The same function: torch 2.13 renamed it.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchGroup(Group):
    """This process's rank of a group of processes. Made by `joined` and `subgroup` only."""

    def __init__(
        self, members: range, process_group: dist.ProcessGroup, device: torch.device, watch: Watch, made: dict
    ) -> None:
        self.members, self.process_group, self.device = members, process_group, device
        self.watch, self.made = watch, made  # shared by all groups of this process
        self.rank, self.size = members.index(watch.rank), len(members)
        self.transport = dist.get_backend(process_group)
        self.capturable = self.transport == "nccl"  # gloo's collectives run on the host
        self.self_test(device)

    # --- collectives --------------------------------------------------------------------------------------------------

    def _exchange(self, op: str, x: Tensor, read: Callable[[list[Tensor]], Tensor]) -> Tensor:
        return read(list(self._gather(op, x)))

    def reduce_scatter(self, x: Tensor, dim: int = 0, out: Tensor | None = None) -> Tensor:
        _divides(self.size, x, dim, "reduce_scatter")
        slices = x.unflatten(dim, (self.size, -1)).movedim(dim % x.dim(), 0)  # [size, ..., n, ...]
        return _into(out, ordered_sum(list(self._swap(f"reduce_scatter(dim={dim})", slices))))

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if x.nbytes <= SMALL_BYTES:
            return super().all_reduce(x, out)
        flat = pad(x.flatten(), (0, -x.numel() % self.size)).view(self.size, -1)
        mine = ordered_sum(list(self._swap("all_reduce", flat)))
        return _into(out, self._gather("all_reduce", mine).flatten()[: x.numel()].view(x.shape))

    def all_to_all(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if x.shape[0] != self.size:
            raise GroupError(f"all_to_all needs one row for each of {self.size} ranks, got {list(x.shape)}")
        return _into(out, self._swap("all_to_all", x))

    def share(self, jobs: Sequence[Callable]) -> list:
        """As Group.share. Counted, since a replayed CUDA graph starts its collectives without a word."""
        self.watch.check()
        self.watch.reach(f"share of {len(jobs)} jobs")
        return super().share(jobs)

    def subgroup(self, size: int) -> Group:
        _group_size(size, self.size)
        if size == self.size:
            return self
        if size not in self.made:
            self.made[size] = self._subgroup(size)
        return self.made[size]

    def _subgroup(self, size: int) -> Group:
        """Every process takes part in making every group of this size, its own and the others'."""
        if size == 1:
            return SingleGroup()
        mine = None
        for first in range(0, self.watch.size, size):
            members = range(first, first + size)
            process_group = dist.new_group(members, timeout=process_timeout(self.watch.timeout))
            mine = (members, process_group) if self.watch.rank in members else mine
        return TorchGroup(*mine, self.device, self.watch, self.made)

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _gather(self, op: str, x: Tensor) -> Tensor:
        """x of every rank: [size, *x.shape]."""
        data = self._bytes(x)
        everyones = data.new_empty(self.size * data.numel())
        self._carry(op, x, lambda: all_gather_single(everyones, data, group=self.process_group, async_op=True))
        return self._tensor(everyones, x, (self.size, *x.shape))

    def _swap(self, op: str, x: Tensor) -> Tensor:
        """x[s] goes to rank s; row s of the result came from there. Shape of x [size, ...]."""
        data = self._bytes(x)
        received = torch.empty_like(data)
        self._carry(op, x, lambda: dist.all_to_all_single(received, data, group=self.process_group, async_op=True))
        return self._tensor(received, x, x.shape)

    def _bytes(self, x: Tensor) -> Tensor:
        """The bytes of x where the transport reads them: on the GPU for NCCL, else on the host."""
        data = x.detach().contiguous().view(-1).view(torch.uint8)
        return data if self.capturable else data.cpu()

    def _tensor(self, data: Tensor, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        return data.to(like.device).view(like.dtype).view(shape)

    def _carry(self, op: str, x: Tensor, start: Callable[[], dist.Work]) -> None:
        """Start a collective and wait for it, as long as the group has not failed."""
        self.watch.check()
        if x.numel() == 0:
            return
        self.watch.reach(f"{op} of {str(x.dtype).removeprefix('torch.')} {list(x.shape)}")
        try:
            work = start()
            if self.capturable:
                work.wait()  # the stream waits, this thread does not
                return
            while not work.is_completed():
                self._wait(work)
        except RuntimeError as error:
            if isinstance(error, GroupError):
                raise
            raise self.watch.blame(error) from error

    def _wait(self, work: dist.Work) -> None:
        """Wait a moment. Raises what the transport raises, or GroupError if the group has failed."""
        try:
            work.wait(POLL)
        except RuntimeError:  # a poll that timed out, or the transport: work that ended says which when asked again
            if work.is_completed():
                work.wait()
        self.watch.check()


@contextmanager
def joined(
    device: str = "cpu", terms: dict | None = None, timeout: float = TIMEOUT_S, share_gpus: bool = False,
    **watching: float,
) -> Iterator[TorchGroup]:  # fmt: skip
    """This process's place in the group of all ranks, on `group.device`. Leaving waits until every rank is done.

    Raises GroupError that names the rank and the reason if any rank fails, was started with other `terms`, is late by
    `timeout` seconds or does not come; a rank that cannot raise is ended (watch.py). Raises UserError if the
    environment lacks what torchrun sets, or if the ranks of this host outnumber its GPUs and may not share them.
    """
    place = Place.from_environment()
    own = place.device(device, share_gpus)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    store = connect(place, serve=place.keeps_store)
    watch = Watch(store, place.rank, place.size, timeout, **watching)
    try:
        agree(store, place, terms or {})
        watch.start()
        yield TorchGroup(range(place.size), start(place, own, timeout, share_gpus), own, watch, {})
        watch.finish()
    except BaseException as error:
        watch.fail(str(error) if isinstance(error, GroupError) else reason(place, error))
        raise
    gc.collect()  # NCCL waits for every CUDA graph that holds its collectives; an engine and its graph are a cycle
    dist.destroy_process_group()
    leave(store, place)


def start(place: Place, device: torch.device, timeout: float, share_gpus: bool) -> dist.ProcessGroup:
    """The process group of all ranks: over NCCL where every rank has a GPU to itself, else over gloo."""
    dist.init_process_group(
        "nccl" if device.type == "cuda" and not share_gpus else "gloo", store=connect(place),
        rank=place.rank, world_size=place.size, timeout=process_timeout(timeout),
    )  # fmt: skip
    return dist.group.WORLD


def process_timeout(timeout: float) -> timedelta:
    """The transport's own timeout: after the watch's, which can say who is late."""
    return timedelta(seconds=timeout + 60)


def reason(place: Place, error: BaseException) -> str:
    """Why this rank leaves, for the others."""
    if isinstance(error, KeyboardInterrupt):
        return f"rank {place.rank} of {place.size} was interrupted"
    return f"rank {place.rank} of {place.size} failed: {type(error).__name__}: {error}"
