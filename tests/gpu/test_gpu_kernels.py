"""The compiled kernels on a GPU: every norm/RoPE case, the reference's bytes, the interpreter's results."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dcp_fix import broken
from dcp_fix.attention import sparse_partial, sparse_partial_reference
from dcp_fix.base.equality import close, same_bytes
from dcp_fix.combine import merge_partials
from dcp_fix.kv_cache import CACHE_FORMATS, new_latent_cache, write_latent
from dcp_fix.norm_rope import NormRopeInputs, fused_norm_rope, fused_norm_rope_reference
from dcp_fix.ownership import localise, slots_of
from tests.norm_rope_cases import CASES, Run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
TESTS = Path(__file__).resolve().parent.parent


# --- norm and RoPE ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_case_compiled(case):
    run = Run(case, "cuda")
    assert run.go(fused_norm_rope) is run.out["q"]
    torch.cuda.synchronize()
    run.check()


@pytest.mark.parametrize("defect", ["skip_all_rows", "skip_dense_rows"])
def test_each_defect_fails_the_same_cases_as_on_the_reference(defect):
    failing = {"cpu": set(), "cuda": set()}
    for device, function in (("cpu", fused_norm_rope_reference), ("cuda", fused_norm_rope)):
        for name, case in CASES.items():
            run = Run(case, device)
            run.go(getattr(broken, defect)(function))
            try:
                run.check()
            except AssertionError:
                failing[device].add(name)
    assert failing["cuda"] == failing["cpu"] and 0 < len(failing["cpu"]) < len(CASES)


def exact_inputs(tokens, dtype):
    """Odd integers: their squares sum exactly in any order, and no pair is (0, 0), whose rotation is 0 or -0.

    Then two implementations may differ in no bit.
    """
    generator = torch.Generator().manual_seed(tokens)
    integers = lambda *shape: (2 * torch.randint(-8, 8, shape, generator=generator) + 1).to(dtype)  # noqa: E731
    return integers(tokens, 512), integers(tokens, 64), integers(512).abs() / 4 + 1


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cache_bytes_equal_the_references(cache_format, dtype):
    tokens, table = 100, torch.randn(128, 64, generator=torch.Generator().manual_seed(7))
    kv, k_pe, weight = exact_inputs(tokens, dtype)
    slots = torch.randperm(128, generator=torch.Generator().manual_seed(8))[:tokens]
    slots[::3] = -1
    caches = {}
    for device in ("cpu", "cuda"):
        cache = new_latent_cache(2, cache_format, device=device)
        cache.view(torch.uint8).fill_(0x7F)
        moved = [x.to(device) for x in (torch.arange(tokens), kv[:, :96], weight[:96], kv, weight, k_pe, table)]
        scale = torch.tensor([0.013], device=device) if cache_format == "fp8" else None
        fused_norm_rope(NormRopeInputs(*moved, 1e-5, slots.to(device), cache, cache_format, scale))
        caches[device] = cache.view(torch.uint8).cpu()
    assert same_bytes(caches["cuda"], caches["cpu"])
    assert (caches["cpu"] != 0x7F).any(-1).sum() == (slots >= 0).sum()


INTERPRETED = """
import pytest, sys, torch
from tests.norm_rope_cases import CASES, Run
from tests.triton_rounding import round_like_torch
from dcp_fix.norm_rope.launcher import fused_norm_rope_triton

round_like_torch(pytest.MonkeyPatch())
runs = {name: Run(case) for name, case in CASES.items() if case.dtype == torch.float32}
for run in runs.values():
    run.go(fused_norm_rope_triton)
torch.save({name: run.memory for name, run in runs.items()}, sys.argv[1])
"""


def test_interpreter_and_compiler_agree(tmp_path):
    """On the same fp32 inputs. Sums may run in another order, which moves a few codes to the next one."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent)])
    command = [sys.executable, "-c", INTERPRETED, str(tmp_path / "memory.pt")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    for name, memory in torch.load(tmp_path / "memory.pt").items():
        run = Run(CASES[name], "cuda")
        run.go(fused_norm_rope)
        for output, interpreted in memory.items():
            compiled = run.memory[output].cpu()
            if interpreted.is_floating_point():
                assert same_bytes(compiled.isnan(), interpreted.isnan()), (name, output)
                assert close(compiled.nan_to_num(0), interpreted.nan_to_num(0), ulps=4, floor=1.0), (name, output)
            else:
                assert (compiled != interpreted).float().mean() < 2e-3, (name, output)


# --- attention --------------------------------------------------------------------------------------------------------

FIRST_CALL = """
import threading, torch
from dcp_fix.attention import dense_prefill
from dcp_fix.base.equality import digest

inputs = [torch.randn(480, 4, 128, device="cuda").bfloat16() for _ in range(3)]
outputs, start = {}, threading.Barrier(8)
torch.cuda.synchronize()

def rank(number):
    start.wait()
    outputs[number] = dense_prefill(*inputs, 0.1)

threads = [threading.Thread(target=rank, args=(number,)) for number in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len({digest(out) for out in outputs.values()} | {digest(dense_prefill(*inputs, 0.1))}))
"""


def test_all_ranks_take_the_same_dense_kernel_in_the_first_call_of_a_process():
    """Each trial is a process; without the lock most trials print 2 (torch chooses the order of its kernels once)."""
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent)}
    trials = [
        subprocess.Popen([sys.executable, "-c", FIRST_CALL], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert [trial.communicate(timeout=300)[0].strip() for trial in trials] == ["1"] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
@pytest.mark.parametrize("tokens, heads, dcp_size", [(1, 16, 4), (3, 64, 2), (70, 20, 8)])
def test_the_shards_of_a_cache_merge_to_the_whole(dtype, cache_format, tokens, heads, dcp_size):
    """DCP on one GPU: every rank's partial over its own shard, compiled, against the reference over one cache."""
    length, topk, generator = 1000, 512, torch.Generator().manual_seed(tokens)
    latent, rope = (torch.randn(length, width, generator=generator) for width in (512, 64))
    q = torch.randn(tokens, heads, 576, generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(length, generator=generator)[:topk] for _ in range(tokens)])
    ids[0, 5:] = -1  # fewer keys than ranks: some shards are empty
    scale = 0.05 if cache_format == "fp8" else None
    outs, lses = [], []
    for rank in (0, *range(dcp_size)):
        whole = not outs
        table = torch.arange(16)
        local = ids if whole else localise(ids, dcp_size, rank)
        mine = torch.arange(length) if whole else localise(torch.arange(length), dcp_size, rank)
        cache = new_latent_cache(16, cache_format)
        write_latent(cache, latent, rope, slots_of(mine, table, 64), cache_format, scale)
        slots = slots_of(local, table, 64)
        if whole:
            outs.append(sparse_partial_reference(q, cache, slots, 576**-0.5, cache_format, scale))
            continue
        partial = sparse_partial(q.cuda(), cache.cuda(), slots.cuda(), 576**-0.5, cache_format, scale)
        lses.append(partial)
    out, lse = merge_partials(torch.stack([p[0] for p in lses]), torch.stack([p[1] for p in lses]))
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    assert torch.allclose(out.cpu(), outs[0][0], atol=tolerance)
    assert torch.allclose(lse.cpu(), outs[0][1], atol=tolerance)
