"""What an OpenAI-compatible server answered, as far as it can be believed; and the answers of one server in a file.

What a server adds to its answers counts for nothing. What it leaves out is unknown, never taken for the usual value.

Not here: asking (endpoint.py), judging (compare.py).
"""

import json
import math
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field

from dcp_fix.base.bounded import MIB, read_json
from dcp_fix.base.errors import UserError, escaped, shown
from dcp_fix.base.schema import Schema, allowed, checked
from dcp_fix.compare.prompts import NEW_TOKENS, Prompt

FORMAT: Final = "dcp-fix compare, answers 2"
LARGEST = 64 * MIB  # of a file


class EndpointError(UserError):
    """An endpoint that cannot be used; `status`: of HTTP, where it is one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def finite(values: list[float | None]) -> list[float | None]:
    """What is no finite number as None: vLLM, SGLang and Python's JSON write NaN in three ways."""
    return [value if value is not None and math.isfinite(value) else None for value in values]


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Ids = Annotated[list[Count], Field(fail_fast=True)]  # one wrong of millions is error enough
Numbers = Annotated[list[float | None], Field(fail_fast=True), AfterValidator(finite)]


class Completion(Schema):
    """An answer as it was sent. What the endpoint does not offer is None, and so is a logprob that is no number."""

    model_config = ConfigDict(allow_inf_nan=True)

    text: str = allowed("text")
    finish_reason: str | None = allowed("a word, or null")
    prompt_tokens: Count = allowed("a whole number from 0 on")
    completion_tokens: Count | None = allowed("a whole number from 0 on, or null", default=None)
    cached_tokens: Count | None = allowed("a whole number from 0 on, or null", default=None)
    token_ids: Ids | None = allowed("a list of token ids, or null", default=None)
    logprobs: Numbers | None = allowed("a list of numbers, or null", default=None)

    @property
    def encoded(self) -> bytes:
        """The text in UTF-8; a lone surrogate, which JSON can carry, keeps its bits."""
        return self.text.encode("utf-8", "surrogatepass")

    @property
    def tokens(self) -> int | None:
        """How many tokens the answer has, as the endpoint counts them or by its ids; None if it says neither."""
        if self.completion_tokens is None and self.token_ids is not None:
            return len(self.token_ids)
        return self.completion_tokens

    def lacking(self, values: list | None) -> str | None:
        """Why `token_ids` or `logprobs` cannot be compared: of another length, they are those of unknown tokens."""
        if values is None or (self.text and not values):
            return "none"
        return None if self.tokens in (None, len(values)) else f"{len(values)} for {self.tokens} tokens"

    @property
    def ids(self) -> list[int] | None:
        """The token ids, if they are those of the answer."""
        return None if self.lacking(self.token_ids) else self.token_ids

    def check_finished(self, who: object, what: str, asked: int) -> None:
        """Raise EndpointError for an answer that was broken off: two of them could be equal."""
        made = self.tokens
        after = f"{who} ended {what} after {'an unknown number' if made is None else made} of {asked} tokens"
        if self.finish_reason not in ("stop", "length"):
            raise EndpointError(f"{after}, finish_reason {shown(self.finish_reason, 40)!r}: nothing to compare")
        if made is not None and (made > asked or (made < asked and self.finish_reason == "length")):
            raise EndpointError(f"{after}: does it limit answers by itself?")


def json_of(status: int, content: bytes) -> Any:
    """The JSON of a successful answer. Raises EndpointError, quoting the server, for anything else."""
    start = shown(" ".join(content[:400].decode(errors="replace").split()))
    if status != 200:
        remedy = "see the server's log" if status >= 500 else "is it an OpenAI-compatible server that needs no key?"
        raise EndpointError(f"HTTP {status} {start!r}: {remedy}", status)
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise EndpointError(f"an answer that is not JSON {start!r}: is this an inference server?") from None


def model_names(answer: Any) -> list[str]:
    """The ids in an answer of /v1/models. Raises EndpointError for another shape."""
    try:
        names = [card["id"] for card in answer["data"]]
    except (KeyError, TypeError):
        names = []
    if not names or not all(isinstance(name, str) for name in names):
        raise EndpointError("no list of models, each with an id: is this an OpenAI-compatible server?")
    return names


def completion(answer: Any) -> Completion:
    """The first choice of an answer of /v1/completions. Raises EndpointError that names the first field at fault."""
    try:
        choice, usage = answer["choices"][0], answer["usage"]
        values = {name: choice[name] for name in ("text", "finish_reason", "token_ids") if name in choice}
        values |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens") if name in usage}
        values["logprobs"] = (choice.get("logprobs") or {}).get("token_logprobs")
        values["cached_tokens"] = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return checked(Completion, values, "no completion", EndpointError)
    except (LookupError, TypeError, AttributeError):
        raise EndpointError("no completion with choices and usage: is this an OpenAI-compatible server?") from None


class Twice(Schema):
    """The answers to one prompt."""

    first: Completion = allowed("an answer")
    again: Completion = allowed("an answer")


class Saved(Schema):
    """The answers of an endpoint, in its place; `answers` by the digest of the prompt."""

    format: Literal["dcp-fix compare, answers 2"] = allowed(f'"{FORMAT}"')
    endpoint: str = allowed("a name")
    model: str = allowed("a name")
    answers: dict[str, Twice] = allowed("an object: two answers for each prompt")

    def __str__(self) -> str:
        return f"the saved answers of {escaped(self.endpoint)}"

    def models(self) -> list[str]:
        """The model that answered."""
        return [self.model]

    def answers_to(self, model: str, prompt: Prompt) -> tuple[Completion, Completion]:
        """Both answers to that very prompt. Raises EndpointError if it was not asked, or was not answered whole."""
        if prompt.digest not in self.answers:
            raise EndpointError(f"{self}: {prompt.name} was asked otherwise; save them anew, with the same --pairs")
        kept = self.answers[prompt.digest]
        for answer in (kept.first, kept.again):
            answer.check_finished(self, prompt.name, NEW_TOKENS)
        return kept.first, kept.again


def load(path: Path) -> Saved:
    """Read a file. Raises UserError that names the file, the field, its value and what is allowed."""
    try:
        return checked(Saved, read_json(path, LARGEST), shown(path))
    except FileNotFoundError:
        raise UserError(f"{shown(path)}: no such file; make it with `dcp-fix compare --a URL --save FILE`") from None
