"""`make endure`: thousands of requests through one engine, a thousand groups; report to figures/endure.json.

    python -m tests.tools.endure [--requests N] [--cycles N] [--seconds S] [--no-report]

One engine, in a process of its own, answers requests of random lengths, one after the other. Its cache holds five
units of reuse (a unit is 128 tokens), a request fills up to three: they evict one another. Many begin as others did, or
go on from an earlier answer. The process that judges gives each request to a fresh engine: in exact mode both must have
the same bits, on every rank; in ordinary mode the same tokens, up to the first place whose margin rounding can cross.
In both modes prefill batches end at the multiples of a unit, as hits do. (An ordinary engine with longer batches reads
cached rows rounded to fp8 where a fresh one has them unrounded: rounding that crosses wider margins.)

The rule for memory, laid down before any run. Counted is what the process of the engine owns: anonymous, shared and
swapped pages. (File pages are left out: the kernel drops and rereads those as it likes.) It is sampled up to 100 times
at equal distances, between two requests, while every rank waits, after a garbage collection and malloc_trim. The first
tenth of the samples is a warm-up. It is flat if the median of the last tenth lies within 2 % of that of the second.
"""

import argparse
import ctypes
import gc
import multiprocessing
import os
import random
import re
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from dcp_fix.base.equality import first_difference, same_bytes
from dcp_fix.engine.blocks import open_request
from dcp_fix.engine.engine import Engine, Generation
from dcp_fix.engine.model import Model
from dcp_fix.engine.sharded import Ops
from dcp_fix.ranks.group import LocalGroup
from tests.checkpoints import random_checkpoint
from tests.tools import figure

RANKS = 2
UNIT = 128  # tokens: a block of 64 on each rank
CACHE = 5 * UNIT  # tokens that an engine holds
LONGEST = 300  # tokens of a prompt at most
MORE = 40  # tokens at most that follow what a prompt has from an earlier one
STEPS = 3  # tokens of an answer at most
SMALL = {  # a layer whose rows depend on another's attention, both ways of prefill, and no more
    "vocab_size": 509,
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "index_n_heads": 2, "index_topk": 160,
    "num_hidden_layers": 2, "indexer_types": ["full", "shared"], "mlp_layer_types": ["dense", "sparse"],
    "first_k_dense_replace": 1, "max_position_embeddings": CACHE,
}  # fmt: skip
MODES = {
    "exact": {"combine": "exact", "classes": RANKS},
    "ordinary": {"combine": "ag_rs", "max_batch_tokens": UNIT},
}
CROSSABLE = 0.05  # logits: a margin that rounding can cross
FLAT = 0.02
SAMPLES = 100


def main() -> int:
    """Both modes and the groups; 0 if every answer was equal and memory stayed flat."""
    options = argparse.ArgumentParser()
    options.add_argument("--requests", type=int, default=10_000)
    options.add_argument("--cycles", type=int, default=1_000)
    options.add_argument("--seconds", type=float, default=1e9, help="for each mode: no further request after these")
    options.add_argument("--no-report", action="store_true")
    asked = options.parse_args()
    os.environ["MALLOC_ARENA_MAX"] = "1"  # of the children: arenas of threads keep what was freed, +-4 % by chance
    found = figure.surroundings() | {"ranks": RANKS}
    for mode in MODES:
        found[mode] = endure(mode, asked.requests, asked.seconds)
        print(mode, found[mode], flush=True)
    found["groups"] = in_process(groups, asked.cycles)
    print("groups", found["groups"])
    if not asked.no_report:
        figure.write("endure", found)
    return 0 if all(found[part]["ok"] for part in (*MODES, "groups")) else 1


