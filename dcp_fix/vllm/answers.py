"""What an OpenAI-compatible server answered: the JSON of a response, taken for a completion or refused.

    Failure       one attempt that came to nothing: what happened, and what to do
    Completion    an answer, as far as it can be believed

Not here: asking (endpoint.py), judging (compare.py).
"""

import json
import math
from dataclasses import dataclass

from dcp_fix.vllm.printable import printable

PASSING = (429, 500, 502, 503, 504)


class Failure(Exception):
    """One attempt that failed. `passing`: another one may succeed."""

    def __init__(self, what: str, remedy: str, passing: bool = True, status: int | None = None) -> None:
        super().__init__(f"{what}: {remedy}")
        self.passing, self.status = passing, status


@dataclass(frozen=True)
class Completion:
    """An answer. What the endpoint does not offer is None; a logprob that is no number is NaN.

    `ids_missing`: why `token_ids` is None although some were sent. `finish_reason` None: it was never finished.
    """

    text: str
    token_ids: list[int] | None
    logprobs: list[float] | None
    prompt_tokens: int
    prompt_ids: list[int] | None
    cached_tokens: int | None
    logprobs_refused: str | None = None
    finish_reason: str | None = "stop"
    completion_tokens: int | None = None
    ids_missing: str | None = None

    @property
    def encoded(self) -> bytes:
        """The text in UTF-8; a lone surrogate, which JSON can carry, keeps its bits."""
        return self.text.encode("utf-8", "surrogatepass")


def json_of(status: int, content: bytes, proxy: str | None):
    """The JSON of a successful answer. Raises Failure for another status, quoting the server, and for other content."""
    start = printable(" ".join(content[:400].decode(errors="replace").split()))
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


def model_names(answer) -> list[str]:
    """The ids in an answer of /v1/models. Raises Failure for another shape."""
    try:
        names = [card["id"] for card in answer["data"]]
    except (KeyError, TypeError):
        names = []
    if not names or not all(isinstance(name, str) for name in names):
        raise Failure(f"no list of models but {quote(answer)}", "is this an OpenAI-compatible server?")
    return names


def completion(answer) -> Completion:
    """The first choice of an answer of /v1/completions. Raises Failure for another shape."""
    try:
        choice, usage = answer["choices"][0], answer["usage"]
        logprobs, details = choice.get("logprobs") or {}, usage.get("prompt_tokens_details") or {}
        reason, made = choice.get("finish_reason", "stop"), number(usage.get("completion_tokens"))
        if not isinstance(choice["text"], str) or not isinstance(reason, str | None):
            raise TypeError(type(choice["text"]))
        ids = numbers(choice.get("token_ids"))
        missing = lacking(ids, choice["text"], made)
        return Completion(
            text=choice["text"],
            token_ids=None if missing else ids,
            logprobs=floats(logprobs.get("token_logprobs")),
            prompt_tokens=numbers([usage["prompt_tokens"]])[0],
            prompt_ids=numbers(choice.get("prompt_token_ids")),
            cached_tokens=number(details.get("cached_tokens")),
            finish_reason=reason,
            completion_tokens=made,
            ids_missing=missing,
        )
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError):
        raise Failure(f"no completion but {quote(answer)}", "is this an OpenAI-compatible server?") from None


def lacking(ids: list[int] | None, text: str, made: int | None) -> str | None:
    """Why token ids that were sent are not those of the answer; None where they are, or where none were sent."""
    if ids is None:
        return None
    if made is not None and len(ids) < made:
        return f"{len(ids)} for {made} tokens"
    return "none beside a text" if text and not ids else None


def number(value) -> int | None:
    """One count, or None for none. Raises TypeError for anything else."""
    return None if value is None else numbers([value])[0]


def numbers(values) -> list[int] | None:
    """A list of token ids, or None for none. Raises TypeError for anything else."""
    if values is None:
        return None
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 1 << 63 for value in values):
        raise TypeError(values)
    return values


def floats(values) -> list[float] | None:
    """A list of logprobs, or None for none; what is no finite number, null included, is NaN. Raises TypeError."""
    if values is None:
        return None
    if not isinstance(values, list) or not all(type(value) in (int, float, type(None)) for value in values):
        raise TypeError(values)
    return [float(value) if value is not None and math.isfinite(value) else math.nan for value in values]


def quote(answer) -> str:
    """The beginning of an answer, on one line."""
    return printable(json.dumps(answer))
