"""The forced pass: every sublayer at DCP size D on DCP1's input, compared step by step (sublayers.py).

The prompts of the shipped classes, and four small cases for what those cannot show, on the same weights:

    short     5 tokens, interleave 16: all keys lie on one rank, the others have none; cache in bf16
    sparse    200 tokens, 80 keys selected, decode steps in fixed memory, after a longer request; cache in fp8_ds_mla
    ties      170 tokens, interleave 16, an indexer that gives every key the same score; cache in fp8
    prefix    a dense prefill of 640 tokens of which 600 were asked before: no whole number of rounds is shared, and the
              context that is comes in several chunks

The reference is always DCP1, with the prefix cache counting in the unit of D, so that both do the same batches.

It does not: compare tokens or logits of a run that goes by itself (verify.py), or plant anything by itself.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dcp_fix.engine.engine import Engine
from dcp_fix.engine.exact_attention import METHODS as EXACT
from dcp_fix.engine.exact_attention import RunPool
from dcp_fix.engine.model import Model
from dcp_fix.engine.sharded import Ops
from dcp_fix.kv_cache import BLOCK
from dcp_fix.ladder.reference import check_reference
from dcp_fix.ownership import prefix_hit
from dcp_fix.ranks.group import Group
from dcp_fix.tiny import corpus
from dcp_fix.verify.steps import BOUNDS, STEPS, Finding
from dcp_fix.verify.sublayers import Parted, Watcher

STEPS_DECODED = 4  # decode steps of a case
OTHER_SEED = 7  # of the request that leaves its rows behind
TOLD = 8  # findings that a rank passes on


@dataclass(frozen=True)
class ForcedCase:
    """One prompt and how the engine runs it. `first`: tokens of a request that goes before."""

    name: str
    prompt: tuple[int, ...]
    first: tuple[int, ...] = ()
    interleave: int = 1
    cache_format: str = "fp8_ds_mla"
    topk: int | None = None  # keys selected; None: as the checkpoint says
    ties: bool = False
    static: bool = False
    context_rows: int | None = None  # of a chunk of cached context
    room: int = 0  # tokens that the cache has beyond the request


@dataclass(frozen=True)
class ForcedRow:
    """One case at one DCP size. `first`: where it parts from DCP1 by more than rounding, None if nowhere."""

    case: str
    dcp: int
    cache_format: str
    interleave: int
    first: dict | None
    largest: dict[str, float]  # by step: ulps, or rows with other bits
    batches: int
    pieces: tuple[int, int]  # of long batches: computed, of how many

    @property
    def ok(self) -> bool:
        """Whether every step agrees."""
        return self.first is None


def small_cases() -> list[ForcedCase]:
    """The cases beside the shipped classes."""
    text, other = corpus.prompts("1536", 1)[0].ids, corpus.prompts("512", 1, OTHER_SEED)[0].ids
    return [
        ForcedCase("short", tuple(text[:5]), interleave=16, cache_format="bf16"),
        ForcedCase("sparse", tuple(text[:200]), tuple(other[:300]), topk=80, static=True, room=1024),
        ForcedCase("ties", tuple(text[:170]), interleave=16, cache_format="fp8", topk=80, ties=True, room=1024),
        ForcedCase("prefix", tuple(text[:640]), tuple(text[:600]), topk=1024, context_rows=32, room=1024),
    ]


def class_case(name: str) -> ForcedCase:
    """The first prompt of a shipped class."""
    ids = tuple(corpus.prompts(name, 1)[0].ids)
    return ForcedCase(name, ids, ids[: corpus.CACHED.get(name, 0)])


# --- one case ---------------------------------------------------------------------------------------------------------


def model_for(case: ForcedCase, model: Model) -> Model:
    """The model of a case: other selection size, or an indexer that cannot tell keys apart."""
    config = model.config if case.topk is None else replace(model.config, index_topk=case.topk)
    weights = model.weights
    if case.ties:
        weights = {n: torch.zeros_like(w) if "indexer.weights_proj" in n else w for n, w in weights.items()}
    return model if config is model.config and not case.ties else Model(config, weights)


def make_engine(case: ForcedCase, model: Model, group: Any, size: int, unit: int, combine: str, ops: Ops) -> Engine:
    """A watched engine of the case; its prefix cache counts in blocks on `unit` ranks."""
    round_of = BLOCK * unit
    length = max(len(case.prompt), len(case.first)) + STEPS_DECODED + case.room
    weight = model.weights["model.norm.weight"]
    static = case.static and (weight.device.type == "cpu" or group.capturable)  # gloo cannot, not even unrecorded
    engine = Engine(
        model, group, dcp_size=size, interleave=case.interleave, cache_format=case.cache_format, combine=combine,
        ops=ops, stale="noise", device=weight.device, dtype=weight.dtype, static_decode=static,
        max_length=min(-(-length // round_of) * round_of, model.config.max_position_embeddings),
    )  # fmt: skip
    if unit != size and combine not in EXACT:
        engine.pool = RunPool(engine.pool.num_blocks, BLOCK, size, unit // size)
    if case.context_rows:
        engine.attention.context_rows = case.context_rows
    return group.watch(engine)


def run_case(case: ForcedCase, engine: Engine, watcher: Watcher) -> None:
    """Both requests of a case, then the whole caches."""
    try:
        if case.first:
            engine.generate(list(case.first), 1)
        generation = engine.generate(list(case.prompt), STEPS_DECODED + 1)
        if watcher.reference is None:
            check_reference(f"DCP1, {case.name} tokens", generation.logits)
        watcher.finish(len(case.prompt) + len(generation.tokens) - 1)
    except Parted:
        pass  # what follows has other inputs; the watcher has noted it


def record(case: ForcedCase, model: Model, group: Group, unit: int, combine: str) -> dict:
    """What DCP1 makes of the case, this rank's view. `unit`: the DCP size whose prefix hits it must have."""
    watcher = Watcher(group)
    run_case(case, make_engine(case, model, watcher, 1, unit, combine, Ops()), watcher)
    return watcher.seen


