"""What the record of a ladder in real vLLM says against itself: every answer judged again, every count and the verdict.

    in_real_ladder(run)    a sentence for each false number

Recomputed as long as the corpus was asked: with `--model` the prompts are another tokenizer's. Not the margins, and of
the logprobs only how they compare: those need the GPUs.
"""

import functools
from collections.abc import Iterator

from dcp_fix.base import equality
from dcp_fix.ladder import ladder
from dcp_fix.tiny import corpus

prompts_of = functools.cache(corpus.prompts)  # every rung is asked the same
HEALTHY = (ladder.REFERENCE, "forced MQA", "with the plugin")  # rungs that must be right


def in_real_ladder(run: dict) -> Iterator[str]:
    """Every rung against DCP1's answers of the same class, asked in the same way."""
    if not run["rows"]:
        yield "a ladder in real vLLM without a rung"
        return
    key = lambda row: (row["prompt_class"], row["batch"])  # noqa: E731
    reference = {key(row): row["answers"] for row in run["rows"] if row["rung"] == ladder.REFERENCE}
    asked = isinstance(run["terms"]["model"], dict)  # digests of the packaged checkpoint, and not another model's name
    for row in run["rows"]:
        name = f"{row['rung']}, {row['prompt_class']}{', batch' if row['batch'] else ''}"
        theirs = reference.get(key(row), [])
        if len(row["answers"]) != (0 if row["failure"] else run["prompts"]) or len(theirs) != run["prompts"]:
            yield f"{name}: {len(row['answers'])} answers and {len(theirs)} of DCP1, where {run['prompts']} were asked"
            continue
        prompts = prompts_of(row["prompt_class"], run["prompts"]) if asked else [None] * run["prompts"]
        for number, (answer, *given) in enumerate(zip(row["answers"], theirs, prompts, strict=False)):
            yield from false(f"{name}, {number}", answer, answer_of(answer, *given))
        yield from false(name, row, counts(row["answers"]))
    yield from false("a ladder in real vLLM", run, {"repaired": repaired(run)})
    if not all(f"{said} {rung}" in run["verdict"] for rung, said in equal_by_rung(run).items()):
        yield f"the verdict of a ladder in real vLLM: {run['verdict']}"


def false(name: str, found: dict, truth: dict) -> Iterator[str]:
    """A sentence for each value of `truth` that `found` has otherwise."""
    yield from (f"{name}: {key} {found[key]}, and it is {value}" for key, value in truth.items() if found[key] != value)


def answer_of(answer: dict, theirs: dict, prompt) -> dict:
    """What an answer's tokens and logprobs make of its other fields. `prompt` None: nobody here knows its answer."""
    tokens, logprobs = answer["tokens"], answer["logprobs"]
    same = equality.first_difference(tokens, theirs["tokens"])
    pairs = list(zip(logprobs, theirs["logprobs"], strict=False))[:same]
    known = {"right": tokens == prompt.answer, "text": corpus.decode(tokens)} if prompt else {}
    return known | {
        "sha256": equality.digest(tokens),
        "first_difference": same,
        "commonest_share": max(map(tokens.count, tokens)) / len(tokens) if tokens else 0.0,
        "nan": logprobs.count(None),
        "logprob_difference": max((abs(a - b) for a, b in pairs if None not in (a, b)), default=None),
    }


def counts(answers: list[dict]) -> dict:
    """What a row says of its answers."""
    return {
        "right": sum(answer["right"] for answer in answers),
        "equal": sum(answer["first_difference"] is None for answer in answers),
        "nan": sum(answer["nan"] > 0 for answer in answers),
    }


def whole(rows: list[dict], prompts: int) -> bool:
    """Whether every answer of some rows is DCP1's; one with a logprob that is no number proves nothing."""
    return all(not row["failure"] and row["equal"] == prompts and not row["nan"] for row in rows)


def repaired(run: dict) -> bool:
    """Whether the plugin makes every answer DCP1's, and something without it did not."""
    cured = [row for row in run["rows"] if row["rung"] == HEALTHY[-1]]
    sick = [row for row in run["rows"] if row["rung"] not in HEALTHY]
    return bool(cured) and whole(cured, run["prompts"]) and not whole(sick, run["prompts"])


def equal_by_rung(run: dict) -> dict[str, str]:
    """`5 of 11` by rung, as the verdict has them."""
    rungs = dict.fromkeys(row["rung"] for row in run["rows"] if row["rung"] != ladder.REFERENCE)
    of = {rung: [row["equal"] for row in run["rows"] if row["rung"] == rung] for rung in rungs}
    return {rung: f"{sum(equal)} of {run['prompts'] * len(equal)}" for rung, equal in of.items()}
