"""Detective cases: a step of the engine that somebody got wrong, of which you see the behaviour and not the code.

    lengths      case A: how many positions each rank holds, as the suspect counts them
    attend       case B: one head over shards with so many keys each, as the suspect attends
    run          case C: a prompt on a running engine, the suspect at DCP size D beside a healthy DCP1
    check        your verdict: the component, the mechanism and a small input that convicts the suspect

The suspects are planted defects (planted.py), mistakes that others made in the field. A verdict's input is accepted if
the suspect fails on it and the healthy version passes: there is no list of expected inputs. `check` raises
AssertionError saying which part of a verdict does not stand, and never what would.

It does not: show a suspect. Who reads planted.py first has solved nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from dcp_fix import attention, combine, ownership, planted
from dcp_fix.base.equality import first_difference
from dcp_fix.engine.engine import Engine, Generation
from dcp_fix.engine.model import Model
from dcp_fix.engine.sharded import Ops
from dcp_fix.kv_cache import LATENT
from dcp_fix.norm_rope import fused_norm_rope
from dcp_fix.ranks.group import Group, LocalGroup
from dcp_fix.tiny import corpus

COMPONENTS = ("ownership", "norm and RoPE", "indexer", "attention", "combine", "prefix cache")
STEPS = 4  # tokens that case C generates
APART = 0.02  # of the largest logit: rounding stays a hundred times below
KEYS, RANKS, PROMPT = 64, 8, 1536  # the most that a case takes


@dataclass(frozen=True)
class Verdict:
    """What you claim: one of COMPONENTS, one of a case's mechanisms by its number, and an input."""

    component: str
    mechanism: int
    input: tuple


@dataclass(frozen=True)
class Case:
    """A suspect's guilt: `fails(input, healthy)` says whether that input fails, `size` how small it is."""

    component: str
    mechanism: int
    mechanisms: tuple[str, ...]
    fails: Callable[[tuple, bool], bool]
    size: Callable[[tuple], int]
    smallest: int


def mechanisms(name: str) -> None:
    """Print the mechanisms of a case to choose from."""
    for number, text in enumerate(CASES[name].mechanisms, 1):
        print(f"{number}. {text}")


def check(name: str, verdict: Verdict) -> None:
    """Raise AssertionError unless every part of the verdict stands."""
    case = CASES[name]
    assert verdict.component in COMPONENTS, f"component {verdict.component!r} is not one of {', '.join(COMPONENTS)}"
    assert not case.fails(verdict.input, True), f"input {verdict.input}: the healthy version fails on it as well"
    assert case.fails(verdict.input, False), f"input {verdict.input}: the suspect passes on it"
    assert verdict.component == case.component, f"{verdict.component}: a fault there would not explain the symptom"
    assert verdict.mechanism == case.mechanism, f"mechanism {verdict.mechanism}: would that fail on {verdict.input}?"
    size = case.size(verdict.input)
    smaller = "no smaller one is known" if size <= case.smallest else f"a smaller one exists, of size {case.smallest}"
    print(f"case {name}: convicted by an input of size {size}; {smaller}")


# --- case A -----------------------------------------------------------------------------------------------------------


def lengths(length: int, dcp_size: int, interleave: int = 1, healthy: bool = False) -> list[int]:
    """How many of the positions 0 .. length - 1 each rank holds."""
    count = ownership.local_length if healthy else planted.length_without_remainder
    return [int(count(length, dcp_size, rank, interleave)) for rank in range(dcp_size)]


def lengths_fail(given: tuple, healthy: bool) -> bool:
    """`given` = (length, dcp_size, interleave): whether the ranks' counts are those of the owners."""
    length, dcp_size, interleave = given
    owners = [ownership.owner(position, dcp_size, interleave) for position in range(length)]
    return lengths(length, dcp_size, interleave, healthy) != [owners.count(rank) for rank in range(dcp_size)]


# --- case B -----------------------------------------------------------------------------------------------------------