def row(case: ForcedCase, model: Model, group: Group, size: int, combine: str, ops: Ops, reference: dict) -> ForcedRow:
    """The case at DCP size `size`, compared with what was recorded. Every rank calls it and gets the same."""
    watcher = Watcher(group, reference, combine in EXACT)
    run_case(case, make_engine(case, model, watcher, size, size, combine, ops), watcher)
    return gathered(case, size, watcher)


def gathered(case: ForcedCase, size: int, watcher: Watcher) -> ForcedRow:
    """What all ranks' watchers found, as one row."""
    findings = sorted(watcher.findings, key=lambda found: found.order)[:TOLD]
    mine = {"findings": [asdict(found) for found in findings], "largest": watcher.largest}
    everyones = exchange(mine, watcher.group, watcher.attention.batch.table.device)
    found = sorted((Finding(**f) for told in everyones for f in told["findings"]), key=lambda f: f.order)
    largest = {
        step: max(told["largest"].get(step, 0.0) for told in everyones)
        for step in STEPS
        if any(step in told["largest"] for told in everyones)
    }
    return ForcedRow(
        case.name, size, case.cache_format, case.interleave, asdict(found[0]) if found else None, largest,
        watcher.batches, (watcher.pieces[0], watcher.pieces[1]),
    )  # fmt: skip


def exchange(told: dict, group: Group, device) -> list[dict]:
    """What every rank tells the others, in rank order."""
    text = torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8, device=device)
    lengths = group.all_gather(torch.tensor([len(text)], device=device)).tolist()
    padded = torch.nn.functional.pad(text, (0, max(lengths) - len(text)))
    rows = group.all_gather(padded[None]).cpu()
    return [json.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]


def bound(step: str, dtype: torch.dtype) -> float:
    """Ulps that a step may differ by; 0 where every bit must agree."""
    return BOUNDS[dtype].get(step, 0)


class Forced:
    """The forced pass of one rank: rows of cases, DCP1's record of a case made once for all sizes that share it."""

    def __init__(self, group: Group, model: Model, combine: str = "ag_rs", progress: Callable | None = None) -> None:
        self.group, self.model, self.combine, self.progress = group, model, combine, progress
        self.records: dict[tuple, dict] = {}

    def rows(self, case: ForcedCase, sizes, ops: Ops | None = None) -> list[ForcedRow]:
        """A row per DCP size, 1 left out; `ops` are the engine's steps at those sizes."""
        model, found = model_for(case, self.model), []
        for size in (size for size in sizes if size > 1):
            if self.progress:
                self.progress(f"DCP{size}, forced", case.name, 0, 1)
            reference = self.reference(case, model, size)
            found.append(row(case, model, self.group, size, self.combine, ops or Ops(), reference))
        return found

    def reference(self, case: ForcedCase, model: Model, size: int) -> dict:
        """DCP1's record, which depends on the size only through the prefix hit."""
        key = case, prefix_hit(len(case.first), BLOCK, size)
        if key not in self.records:
            self.records[key] = record(case, model, self.group, size, self.combine)
        return self.records[key]

    def keep(self, case: ForcedCase, sizes, seen: dict) -> None:
        """Take over a record that the free-running pass has made of the case."""
        hits = {prefix_hit(len(case.first), BLOCK, size) for size in sizes}
        self.records |= {(case, hit): seen for hit in hits if hit == prefix_hit(len(case.first), BLOCK, 1)}
