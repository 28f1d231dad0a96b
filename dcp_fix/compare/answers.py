"""What an OpenAI-compatible server answered: the JSON of a response, taken for a completion or refused by its field.

    Failure       one attempt that came to nothing: what happened, and what to do
    Completion    an answer, as far as it can be believed

What a server may add to its answers counts for nothing here; what is read is of the type that the table below says.

Not here: asking (endpoint.py), judging (compare.py).
"""

import json
import math
from typing import Annotated, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, PlainSerializer

from dcp_fix.base.errors import UserError, shown
from dcp_fix.base.schema import Schema, allowed, checked

PASSING = (429, 500, 502, 503, 504)
WHOLE = "a whole number from 0 on, or null"


class Failure(Exception):
    """One attempt that failed. `passing`: another one may succeed."""

    def __init__(self, what: str, remedy: str, passing: bool = True, status: int | None = None) -> None:
        super().__init__(f"{what}: {remedy}")
        self.passing, self.status = passing, status


# --- what is allowed --------------------------------------------------------------------------------------------------


def with_nan(values: list[float | None]) -> list[float]:
    """What is no finite number, null included, as NaN."""
    return [value if value is not None and math.isfinite(value) else math.nan for value in values]


def without_nan(values: list[float] | None) -> list[float | None] | None:
    """The same for JSON, which lacks NaN: null."""
    return values and [None if math.isnan(value) else value for value in values]


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Ids = Annotated[list[Count], Field(fail_fast=True)]  # one wrong of millions is error enough
Numbers = Annotated[list[float | None], Field(fail_fast=True), AfterValidator(with_nan)]


class Sent(Schema):
    """Part of an answer: what is not named here is let pass; Python's servers write NaN."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=True)


class Card(Sent):
    """One model."""

    id: str = allowed("a name")


class Models(Sent):
    """An answer of /v1/models."""

    data: Annotated[list[Card], Field(fail_fast=True)] = allowed("a list of models, each with an id", min_length=1)


class TokenLogprobs(Sent):
    """The logprobs of a choice."""

    token_logprobs: Numbers | None = allowed("a list of numbers, or null", default=None)


class Choice(Sent):
    """One of the answers to a prompt."""

    text: str = allowed("text")
    finish_reason: str | None = allowed("a word, or null", default="stop")
    token_ids: Ids | None = allowed("a list of token ids, or null", default=None)
    prompt_token_ids: Ids | None = allowed("a list of token ids, or null", default=None)
    logprobs: TokenLogprobs | None = allowed("an object, or null", default=None)


class Details(Sent):
    """Where the tokens of a prompt came from."""

    cached_tokens: Count | None = allowed(WHOLE, default=None)


class Usage(Sent):
    """How many tokens there were."""

    prompt_tokens: Count = allowed("a whole number from 0 on")
    completion_tokens: Count | None = allowed(WHOLE, default=None)
    prompt_tokens_details: Details | None = allowed("an object, or null", default=None)


class Answer(Sent):
    """An answer of /v1/completions."""

    choices: Annotated[list[Choice], Field(fail_fast=True)] = allowed("a list of choices, not empty", min_length=1)
    usage: Usage = allowed("an object")


class Completion(Schema):
    """An answer as it is compared. What the endpoint does not offer is None; a logprob that is no number is NaN.

    `ids_missing`: why `token_ids` is None although some were sent. `finish_reason` None: it was never finished.
    """

    model_config = ConfigDict(allow_inf_nan=True)

    text: str = allowed("text")
    token_ids: Ids | None = allowed("a list of token ids, or null", default=None)
    logprobs: Annotated[Numbers | None, PlainSerializer(without_nan)] = allowed("a list of numbers, or null", None)
    prompt_tokens: Count = allowed("a whole number from 0 on")
    prompt_ids: Ids | None = allowed("a list of token ids, or null", default=None)
    cached_tokens: Count | None = allowed(WHOLE, default=None)
    logprobs_refused: str | None = allowed("text, or null", default=None)
    finish_reason: str | None = allowed("a word, or null", default="stop")
    completion_tokens: Count | None = allowed(WHOLE, default=None)
    ids_missing: str | None = allowed("text, or null", default=None)

    @property
    def encoded(self) -> bytes:
        """The text in UTF-8; a lone surrogate, which JSON can carry, keeps its bits."""
        return self.text.encode("utf-8", "surrogatepass")


# --- taking an answer -------------------------------------------------------------------------------------------------


def json_of(status: int, content: bytes, proxy: str | None):
    """The JSON of a successful answer. Raises Failure for another status, quoting the server, and for other content."""
    start = shown(" ".join(content[:400].decode(errors="replace").split()))
    if status != 200:
        if proxy:
            raise Failure(
                f"HTTP {status} {start!r} {proxy}", "from it or from the server; see both", status in PASSING, status
            )
        remedy = "see the server's log" if status >= 500 else "is it an OpenAI-compatible server that needs no key?"
        raise Failure(f"HTTP {status} {start!r}", remedy, status in PASSING, status)
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise Failure(f"an answer that is not JSON {start!r}", "is this an inference server?") from None


Kind = TypeVar("Kind", bound=Sent)


def taken(schema: type[Kind], answer, name: str) -> Kind:
    """An answer as a `schema`. Raises Failure that names the first field which is not."""
    try:
        return checked(schema, answer, name)
    except UserError as error:
        raise Failure(str(error).split("\n")[0], "is this an OpenAI-compatible server?") from None


def model_names(answer) -> list[str]:
    """The ids in an answer of /v1/models. Raises Failure for another shape."""
    return [card.id for card in taken(Models, answer, "no list of models").data]


def completion(answer) -> Completion:
    """The first choice of an answer of /v1/completions. Raises Failure for another shape."""
    whole = taken(Answer, answer, "no completion")
    choice, usage = whole.choices[0], whole.usage
    missing = lacking(choice.token_ids, choice.text, usage.completion_tokens)
    return Completion(
        text=choice.text,
        token_ids=None if missing else choice.token_ids,
        logprobs=choice.logprobs and choice.logprobs.token_logprobs,
        prompt_tokens=usage.prompt_tokens,
        prompt_ids=choice.prompt_token_ids,
        cached_tokens=usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens,
        finish_reason=choice.finish_reason,
        completion_tokens=usage.completion_tokens,
        ids_missing=missing,
    )


def lacking(ids: list[int] | None, text: str, made: int | None) -> str | None:
    """Why token ids that were sent are not those of the answer; None where they are, or where none were sent."""
    if ids is None:
        return None
    if made is not None and len(ids) < made:
        return f"{len(ids)} for {made} tokens"
    return "none beside a text" if text and not ids else None
