"""What things cost where the ranks are: a decode step, a combine, the workspace of sparse attention.

Medians of REPEATS runs on this rank, after warm-up, each until the device is done; bytes as the allocator counts them.
Sizes of GLM-5.2: 64 heads, latent 512, 2048 selected keys.

It does not: sweep, tune or compare with other systems.
"""

import statistics
import time
from collections.abc import Callable

import torch

from dcp_fix import broken, workspace
from dcp_fix.attention import sparse_partial
from dcp_fix.combine import CombineManager
from dcp_fix.engine.engine import Engine
from dcp_fix.engine.model import Model
from dcp_fix.kv_cache import BLOCK, LATENT, ROPE, new_latent_cache
from dcp_fix.ranks.group import Group

HEADS, TOPK = 64, 2048
REPEATS, WARM_UP = 20, 3


def decode_times(group: Group, ids: list[int], model: Model, device) -> dict:
    """Median ms of a greedy decode step after a prompt, with as many KV shards as ranks."""
    times = {}
    for name, static in (("plain", False), ("CUDA graph", True)):
        if static and (torch.device(device).type != "cuda" or not group.capturable):
            continue
        options = {"dcp_size": group.size, "device": device, "static_decode": static}
        engine = Engine(model, group, max_length=len(ids) + REPEATS + 1, **options)
        engine.generate(ids, 4)  # compiles the kernels and records the graph
        times[name] = round(step_time(engine, ids) * 1e3, 4)
    return times


@torch.inference_mode()
def step_time(engine: Engine, ids: list[int]) -> float:
    """Median seconds of `Engine.decode` and the choice of the next token."""
    table, _ = engine.pool.open(ids, len(ids) + REPEATS)
    blocks, times = torch.tensor(table, device=engine.device), []
    for step in range(REPEATS):
        began = time.perf_counter()
        int(engine.decode(ids[-1], len(ids) + step, blocks).argmax())  # waits for the device, as greedy decoding must
        times.append(time.perf_counter() - began)
    engine.pool.close(table, [])
    return statistics.median(times)


def combine_time(group, method: str, tokens: int) -> dict:
    """Median ms of one combine of [tokens, 64 heads, 512] partials on this rank."""
    generator = torch.Generator(group.device).manual_seed(group.rank)
    out = torch.randn(tokens, HEADS, LATENT, generator=generator, device=group.device)
    lse = torch.randn(tokens, HEADS, generator=generator, device=group.device)
    manager = CombineManager(group, method)
    times = [seconds(lambda: manager.combine(out, lse), group.device) for _ in range(WARM_UP + REPEATS)][WARM_UP:]
    return {"method": method, "tokens": tokens, "heads": HEADS, "ms": round(statistics.median(times) * 1e3, 4)}


def seconds(call: Callable, device: torch.device) -> float:
    """Until the device has done it."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    began = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - began


def replays(call: Callable, repeats: int = REPEATS) -> list[float]:
    """Milliseconds of each replay of the CUDA graph of `call`, after WARM_UP others, between events."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(WARM_UP + repeats)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events[WARM_UP:]]


def workspace_peak(tokens: int, device: torch.device) -> dict:
    """Bytes that sparse attention over 64 heads and 2048 keys plans, before and after the fix, and takes on a GPU."""
    row = {"tokens": tokens, "heads": HEADS, "topk": TOPK}
    for name, planner in (("broken", broken.plan_always_allocate), ("fixed", workspace.plan)):
        plan = planner(tokens, HEADS, TOPK, workspace.num_sms(device))
        row[f"{name}_planned_bytes"] = plan.bytes
        row[f"{name}_peak_bytes"] = measured_peak(plan, device) if device.type == "cuda" else None
    return row


def measured_peak(plan: workspace.Plan, device: torch.device) -> int:
    """What one call of the kernel adds to the allocated memory at its highest, inputs aside."""
    cache = new_latent_cache(TOPK // BLOCK, "fp8_ds_mla", device=device)
    slots = torch.arange(TOPK, device=device).expand(plan.tokens, TOPK).contiguous()
    q = torch.zeros(plan.tokens, plan.heads, LATENT + ROPE, dtype=torch.bfloat16, device=device)
    sparse_partial(q[:1], cache, slots[:1], 1.0, "fp8_ds_mla")  # compile first
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    sparse_partial(q, cache, slots, 1.0, "fp8_ds_mla", plan=plan)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()  # processes that follow use the same GPU
    return peak - before
