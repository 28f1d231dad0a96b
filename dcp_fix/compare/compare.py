"""Two serving endpoints, byte for byte: the command `dcp-fix compare --a URL --b URL`; README.md says how to use it.

Three prompts, as in upstream's own proof of the fixes (vLLM PR 50005), each sent twice to each endpoint, greedily.
Equal means: the same text, as UTF-8 bytes, and the same token ids where both endpoints offer them. Logprobs may differ
in the last digits, but one that is a number here and NaN there is a difference.

It does not: launch servers, send an API key, or say which endpoint is right.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from dcp_fix.base import equality, output
from dcp_fix.base.errors import UserError, shown
from dcp_fix.compare.answers import FORMAT, Completion, EndpointError, Saved, Twice, load
from dcp_fix.compare.endpoint import Endpoint
from dcp_fix.compare.prompts import Prompt, prompts

ALPHA = 0.05
DISAGREES = "it samples, serves other traffic in the same batch, or reads memory that nobody wrote (try dcp-fix doctor)"


@dataclass(frozen=True)
class Logprobs:
    """Those of the `count` leading tokens that both answers share; `missing`: why there are none to compare.

    `largest`: difference between two numbers. `one_sided`: tokens whose logprob is no number in one answer.
    """

    count: int = 0
    largest: float = 0.0
    one_sided: int = 0
    missing: str | None = None


@dataclass(frozen=True)
class Row:
    """One prompt at both endpoints. Differences are the index of the first byte of the text and of the first token.

    `noisy`: whether A or B said something else when it was asked again.
    """

    prompt: Prompt
    a: Completion
    b: Completion
    text_difference: int | None
    token_difference: int | None
    logprobs: Logprobs
    noisy: bool = False

    @property
    def sides(self) -> tuple[tuple[str, Completion], ...]:
        """Each answer beside the name of its side."""
        return ("A", self.a), ("B", self.b)

    @property
    def equal(self) -> bool:
        """Text, ids where both have them, and which logprobs are numbers."""
        return self.text_difference is None and self.token_difference is None and not self.logprobs.one_sided


@dataclass(frozen=True)
class Comparison:
    """All rows. `pairs`: how many prompts, if not the classes."""

    a: Endpoint | Saved
    b: Endpoint | Saved
    pairs: int | None
    model: str
    rows: list[Row]

    @property
    def verdict(self) -> str:
        """equal, different, or within noise."""
        if all(row.equal for row in self.rows):
            return "equal"
        return "within noise" if self.pairs and mcnemar(*self.votes) >= ALPHA else "different"

    @property
    def votes(self) -> tuple[int, int]:
        """How many prompts speak for a difference, and how many for noise."""
        different = sum(not row.equal and not row.noisy for row in self.rows)
        return different, sum(row.equal and row.noisy for row in self.rows)


def mcnemar(different: int, noise: int) -> float:
    """McNemar's exact test, one-sided: the chance of so many prompts or more for a difference, if each were a coin.

    A prompt speaks for a difference if both servers repeat themselves and say different things; for noise if one of
    them contradicts itself, and their first answers are equal. Noise of either server counts, which errs on its side.
    """
    coins = different + noise
    return sum(math.comb(coins, heads) for heads in range(different, coins + 1)) / 2**coins


# --- asking -----------------------------------------------------------------------------------------------------------


def run(a: Endpoint | Saved, b: Endpoint | Saved, pairs: int | None = None) -> Comparison:
    """Ask both sides everything. Raises EndpointError if they cannot be compared."""
    model, rows = a.models()[0], []
    if model not in (served := b.models()):
        names = f"{shown(model)} at {a} and {shown(', '.join(served))} at {b}"
        raise EndpointError(f"wrong model: {names}; serve one at both, under one --served-model-name")
    for prompt in prompts(pairs):
        (of_a, noisy_a), (of_b, noisy_b) = (ask_twice(side, model, prompt, pairs) for side in (a, b))
        check_comparable(a, b, of_a, of_b)
        rows.append(row(prompt, of_a, of_b, noisy_a or noisy_b))
    return Comparison(a, b, pairs, model, rows)


def ask_twice(side: Endpoint | Saved, model: str, prompt: Prompt, pairs: int | None) -> tuple[Completion, bool]:
    """(the answer, whether it is another one when asked again). Raises EndpointError where it may not be."""
    first, again = side.answers_to(model, prompt)
    noisy = (first.text, first.ids) != (again.text, again.ids)
    if noisy and not pairs:
        answers = f"{first.text[:60]!r}, then {again.text[:60]!r}"
        raise EndpointError(f"{side} is not greedy: asked {prompt.name} twice, it said {answers}; {DISAGREES}")
    return first, noisy


def check_comparable(a: Endpoint | Saved, b: Endpoint | Saved, of_a: Completion, of_b: Completion) -> None:
    """Raise EndpointError if one text became two different prompts, or if both answers are empty."""
    if of_a.prompt_tokens != of_b.prompt_tokens:
        counts = f"{of_a.prompt_tokens} tokens at {a} and {of_b.prompt_tokens} at {b}"
        raise EndpointError(f"wrong model: one prompt is {counts}; do both load the same tokenizer?")
    if not of_a.text and not of_b.text:
        raise EndpointError(f"{a} and {b} both answer with no text at all: nothing to compare")


def keep(a: Endpoint, pairs: int | None = None) -> Saved:
    """Ask one endpoint everything, and give its answers for a later comparison. Raises EndpointError."""
    model = a.models()[0]
    answers = {}
    for prompt in prompts(pairs):
        first, again = a.answers_to(model, prompt)
        answers[prompt.digest] = Twice(first=first, again=again)
    return Saved(format=FORMAT, endpoint=str(a), model=model, answers=answers)


# --- judging ----------------------------------------------------------------------------------------------------------


def row(prompt: Prompt, a: Completion, b: Completion, noisy: bool = False) -> Row:
    """Compare two answers to one prompt."""
    text = equality.first_difference(a.encoded, b.encoded)
    tokens = None if a.ids is None or b.ids is None else equality.first_difference(a.ids, b.ids)
    return Row(prompt, a, b, text, tokens, compare_logprobs(a, b, text, tokens), noisy)


def compare_logprobs(a: Completion, b: Completion, text: int | None, tokens: int | None) -> Logprobs:
    """Logprobs up to the first token that differs; never cut to the shorter list.

    Without ids nobody knows which token differs first: then only of equal texts.
    """
    missing = [f"{name} offers {why}" for name, one in (("A", a), ("B", b)) if (why := one.lacking(one.logprobs))]
    if not missing and tokens is None and len(a.logprobs) != len(b.logprobs):
        missing = [f"{len(a.logprobs)} of A and {len(b.logprobs)} of B"]
    if missing or tokens == 0 or (tokens is None and text is not None):
        return Logprobs(missing="; ".join(missing) or "no token in common")
    pairs = list(zip(a.logprobs[:tokens], b.logprobs[:tokens], strict=True))
    largest = max((abs(x - y) for x, y in pairs if None not in (x, y)), default=0.0)
    return Logprobs(len(pairs), largest, sum((x is None) != (y is None) for x, y in pairs))


# --- the command ------------------------------------------------------------------------------------------------------


def main(a: str, b: str | None, json: Path | None, timeout: float, save_to: Path | None, pairs: int | None) -> int:
    """Compare, write JSON, print; with `save_to` and without `b`, keep the answers of A instead.

    Returns 0 if all is equal, or differs no more than the servers' own noise; 1 if anything differs. Raises UserError.
    """
    from dcp_fix.compare import report

    if (b is None) == (save_to is None):
        raise UserError("give --b URL to compare with, or --save FILE to keep the answers of --a; not both")
    first = side(a, "A", timeout)
    if b is None:
        if json or isinstance(first, Saved):
            raise UserError("--save keeps the answers of a server in one file: --a must be its address, without --json")
        output.deliver(save_to, keep(first, pairs).model_dump(), report.show_saved, first, save_to)
        return 0
    second = side(b, "B", timeout)
    if first == second:
        raise UserError(f"{first} and {second} are one: whatever it answers equals itself; name two endpoints")
    result = run(first, second, pairs)
    output.deliver(json, report.as_json(result), report.show, result)
    return 1 if result.verdict == "different" else 0


def side(given: str, name: str, timeout: float) -> Endpoint | Saved:
    """Answers out of a file, which is what ends in .json and what there is a file of; else an endpoint."""
    is_file = "://" not in given and (given.endswith(".json") or os.path.exists(given))
    return load(Path(given)) if is_file else Endpoint(name, given, timeout)