def attend(keys: list[int] | tuple[int, ...], healthy: bool = False) -> float:
    """One head over shards of keys[r] keys that all score 0 and hold the value 1: the merged value, rightly 1."""
    if not keys or len(keys) > RANKS or min(keys) < 0 or max(keys) > KEYS:
        raise ValueError(f"keys {list(keys)}: one number of 0 to {KEYS} for each of 1 to {RANKS} ranks")
    step = attention.sparse_partial if healthy else planted.partial_empty_lse_zero
    rows = torch.cat([torch.ones(KEYS, LATENT), torch.zeros(KEYS, 64)], 1)  # [KEYS, 576]
    column = torch.arange(KEYS)
    shards = [torch.where(column < count, column, -1)[None] for count in keys]
    parts = [step(torch.zeros(1, 1, rows.shape[1]), rows, slots, 1.0) for slots in shards]
    out, lse = (torch.stack(part) for part in zip(*parts, strict=True))
    return round(float(combine.merge_partials(out, lse)[0].mean()), 4)


def attend_fails(given: tuple, healthy: bool) -> bool:
    """`given` = keys of each rank, at least one in all: whether the value is not 1."""
    return sum(given) > 0 and attend(given, healthy) != 1.0


# --- case C -----------------------------------------------------------------------------------------------------------


@cache
def model() -> Model:
    """The shipped checkpoint."""
    return Model.load(corpus.CHECKPOINT)


def generated(tokens: int, dcp_size: int, interleave: int, healthy: bool) -> Generation:
    """The answer to the first `tokens` words of a prompt, on engines of their own. Unwritten memory holds zeros."""
    words = corpus.prompts("1536", 1, seed=3)[0].ids[:tokens]
    ops = Ops(norm_rope=fused_norm_rope if healthy else planted.norm_rope_from_front)
    options: dict[str, Any] = {"dcp_size": dcp_size, "interleave": interleave, "ops": ops, "stale": "zeros"}

    def rank(group: Group) -> Generation:
        return Engine(model(), group, max_length=tokens + STEPS, **options).generate(words, STEPS)

    return LocalGroup.run(4, rank)[0]


def run(tokens: int, dcp_size: int, interleave: int = 1, healthy: bool = False) -> list[float]:
    """How far the suspect's logits lie from DCP1's at each step that follows the same words, as a share of the largest
    logit.
    """
    if not 1 <= tokens <= PROMPT:
        raise ValueError(f"a prompt of {tokens} tokens: choose 1 to {PROMPT}")
    theirs, right = generated(tokens, dcp_size, interleave, healthy), generated(tokens, 1, 1, True)
    parting = first_difference(theirs.tokens, right.tokens)
    steps = STEPS if parting is None else parting + 1
    pairs = zip(theirs.logits[:steps], right.logits[:steps], strict=False)
    return [round(float((a - b).abs().max() / b.abs().max()), 4) for a, b in pairs]


def run_fails(given: tuple, healthy: bool) -> bool:
    """`given` = (tokens, dcp_size, interleave): whether some step is further from DCP1's than rounding."""
    tokens, dcp_size, interleave = given
    return max(run(tokens, dcp_size, interleave, healthy)) > APART


CASES = {
    "A": Case(
        "ownership", 3,
        (
            "The owner of a position is computed without the interleave.",
            "A length is localised once, and smaller ones are found by subtracting from it.",
            "Only whole rounds of the deal are counted.",
            "The last rank's count is rounded up to a whole block.",
        ),
        lengths_fail, size=lambda given: given[0], smallest=1,
    ),
    "B": Case(
        "attention", 2,
        (
            "The lse is in base 2 and read as natural.",
            "A shard without a key reports the lse of a shard with one key.",
            "Shards are averaged, whatever they weigh.",
            "The heads come back in another order than they were gathered in.",
        ),
        attend_fails, size=sum, smallest=1,
    ),
    "C": Case(
        "norm and RoPE", 4,
        (
            "Query rows of tokens that a rank does not own are not written.",
            "K rows of tokens that a rank does not own are not written.",
            "Cache rows are written for negative slots as well.",
            "Cached keys are rotated by the angle of another token's position.",
        ),
        run_fails, size=lambda given: given[0], smallest=2,
    ),
}  # fmt: skip
