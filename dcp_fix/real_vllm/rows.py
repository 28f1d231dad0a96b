"""Answers of real vLLM judged: right or wrong, DCP1's or not, how far the logprobs lie apart, what is no number."""

from collections import Counter
from dataclasses import dataclass

from dcp_fix.base import equality
from dcp_fix.base.errors import UserError
from dcp_fix.ladder import ladder
from dcp_fix.real_vllm.boot import Answered, Boot
from dcp_fix.real_vllm.questions import Question
from dcp_fix.real_vllm.rungs import PLUGIN, REFERENCE, WORKAROUND, Settings
from dcp_fix.tiny import corpus


@dataclass(frozen=True)
class JudgedAnswer:
    """One prompt on one rung; what is first or different is so against DCP1's answer.

    `nan`: how many logprobs are no number (None). `logprob_difference`: the largest over the leading tokens that are
    the same, None where there is nothing to compare.
    """

    text: str
    tokens: list[int]
    sha256: str
    cached: int
    right: bool
    first_difference: int | None
    commonest_share: float
    smallest_margin: float | None
    logprobs: list[float | None]
    nan: int
    logprob_difference: float | None


@dataclass(frozen=True)
class RungRow(ladder.LadderRow):
    """One rung, class and way of asking."""

    answers: list[JudgedAnswer]  # type: ignore[assignment]
    batch: bool = False

    @property
    def nan(self) -> int:
        """Prompts with a token whose logprob is no number."""
        return sum(answer.nan > 0 for answer in self.answers)

    @property
    def whole(self) -> bool:
        """Whether all answers are DCP1's. No tokens are no answer, and tokens without a logprob prove nothing."""
        answered = all(answer.tokens and not answer.nan for answer in self.answers)
        return bool(self.answers) and answered and self.equal == len(self.answers)


Reference = dict[tuple[str, bool], list[JudgedAnswer]]  # DCP1's answers by class and way of asking


def rows_of(name: str, settings: Settings, asked: list[Question], result: Boot, reference: Reference) -> list[RungRow]:
    """A row per class and way of asking; `reference` is empty for DCP1 itself."""
    rows = []
    for batch in settings.ways:
        for prompt_class in settings.classes:
            of_class = [question for question in asked if question.prompt_class == prompt_class]
            found = [result.answers.get(question.identity(batch)) for question in of_class]
            failure = result.failure or (None if all(found) else "vLLM left prompts unanswered")
            known = reference.get((prompt_class, batch), [None] * len(of_class))
            judged = [] if failure else [judge(*three) for three in zip(of_class, found, known, strict=True)]
            rows.append(RungRow(name, prompt_class, judged, failure, batch))
    return rows


def judge(question: Question, found: Answered, reference: JudgedAnswer | None) -> JudgedAnswer:
    """One answer against the right one and DCP1's; without a reference it is its own."""
    tokens, logprobs = found.tokens, [None if x is None else round(x, 7) for x in found.logprobs]
    text = found.text or corpus.decode(tokens)
    return JudgedAnswer(
        text=text,
        tokens=tokens,
        sha256=equality.digest(tokens),
        cached=found.cached,
        right=question.right(tokens, text),
        first_difference=equality.first_difference(tokens, reference.tokens) if reference else None,
        commonest_share=Counter(tokens).most_common(1)[0][1] / len(tokens) if tokens else 0.0,
        smallest_margin=None if found.smallest_margin is None else round(found.smallest_margin, 6),
        logprobs=logprobs,
        nan=logprobs.count(None),
        logprob_difference=largest(tokens, logprobs, reference) if reference else 0.0,
    )


def largest(tokens: list[int], logprobs: list[float | None], reference: JudgedAnswer) -> float | None:
    """The largest difference over the leading tokens that both have, as far as both logprobs are numbers."""
    same = equality.first_difference(tokens, reference.tokens)
    pairs = list(zip(logprobs, reference.logprobs, strict=False))[:same]
    return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=None)


def reference_of(rows: list[RungRow]) -> Reference:
    """DCP1's answers. Raises UserError if it has none that others could be judged by."""
    own = [row for row in rows if row.rung == REFERENCE]
    failed = next((row.failure for row in own if row.failure), None if own else "it was not run")
    if failed:
        raise UserError(f"there is no reference, DCP1 has no answers: {failed}")
    if not all(row.whole for row in own):
        raise UserError("there is no reference: DCP1 answered without a token, or with a logprob that is no number")
    return {(row.prompt_class, row.batch): row.answers for row in own}


def broken(rows: list[RungRow]) -> list[str]:
    """Rungs as installed or with a defect put back that differ from DCP1 somewhere, or have no answer."""
    healthy = (REFERENCE, WORKAROUND, PLUGIN)
    return list(dict.fromkeys(row.rung for row in rows if row.rung not in healthy and not row.whole))


def repaired(rows: list[RungRow]) -> bool:
    """Whether the plugin's rung equals DCP1 on every prompt, asked either way, and some rung without it does not."""
    last = [row for row in rows if row.rung == PLUGIN]
    return bool(last) and all(row.whole for row in last) and bool(broken(rows))
