"""TorchGroup on gloo processes: the collectives of LocalGroup, the same bits, and a self-test that refuses."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dcp_fix.base.equality import digest
from dcp_fix.base.errors import UserError
from dcp_fix.engine.engine import Engine
from dcp_fix.engine.model import Model
from dcp_fix.ranks.group import GroupError, LocalGroup
from dcp_fix.ranks.place import VARIABLES, Place, inside
from dcp_fix.ranks.torch_group import SMALL_BYTES, TorchGroup
from dcp_fix.verify import verify
from tests.checkpoints import random_checkpoint, random_tokens
from tests.processes import run_ranks

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.bool)


def value(rank, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return (100 * torch.randn(shape, generator=generator)).clamp(-400, 400).to(dtype)


def every_collective(group):
    """Digests of every collective on odd shapes, strided inputs, small and large tensors, all types; and subgroups."""
    rank, size, got = group.rank, group.size, {}
    for dtype in DTYPES:
        x = value(rank, 2 * size, 3, 5 * size, dtype=dtype)
        got[f"gather {dtype}"] = [group.all_gather(x, dim) for dim in (0, 1, -1)]
        got[f"to all {dtype}"] = [group.all_to_all(x[:size].transpose(1, 2)), group.all_to_all(x[:size, :0])]
        if dtype.itemsize > 1:
            got[f"sum {dtype}"] = [group.all_reduce(x), group.reduce_scatter(x, 0), group.reduce_scatter(x, -1)]
    large = value(rank, SMALL_BYTES // 4 + 7)
    got["large sum"] = [group.all_reduce(large), group.all_reduce(large.bfloat16()), group.all_reduce(large[:1, None])]
    got["scalar"] = [group.all_reduce(large[3])]
    out = torch.full((size, 2), torch.nan)
    assert group.all_gather(large[None, :2], out=out) is out
    got["out"] = [out]
    for part in (1, 2, size):
        sub = group.subgroup(part)
        got[f"subgroup of {part}"] = [sub.all_gather(large[:3]), sub.all_reduce(large), torch.tensor([sub.rank])]
    got["subgroup of a subgroup"] = [group.subgroup(2).subgroup(1).all_reduce(large)]
    return {name: [(str(x.dtype), list(x.shape), digest(x)) for x in results] for name, results in got.items()}


def test_every_collective_gives_the_bits_of_local_group():
    ranks = run_ranks(4, every_collective)
    assert [rank.error for rank in ranks] == [None] * 4
    assert [rank.value for rank in ranks] == LocalGroup.run(4, every_collective)


class Work:
    """A collective that ends just after a poll of it timed out: well, or with the transport's own error."""

    def __init__(self, failure=None):
        self.failure, self.ended = failure, False

    def is_completed(self):
        return self.ended

    def wait(self, timeout=None):
        if not self.ended:
            self.ended = True
            raise RuntimeError("Operation timed out!")
        if self.failure:
            raise RuntimeError(self.failure)


class Quiet:
    """A watch that sees nothing wrong, and passes the transport's words on."""

    def check(self):
        """As Watch.check."""

    def reach(self, where):
        """As Watch.reach."""

    def blame(self, error):
        return GroupError(str(error))


def test_a_collective_that_ends_just_after_a_poll_of_it_timed_out_has_not_failed():
    group, x = object.__new__(TorchGroup), torch.ones(2)  # making one would test itself over a real transport
    group.watch, group.capturable = Quiet(), False
    group._carry("all_gather", x, Work)
    with pytest.raises(GroupError, match="connection reset"):
        group._carry("all_gather", x, lambda: Work("connection reset by peer"))


# --- the engine -------------------------------------------------------------------------------------------------------

PROMPTS = [random_tokens(37, seed=1), random_tokens(150, seed=2), random_tokens(150, seed=2) + random_tokens(9, seed=3)]


def engine_digests(group, folder):
    """Tokens, logits and every sublayer's output for each DCP size: dense, sparse and cached prompts, both combines."""
    model = Model.load(folder)
    model = Model(replace(model.config, eos_token_id=-1), model.weights)
    got = {}
    for dcp_size, method, static in ((1, "ag_rs", False), (2, "a2a", True), (group.size, "ag_rs", False)):
        traced = verify.Traced(group)
        options = {"dcp_size": dcp_size, "combine": method, "static_decode": static}
        engine = Engine(model, traced, max_length=448, **options)
        answers = [engine.generate(prompt, 4) for prompt in PROMPTS]
        got[dcp_size, method] = [(a.tokens, a.cached, a.digests) for a in answers], traced.digests
    return got