def endure(mode: str, count: int, seconds: float, opened=open_request) -> dict:
    """What became of up to `count` requests; `opened` stands in for how the engine under test opens one."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    ends = [end for _, end in pipes]
    process = context.Process(target=serve, args=(ends, mode, count, seconds, opened), daemon=True)
    process.start()
    for end in ends:
        end.close()  # so that its death ends the reading
    model = small_model()
    found, *others = LocalGroup.run(RANKS, judge, model, mode, [pipe for pipe, _ in pipes], timeout=600)
    process.join()
    assert process.exitcode == 0 and all(other == found for other in others)
    return found


def small_model() -> Model:
    """The model of both processes, with an answer that never ends by itself."""
    with tempfile.TemporaryDirectory() as folder:
        model = Model.load(random_checkpoint(Path(folder), **SMALL))
    return Model(replace(model.config, eos_token_id=-1), model.weights)


# --- the engine that endures ------------------------------------------------------------------------------------------


def serve(pipes, mode: str, count: int, seconds: float, opened) -> None:
    """A process: one engine on RANKS ranks. Rank r sends (prompt, steps, answer, evictions, MiB) into pipe r."""
    LocalGroup.run(RANKS, serve_rank, small_model(), mode, count, seconds, opened, pipes, timeout=600)


def serve_rank(group, model: Model, mode: str, count: int, seconds: float, opened, pipes) -> None:
    """Every rank draws the same requests; rank 0's clock decides for all."""
    draw, pipe, began, evicted = Requests(), pipes[group.rank], time.monotonic(), 0

    def counted(pool, tokens, capacity):
        nonlocal evicted
        known = len(pool.known)
        given = opened(pool, tokens, capacity)
        evicted += known - len(pool.known)
        return given

    engine = Engine(model, group, dcp_size=RANKS, max_length=CACHE, ops=Ops(open=counted), **MODES[mode])
    for index in range(count):
        if not group.all_gather(torch.tensor([time.monotonic() - began < seconds]))[0]:
            break
        prompt, steps = draw.request()
        got = engine.generate(prompt, steps)
        draw.answered(prompt, got.tokens)
        memory = sampled(group) if (index + 1) % max(1, count // SAMPLES) == 0 else None
        pipe.send((prompt, steps, got.tokens, got.logits.numpy(), got.cached, evicted, memory))
    pipe.send(None)


class Requests:
    """Prompts of random lengths: the same on every rank, and on every engine that gives the same answers."""

    def __init__(self) -> None:
        self.draw = random.Random(50095)
        self.beginnings = [self.tokens(LONGEST) for _ in range(4)]
        self.last: list[int] = []

    def tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(2, SMALL["vocab_size"]) for _ in range(count)]

    def request(self) -> tuple[list[int], int]:
        """(prompt, steps). A third shorter than a unit; others begin as another one, or go on from the last answer."""
        steps, kind = self.draw.randint(1, STEPS), self.draw.random()
        if kind < 1 / 3:
            return self.tokens(self.draw.randint(1, UNIT)), steps
        begin = self.draw.choice(self.beginnings)[: self.draw.randint(UNIT // 2, 2 * UNIT - MORE)]
        if kind < 1 / 2 and len(self.last) + MORE <= LONGEST:
            begin = self.last
        return begin + self.tokens(self.draw.randint(1, MORE)), steps

    def answered(self, prompt: list[int], answer: list[int]) -> None:
        self.last = prompt + answer


# --- the judge --------------------------------------------------------------------------------------------------------


def judge(group, model: Model, mode: str, pipes) -> dict:
    """Answer what comes through this rank's pipe on a fresh engine each, and compare."""
    names = ("requests", "prefix_hits", "dense_hits", "cached_tokens", "evictions", "near_ties_crossed")
    found = dict.fromkeys(names, 0) | {"largest_difference": 0.0, "differing": []}
    memory = []
    while (item := pipes[group.rank].recv()) is not None:
        prompt, steps, tokens, logits, cached, found["evictions"], mib = item
        got = Generation(tokens, torch.from_numpy(logits), cached)
        want = Engine(model, group, dcp_size=RANKS, max_length=CACHE, **MODES[mode]).generate(prompt, steps)
        same, crossed, apart = equal_exactly(got, want) if mode == "exact" else equal_by_margin(got, want)
        found["differing"] += [] if same else [found["requests"]]
        found["largest_difference"] = max(found["largest_difference"], apart)
        found["near_ties_crossed"] += crossed
        found["requests"] += 1
        found["prefix_hits"] += cached > 0
        found["dense_hits"] += cached > 0 and len(prompt) <= SMALL["index_topk"]
        found["cached_tokens"] += cached
        memory += [] if mib is None else [mib]
    covered = found["prefix_hits"] > 0 and found["evictions"] > 0
    return found | summary(memory) | {"ok": covered and not found["differing"] and flat(memory)}


def equal_exactly(got: Generation, want: Generation) -> tuple[bool, bool, float]:
    """(the same bits, no near tie is excused, largest difference of a logit)."""
    return got.tokens == want.tokens and same_bytes(got.logits, want.logits), False, apart(got.logits, want.logits)


def equal_by_margin(got: Generation, want: Generation) -> tuple[bool, bool, float]:
    """(the same tokens up to a near tie, whether one was crossed, largest difference of a logit up to there)."""
    place = first_difference(got.tokens, want.tokens)
    steps = len(want.tokens) if place is None else place + 1  # later ones have another context
    crossed = place is not None and want.margins[place] < CROSSABLE
    return place is None or crossed, crossed, apart(got.logits[:steps], want.logits[:steps])


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    return round((got - want).abs().max().item(), 6)


# --- memory -----------------------------------------------------------------------------------------------------------


def sampled(group) -> float:
    """`owned` of the process while no rank computes; the same number on every rank."""
    group.all_gather(torch.zeros(1))
    mib = owned() if group.rank == 0 else 0.0
    return group.all_gather(torch.tensor([mib], dtype=torch.float64))[0].item()


def owned() -> float:
    """MiB that this process owns, after what is free has been given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    fields = re.findall(r"^(?:RssAnon|RssShmem|VmSwap):\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert len(fields) == 3
    return sum(map(int, fields)) / 1024


def tenths(memory: list[float]) -> list[float]:
    """The median of each tenth of the samples."""
    cuts = [len(memory) * part // 10 for part in range(11)]
    return [median(memory[a:b]) for a, b in zip(cuts, cuts[1:], strict=False) if b > a]


def flat(memory: list[float]) -> bool:
    """The rule for memory; false of fewer samples than it needs."""
    medians = tenths(memory)
    return len(medians) == 10 and abs(medians[-1] / medians[1] - 1) <= FLAT


def summary(memory: list[float]) -> dict:
    """MiB by tenth, and the last by the second."""
    medians = tenths(memory)
    growth = round(medians[-1] / medians[1] - 1, 4) if len(medians) == 10 else None
    return {"mib": [round(value, 2) for value in medians], "growth": growth}


# --- groups -----------------------------------------------------------------------------------------------------------


def in_process(fn, *args):
    """fn(*args) in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(fn, args)


def groups(cycles: int) -> dict:
    """Groups of four ranks made, used and let go; threads, open files and memory afterwards."""
    memory, before = [], held()
    for cycle in range(cycles):
        sums = LocalGroup.run(4, lambda group: group.subgroup(2).all_reduce(torch.ones(2)).sum().item())
        assert sums == [4.0] * 4
        if (cycle + 1) % max(1, cycles // SAMPLES) == 0:
            memory.append(owned())
    left = {name: count - before[name] for name, count in held().items()}
    return {"cycles": cycles, "left": left} | summary(memory) | {"ok": not any(left.values()) and flat(memory)}


def held() -> dict:
    return {"threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd"))}


if __name__ == "__main__":
    sys.exit(main())
