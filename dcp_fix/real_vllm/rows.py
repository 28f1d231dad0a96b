"""Answers of real vLLM judged: right or wrong, DCP1's or not, how far the logprobs lie apart, what is no number."""

from collections import Counter
from dataclasses import dataclass

from dcp_fix.base import equality
from dcp_fix.base.errors import UserError
from dcp_fix.ladder import ladder
from dcp_fix.real_vllm import questions
from dcp_fix.real_vllm.boot import Boot
from dcp_fix.real_vllm.rungs import PLUGIN, REFERENCE, WORKAROUND, Settings, identity
from dcp_fix.tiny import corpus


@dataclass(frozen=True)
class Answer(ladder.Answer):
    """Also: logprobs of the tokens (None: no number), how many are none, the largest difference from DCP1's.

    The difference is over the leading tokens that are the same, None where there is nothing to compare.
    """

    logprobs: list[float | None]
    nan: int
    logprob_difference: float | None


@dataclass(frozen=True)
class Row(ladder.LadderRow):
    """One rung, class and way of asking."""

    batch: bool = False

    @property
    def nan(self) -> int:
        """Prompts with a token whose logprob is no number."""
        return sum(answer.nan > 0 for answer in self.answers)

    @property
    def logprob_difference(self) -> float | None:
        """The largest of its answers, None where none has any."""
        return max((a.logprob_difference for a in self.answers if a.logprob_difference is not None), default=None)


def rows_of(name: str, settings: Settings, asked, result: Boot, reference: dict[tuple, list[Answer]]) -> list[Row]:
    """A row per class and way of asking; `reference`: DCP1's answers by class and way, empty for DCP1 itself."""
    rows = []
    for batch in (False, True)[: 1 + settings.one_batch]:
        for prompt_class in settings.classes:
            of_class = [question for question in asked if question.prompt_class == prompt_class]
            found = [result.answers.get(identity(question, batch)) for question in of_class]
            failure = result.failure or (None if all(found) else "vLLM left prompts unanswered")
            known = reference.get((prompt_class, batch), [None] * len(of_class))
            judged = [judge(*three) for three in zip(of_class, found, known, strict=True) if three[1]]
            rows.append(Row(name, prompt_class, [] if failure else judged, failure, batch))
    return rows


def judge(question: questions.Question, found: dict, reference: Answer | None) -> Answer:
    """One answer against the right one and DCP1's; without a reference it is its own."""
    tokens, logprobs = found["tokens"], [None if x is None else round(x, 7) for x in found["logprobs"]]
    text = found["text"] or corpus.decode(tokens)
    theirs = reference.tokens if reference else tokens
    margins = [margin for margin in found["margins"] if margin is not None]
    return Answer(
        text=text,
        tokens=tokens,
        sha256=equality.digest(tokens),
        cached=found["cached"],
        right=question.right(tokens, text),
        first_difference=equality.first_difference(tokens, theirs),
        commonest_share=Counter(tokens).most_common(1)[0][1] / len(tokens) if tokens else 0.0,
        smallest_margin=round(min(margins), 6) if margins else None,
        logprobs=logprobs,
        nan=logprobs.count(None),
        logprob_difference=largest(tokens, logprobs, reference) if reference else 0.0,
    )


def largest(tokens: list[int], logprobs: list[float | None], reference: Answer) -> float | None:
    """The largest difference over the leading tokens that both have, as far as both logprobs are numbers."""
    same = equality.first_difference(tokens, reference.tokens)
    pairs = list(zip(logprobs, reference.logprobs, strict=False))[:same]
    return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=None)


def reference_of(rows: list[Row]) -> dict[tuple, list[Answer]]:
    """DCP1's answers by class and way of asking. Raises UserError if it has none, since nothing can be judged then."""
    own = [row for row in rows if row.rung == REFERENCE]
    failed = next((row.failure for row in own if row.failure), None if own else "it was not run")
    if failed:
        raise UserError(f"there is no reference, DCP1 has no answers: {failed}")
    return {(row.prompt_class, row.batch): row.answers for row in own}


def row_from(row: dict) -> Row:
    """A row as real_ladder_report.as_json wrote it."""
    answers = [Answer(**answer) for answer in row["answers"]]
    return Row(row["rung"], row["prompt_class"], answers, row["failure"], row["batch"])


def repaired(rows: list[Row], prompts: int) -> bool:
    """Whether the plugin's rung equals DCP1 on every prompt, asked either way, and some rung without it does not."""
    last = [row for row in rows if row.rung == PLUGIN]
    return bool(last) and all(whole(row, prompts) for row in last) and bool(broken(rows, prompts))


def broken(rows: list[Row], prompts: int) -> list[str]:
    """Rungs as installed or with a defect put back that differ from DCP1 somewhere, or have no answer."""
    healthy = (REFERENCE, WORKAROUND, PLUGIN)
    return list(dict.fromkeys(row.rung for row in rows if row.rung not in healthy and not whole(row, prompts)))


def whole(row: Row, prompts: int) -> bool:
    """Whether all of a row's answers are DCP1's."""
    return not row.failure and row.equal == prompts