def test_the_engine_gives_the_digests_of_local_group(tmp_path):
    folder = random_checkpoint(tmp_path)
    ranks = run_ranks(4, engine_digests, folder)
    assert [rank.error for rank in ranks] == [None] * 4
    assert [rank.value for rank in ranks] == LocalGroup.run(4, engine_digests, folder)
    answers, sublayers = ranks[0].value[1, "ag_rs"]
    assert len(sublayers) == 3 * 4 * 6 and len(answers[0][2]) == 4  # prompts x batches x sublayers


# --- case 17: a communicator that quietly does nothing ----------------------------------------------------------------


def refusals(group):
    """What the self-test of a new group says when one of its collectives is broken."""
    broken = {
        "_gather": lambda right: lambda self, op, x: torch.empty_like(right(self, op, x)).fill_(torch.nan),
        "_swap": lambda right: lambda self, op, x: x.clone(),
        "reduce_scatter": lambda right: lambda self, x, dim=0, out=None: right(self, x.flip(0), dim, out),
    }
    said = []
    for name, breaks in broken.items():
        right = getattr(TorchGroup, name)
        setattr(TorchGroup, name, breaks(right))
        try:
            TorchGroup(group.members, group.process_group, group.device, group.watch, {})
            said.append(f"{name}: accepted")
        except GroupError as error:
            said.append(str(error))
        setattr(TorchGroup, name, right)
    TorchGroup(group.members, group.process_group, group.device, group.watch, {})
    return said


def test_the_self_test_refuses_a_collective_that_does_nothing():
    ranks = run_ranks(2, refusals)
    assert [rank.error for rank in ranks] == [None] * 2
    for number, rank in enumerate(ranks):
        for said, op in zip(rank.value, ("all_gather", "reduce_scatter", "reduce_scatter"), strict=True):
            assert said.startswith(f"TorchGroup rank {number} of 2: {op} of known numbers gave "), said
            assert said.endswith("refusing to go on")


# --- places -----------------------------------------------------------------------------------------------------------


def test_without_a_launcher_the_missing_variables_are_named(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="^WORLD_SIZE, LOCAL_RANK, .* not set: start the ranks with torchrun"):
        Place.from_environment()


def test_a_scheduler_that_sets_some_variables_starts_no_rank(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "1")
    assert inside()
    monkeypatch.delenv("LOCAL_RANK")
    assert not inside()


@pytest.mark.parametrize(
    "ranks, gpus, share, device",
    [(2, 2, False, "cuda:1"), (4, 2, True, "cuda:1"), (2, 8, False, "cuda:1"), (4, 1, True, "cuda:0")],
)
def test_the_gpu_of_a_rank(monkeypatch, ranks, gpus, share, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    place = Place(rank=ranks + 1, size=2 * ranks, local_rank=1, local_size=ranks, host="", port=0)
    assert str(place.device("cuda", share)) == device and str(place.device("cpu", share)) == "cpu"


@pytest.mark.parametrize("ranks, gpus, message", [(4, 2, "--share-gpus"), (1, 0, "1 ranks on a host with 0 GPUs")])
def test_more_ranks_than_gpus_need_the_flag(monkeypatch, ranks, gpus, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(UserError, match=message):
        Place(0, ranks, 0, ranks, "", 0).device("cuda", share_gpus=False)


# --- two hosts --------------------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


TWO_HOSTS = """
import sys, torch
from dcp_fix.ranks.torch_group import joined
with joined(terms={"dcp": 2}) as group:
    open(f"{sys.argv[1]}{group.rank}", "w").write(str(group.all_gather(torch.tensor([group.rank])).tolist()))
"""


def test_torchrun_on_two_hosts(tmp_path):
    """Two agents at two addresses of the loopback range, which meet at the first one's port; one rank each."""
    port, script = free_port(), tmp_path / "script.py"
    script.write_text(TWO_HOSTS)
    agents = []
    for address in ("127.0.0.1", "127.0.0.2"):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", address]
        command += [str(script), str(tmp_path / "rank")]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        agents.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
    said = [agent.communicate(timeout=600)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["[0, 1]"] * 2
