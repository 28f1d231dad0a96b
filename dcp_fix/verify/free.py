"""The free-running pass of `dcp-fix verify`: each DCP size answers by itself, and the answers are compared.

Tokens must be identical and the logits of every step close: the ordinary combine adds the same numbers in another
order, and then an fp8 code of the cache may round the other way. No bound on logits tells such a run from a defective
one (forced.py does that), so what is demanded of them is coarse; how far they lie apart, and by how much the chosen
token leads at the closest step, is reported.

It does not: compare sublayer by sublayer (forced.py), or judge whether an answer is right.
"""

from dataclasses import dataclass
from typing import Any

import torch

from dcp_fix.base.equality import digest, first_difference, ulps_apart
from dcp_fix.engine.engine import Engine, Generation
from dcp_fix.engine.model import Model
from dcp_fix.engine.sharded import Ops
from dcp_fix.ladder import ladder
from dcp_fix.ladder.reference import check_reference
from dcp_fix.ranks.group import Group
from dcp_fix.tiny import corpus
from dcp_fix.verify import forced
from dcp_fix.verify.settings import Settings
from dcp_fix.verify.sublayers import Watcher

LOGITS_APART = 0.05  # of the largest logit: no rounding goes that far, but many a defect stays below


@dataclass(frozen=True)
class Run:
    """The answer to one prompt at one DCP size, and a digest of each sublayer's output in each batch."""

    dcp: int
    prompt_class: str
    number: int
    generation: Generation
    layers: list[str]


@dataclass(frozen=True)
class FreeRow:
    """One run against the same prompt at the first DCP size."""

    dcp: int
    prompt_class: str
    number: int
    cached: int
    text: str
    tokens: list[int]
    sha256: str
    logits: list[str]  # a digest per step
    first_token: int | None  # that differs
    logits_identical: bool
    ulps: float  # between the logits, of the largest one
    apart: float  # the same, as a share of the largest one
    margin: float | None = None  # by which the chosen token's logit leads, at the closest step

    @property
    def same(self) -> bool:
        """The same tokens, and logits that only rounding keeps apart."""
        return self.first_token is None and self.apart <= LOGITS_APART


class Traced:
    """A group that keeps a digest of every all_reduce: a sublayer's output, whole and the same on every rank."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.digests: list[str] = []

    def __getattr__(self, name):
        return getattr(self.group, name)

    def all_reduce(self, x, out=None):
        """The group's, and a digest of the result, except while a CUDA graph is recorded: nothing is there yet."""
        whole = self.group.all_reduce(x, out)
        if not (whole.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.digests.append(digest(whole))
        return whole


def answers(
    group, settings: Settings, model: Model, device, size: int, name: str, prompts, progress,
    watcher: Watcher | None = None,
) -> list[Run]:  # fmt: skip
    """One class at one DCP size, on an engine of its own. Unwritten scratch rows hold noise: reading one would show.

    A `watcher`, made over `Traced(group)`, records the first prompt's run for the forced pass.
    """
    traced: Any = watcher.group if watcher else Traced(group)
    seen: Any = watcher or traced
    engine = Engine(
        model, seen, dcp_size=size, combine=settings.combine, stale="noise", device=device,
        ops=Ops() if size == settings.dcp[0] else settings.ops, static_decode=settings.cuda_graphs,
        max_length=max(len(prompt.ids) for prompt in prompts) + ladder.NEW_TOKENS,
    )  # fmt: skip
    report = (lambda done, total: progress(f"DCP{size}", name, done, total)) if progress else None
    runs = []
    if watcher:
        watcher.watch(engine)
    for number, prompt in enumerate(prompts):
        traced.digests = []
        generation = ladder.answer(engine, prompt.ids, corpus.CACHED.get(name, 0), report)
        if watcher and not number:
            rows = len(prompt.ids) + min(len(generation.tokens) - 1, forced.STEPS_DECODED)
            watcher.finish(rows)
            watcher.leave(engine)
        if size == settings.dcp[0]:
            check_reference(f"DCP{size}, {name} tokens, prompt {number}", generation.logits)
        runs.append(Run(size, name, number, generation, traced.digests))
    return runs


def compare(runs: list[Run], settings: Settings) -> list[FreeRow]:
    """Each run against the first DCP size's of the same prompt."""
    reference = {(run.prompt_class, run.number): run for run in runs if run.dcp == settings.dcp[0]}
    return [row(run, reference[run.prompt_class, run.number], settings.dtype) for run in runs]


def row(run: Run, reference: Run, dtype: torch.dtype) -> FreeRow:
    """One run against the reference; logits as far as they follow the same tokens."""
    mine, other = run.generation, reference.generation
    first_token = first_difference(mine.tokens, other.tokens)
    steps = len(mine.tokens) if first_token is None else min(first_token + 1, len(mine.tokens), len(other.tokens))
    a, b = mine.logits[:steps], other.logits[:steps]
    largest = b.abs().max()
    return FreeRow(
        run.dcp, run.prompt_class, run.number, mine.cached, corpus.decode(mine.tokens), mine.tokens,
        digest(mine.tokens), mine.digests, first_token, mine.digests == other.digests,
        ulps=ulps_apart(a.to(dtype), b.to(dtype), largest.to(dtype)), apart=float((a - b).abs().max() / largest),
        margin=min(mine.margins),
    )  # fmt: skip
