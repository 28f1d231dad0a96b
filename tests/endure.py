"""`make endure`: thousands of requests through one engine, a thousand groups; report to tests/figures/endure.json.

    python -m tests.endure [--requests N] [--cycles N] [--seconds S]

Requests of random lengths, some of which share their beginning with earlier ones, go through one engine whose cache
holds two of the longest. Each is answered by a fresh engine as well: in exact mode both must have the same
bits, in ordinary mode the same tokens up to a margin that rounding can cross (a prefix hit has other matrix shapes).
The peak of memory, after trimming, must be the same in both halves.
"""

import argparse
import ctypes
import gc
import json
import random
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch

from dcp_fix.engine.engine import Engine
from dcp_fix.engine.model import Model
from dcp_fix.equality import first_difference, same_bytes
from dcp_fix.evidence import machine
from dcp_fix.ranks.group import LocalGroup
from tests.checkpoints import CONFIG, random_checkpoint

REPORT = Path(__file__).resolve().parent / "figures" / "endure.json"
RANKS = 2
LONGEST = 600  # tokens of a request at most; exact mode reuses a prefix in units of 512
CACHE = 1600  # tokens that an engine holds
SMALL = {  # layers of each kind, and no more: most of the time goes into the fresh engines' prefill
    "num_hidden_layers": 2, "indexer_types": ["full", "shared"], "mlp_layer_types": ["dense", "sparse"],
    "first_k_dense_replace": 1,
}  # fmt: skip
CROSSABLE = 0.05  # logits: a margin that the rounding of an fp8 cache can cross
FLAT = 1.02  # peak memory of the second half of a run, as a multiple of the first half's
MODES = {"exact": "exact", "ordinary": "ag_rs"}


def main() -> int:
    """Both modes and the groups; 0 if every answer was equal and memory stayed flat."""
    options = argparse.ArgumentParser()
    options.add_argument("--requests", type=int, default=10_000)
    options.add_argument("--cycles", type=int, default=1_000)
    options.add_argument("--seconds", type=float, default=1e9, help="for each mode: stop after these")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Model.load(random_checkpoint(Path(folder), **SMALL))
    model = Model(replace(model.config, max_position_embeddings=CACHE, eos_token_id=-1), model.weights)
    found = {"cpu": machine.cpu_model(), "torch": torch.__version__, "ranks": RANKS}
    for mode, combine in MODES.items():
        found[mode] = LocalGroup.run(RANKS, requests, model, combine, asked.requests, asked.seconds, timeout=3600)[0]
        print(mode, found[mode], flush=True)
    found["groups"] = groups(asked.cycles)
    print("groups", found["groups"])
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(found[part]["ok"] for part in (*MODES, "groups")) else 1


def requests(group, model: Model, combine: str, count: int, seconds: float) -> dict:
    """What became of `count` requests on one rank; all ranks find the same."""
    draw, began = random.Random(50095), time.monotonic()
    prefixes = [tokens(draw, LONGEST) for _ in range(2)]
    make = lambda: Engine(model, group, dcp_size=RANKS, combine=combine, max_length=CACHE)  # noqa: E731
    engine, hits, crossed, differing, memory = make(), 0, 0, [], []
    done = 0
    while done < count and go_on(group, time.monotonic() - began < seconds):
        prompt, steps = request(draw, prefixes), draw.randint(1, 4)
        got, want = engine.generate(prompt, steps), make().generate(prompt, steps)
        hits += got.cached > 0
        place = first_difference(got.tokens, want.tokens)
        if combine == "exact":
            differing += [] if same_bytes(got.logits, want.logits) and place is None else [done]
        elif place is not None:
            crossed += want.margins[place] < CROSSABLE
            differing += [] if want.margins[place] < CROSSABLE else [done]
        done += 1
        if done % 10 == 0:
            memory.append(resident())
    return {
        "requests": done, "prefix_hits": hits, "near_ties_crossed": crossed, "differing": differing,
        "mib": tenths(memory), "ok": not differing and flat(memory),
    }  # fmt: skip


def tenths(memory: list[float]) -> list[float]:
    """Resident MiB after each tenth of a run."""
    return [round(memory[len(memory) * part // 10 - 1], 1) for part in range(1, 11)] if len(memory) >= 10 else memory


def flat(memory: list[float]) -> bool:
    """Whether the peak of the second half lies within FLAT of the first one's: a leak would raise it."""
    half = len(memory) // 2
    return half == 0 or max(memory[half:]) <= FLAT * max(memory[:half])


def go_on(group, mine: bool) -> bool:
    """Rank 0's clock decides for all."""
    return bool(group.broadcast(torch.tensor([mine]))[0])


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(2, CONFIG["vocab_size"]) for _ in range(count)]


def request(draw: random.Random, prefixes: list[list[int]]) -> list[int]:
    """One in twelve is long and begins as other long ones do, as half of the short ones begin as other short ones."""
    if draw.random() < 1 / 12:
        length = draw.randint(513, 540)
        return draw.choice(prefixes)[: draw.randint(512, length - 1)] + tokens(draw, 28)
    length = draw.randint(1, 150)
    shared = draw.randint(0, length) if draw.random() < 0.5 else 0
    return draw.choice(prefixes)[:shared] + tokens(draw, length - shared)


def groups(cycles: int) -> dict:
    """Groups of four ranks made, used and let go; threads and memory afterwards."""
    memory = []
    for cycle in range(cycles):
        sums = LocalGroup.run(4, lambda group: group.subgroup(2).all_reduce(torch.ones(2)).sum().item())
        assert sums == [4.0] * 4
        if cycle % 20 == 0:
            memory.append(resident())
    return {
        "cycles": cycles, "threads": threading.active_count(), "mib": tenths(memory),
        "ok": threading.active_count() == 1 and flat(memory),
    }  # fmt: skip


def resident() -> float:
    """Resident memory in MiB, after what is free has been given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / (1 << 20)


if __name__ == "__main__":
    sys.exit(main())
