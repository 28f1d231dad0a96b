"""Answers of one endpoint in a file, for hosts with room for one server at a time.

The file says what was asked: SHA256 of every prompt, model, sampling. A comparison that asks anything else is refused.
"""

import hashlib
import json
import math
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dcp_fix.errors import UserError
from dcp_fix.evidence import records
from dcp_fix.vllm.answers import Completion
from dcp_fix.vllm.endpoint import EndpointError
from dcp_fix.vllm.printable import printable

FORMAT = "dcp-fix compare, answers 1"
LONGEST = 1 << 26  # bytes of a file


class SavedAnswers(BaseModel):
    """Two answers to one prompt; `prompt` is its digest."""

    model_config = ConfigDict(extra="forbid")
    prompt: str
    first: Completion
    again: Completion


class Content(BaseModel):
    """What a file holds."""

    model_config = ConfigDict(extra="forbid")
    format: str = Field(pattern="^" + FORMAT + "$")
    endpoint: str
    model: str
    pairs: int | None
    sampling: dict[str, bool | int | float]
    counting: Completion
    answers: dict[str, SavedAnswers]


class Saved:
    """Answers that stand in for the endpoint `name`."""

    def __init__(self, name: str, path: Path | None, content: Content):
        self.name, self.path, self.content, self.counting = name, path, content, content.counting

    def __str__(self) -> str:
        return f"{printable(str(self.path))} (answers of {self.content.endpoint})"

    @classmethod
    def of(
        cls, endpoint, model: str, pairs: int | None, sampling: dict, counting: Completion, answers: dict
    ) -> "Saved":
        """Answers that were just given."""
        values = dict(endpoint=str(endpoint), model=model, pairs=pairs, sampling=sampling, counting=counting)
        return cls(endpoint.name, None, Content(format=FORMAT, answers=answers, **values))

    @classmethod
    def load(cls, name: str, path: Path) -> "Saved":
        """Read a file. Raises UserError that names the file, the field, and what is wrong with it."""
        shown = f"endpoint {name}: {printable(str(path))}"
        try:
            if not path.is_file():
                raise UserError(
                    f"{shown}: no such file; make it with `dcp-fix compare --a URL --save {path.name[:80]}`"
                )
            with open(path, "rb") as file:
                text = file.read(LONGEST)
            return cls(name, path, Content.model_validate(with_nan(json.loads(text))))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the whole file"
            raise UserError(f"{shown}: {printable(where)}: {printable(first['msg'])}; save the answers anew") from None
        except UserError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{shown}: no saved answers ({printable(str(error), 120)})") from None

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises UserError."""
        try:
            records.write_json(path, without_nan(self.content.model_dump()))
        except OSError as error:
            raise UserError(f"--save {printable(str(path))}: {error.strerror or error}") from error

    def models(self) -> list[str]:
        """The model that answered."""
        return [self.content.model]

    def check(self, pairs: int | None, sampling: dict) -> None:
        """Raise UserError unless what was asked then is what is asked now."""
        if self.content.sampling != sampling:
            raise UserError(
                f"{self}: asked with other sampling, {self.content.sampling} instead of {sampling}; save it anew"
            )
        if self.content.pairs != pairs:
            then, now = (f"--pairs {n}" if n else "without --pairs" for n in (self.content.pairs, pairs))
            raise UserError(f"{self}: saved {then}, and this comparison is {now}; let both be the same")

    def answers_to(self, prompt) -> tuple[Completion, Completion]:
        """Both answers to that very prompt. Raises EndpointError if another one was asked."""
        saved = self.content.answers.get(prompt.name)
        if saved is None or saved.prompt != digest(prompt):
            raise EndpointError(f"{self}: its prompt {prompt.name} is another one; save the answers anew")
        return saved.first, saved.again


def digest(prompt) -> str:
    """SHA256 of a prompt and of the part of it that was cached first."""
    return hashlib.sha256(f"{len(prompt.prefix)}:{prompt.text}".encode()).hexdigest()


def without_nan(value):
    """A copy in which a logprob that is no number is null, and text that UTF-8 lacks is kept by its escapes."""
    if isinstance(value, dict):
        return {key: without_nan(one) for key, one in value.items()}
    if isinstance(value, list):
        return [None if isinstance(one, float) and math.isnan(one) else without_nan(one) for one in value]
    return value


def with_nan(value):
    """The same, back: null among logprobs is NaN."""
    if isinstance(value, dict):
        numbers = value.get("logprobs")
        restored = {"logprobs": [math.nan if n is None else n for n in numbers]} if isinstance(numbers, list) else {}
        return {key: with_nan(one) for key, one in value.items()} | restored
    return value
