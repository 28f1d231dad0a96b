"""The place of one process among the ranks of a TorchGroup: its number, its device, the store, the terms of all.

The environment is torchrun's: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Host and port
are those of a TCP store, which the launcher keeps (torchrun's agent, or launch.py) and else rank 0.

Under launch.py the store answers on this host alone. Between hosts it must answer on the network, as gloo and NCCL do,
and asks nobody who they are: whoever reaches its port can end the run or read what the ranks tell each other.

Ranks that were started with different settings, sources or checkpoints would compute something else, or wait for each
other in different collectives. So everyone writes its terms into the store before the first collective, reads those of
all, and comes to the same verdict: which rank differs, and in what.

It does not: move tensors (torch_group.py), or notice what happens afterwards (watch.py).
"""

import json
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dcp_fix.base.errors import UserError, shown
from dcp_fix.ranks.group import GroupError
from dcp_fix.ranks.watch import wait_for_all

CONNECT_S = 30.0  # how long a rank looks for the store
START_S = 120.0  # how long a rank waits for the others to start
LEAVE_S = 10.0  # how long rank 0, if it keeps the store, waits for the others to leave
TOKEN = "DCP_FIX_TOKEN"  # what the keys of a run begin with that launch.py started
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun's


@dataclass(frozen=True)
class Place:
    """One rank's place in the run: rank `rank` of `size`, of which `local_size` are on this host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int

    @classmethod
    def from_environment(cls) -> "Place":
        """Raises UserError naming the variables that are missing, no number, or do not go together."""
        missing = [name for name in VARIABLES if name not in os.environ]
        if missing:
            raise UserError(f"{', '.join(missing)} not set: start the ranks with torchrun, or with --procs")
        size = number("WORLD_SIZE", 1, 1 << 16)
        local_size = number("LOCAL_WORLD_SIZE", 1, size)
        return cls(
            rank=number("RANK", 0, size - 1),
            size=size,
            local_rank=number("LOCAL_RANK", 0, local_size - 1),
            local_size=local_size,
            host=os.environ["MASTER_ADDR"],
            port=number("MASTER_PORT", 1, 65535),
        )

    @property
    def keeps_store(self) -> bool:
        """Whether this rank must keep the store, since no launcher does."""
        return self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def device(self, name: str, share_gpus: bool) -> torch.device:
        """The CPU, or the GPU that this rank has to itself or shares. Raises UserError if there are too few."""
        if torch.device(name).type != "cuda":
            return torch.device(name)
        return torch.device("cuda", self.local_rank % enough_gpus(self.local_size, share_gpus))


def number(name: str, low: int, high: int) -> int:
    """The number that a variable of the environment holds. Raises UserError for anything else."""
    text = os.environ[name]
    if not (text.isdecimal() and len(text) < 10 and low <= int(text) <= high):
        raise UserError(
            f"{name} is {shown(text)!r}; allowed: {low} .. {high}. Start the ranks with torchrun, or --procs"
        )
    return int(text)


def inside() -> bool:
    """Whether a launcher started this process as a rank."""
    return all(name in os.environ for name in VARIABLES)  # job schedulers set some of them


def enough_gpus(ranks: int, share: bool) -> int:
    """How many GPUs this host has. Raises UserError if there are too few for `ranks`, or none to `share`."""
    gpus = torch.cuda.device_count()
    if not gpus or (ranks > gpus and not share):
        remedy = "; verify --share-gpus lets ranks share them, over gloo" if gpus else ""
        raise UserError(f"{ranks} ranks on a host with {gpus} GPUs: NCCL needs one GPU per rank{remedy}")
    return gpus


def connect(place: Place, serve: bool = False) -> dist.Store:
    """A connection of one's own to the store of this run: a call that waits in it blocks nobody else's."""
    try:
        store = dist.TCPStore(
            place.host, place.port, is_master=serve, wait_for_workers=False, multi_tenant=True,
            timeout=timedelta(seconds=CONNECT_S),
        )  # fmt: skip
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise GroupError(f"rank {place.rank}: no store at {place.host}:{place.port} ({reason})") from None
    return dist.PrefixStore(prefix(), store)


def prefix(token: str | None = None) -> str:
    """What the keys of one run, and of one attempt at it, begin with."""
    token = os.environ.get(TOKEN, "") if token is None else token
    run, attempt = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"dcp_fix/{token}/{run}/{attempt}"


def agree(store: dist.Store, place: Place, terms: dict) -> None:
    """Compare the terms of all ranks. Raises GroupError, on every rank, naming the rank and the term that differs."""
    store.set(f"terms/{place.rank}", json.dumps(terms))
    everyones = [json.loads(told) for told in wait_for_all(store, "terms", place.size, START_S)]
    usual = max(everyones, key=everyones.count)  # where there is no majority, the lowest rank's
    for rank, told in enumerate(everyones):
        name = next((name for name in usual | told if told.get(name) != usual.get(name)), None)
        if name is not None:
            raise GroupError(
                f"rank {rank} of {place.size} was started with {name} {told.get(name)}, the others with "
                f"{usual.get(name)}: start every rank with the same command, commit and checkpoint"
            )


def leave(store: dist.Store, place: Place) -> None:
    """The last call of a run that went well: the rank that keeps the store goes last."""
    store.set(f"left/{place.rank}", "")
    if place.keeps_store:
        wait_for_all(store, "left", place.size, LEAVE_S)
