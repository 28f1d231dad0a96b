"""Answers of one endpoint in a file, for hosts with room for one server at a time.

The file says what was asked: SHA256 of every prompt, model, sampling. A comparison that asks anything else is refused.
"""

import hashlib
from pathlib import Path
from typing import Literal

from dcp_fix.base.bounded import MIB, read_json
from dcp_fix.base.errors import UserError, escaped, shown
from dcp_fix.base.schema import Schema, allowed, checked
from dcp_fix.compare.answers import Completion
from dcp_fix.compare.endpoint import EndpointError

FORMAT = "dcp-fix compare, answers 1"
LARGEST = 64 * MIB  # of a file


class SavedAnswers(Schema):
    """Two answers to one prompt; `prompt` is its digest."""

    prompt: str = allowed("a SHA256 in hexadecimal", pattern="^[0-9a-f]{64}$")
    first: Completion = allowed("an answer")
    again: Completion = allowed("an answer")


class Content(Schema):
    """What a file holds."""

    format: Literal["dcp-fix compare, answers 1"] = allowed(f'"{FORMAT}"')
    endpoint: str = allowed("a name")
    model: str = allowed("a name")
    pairs: int | None = allowed("a number of prompts from 1 on, or null", ge=1)
    sampling: dict[str, bool | int | float] = allowed("an object of numbers")
    counting: Completion = allowed("an answer")
    answers: dict[str, SavedAnswers] = allowed("an object: two answers for each prompt")


class Saved:
    """Answers that stand in for the endpoint `name`."""

    def __init__(self, name: str, path: Path | None, content: Content):
        self.name, self.path, self.content, self.counting = name, path, content, content.counting

    def __str__(self) -> str:
        return f"{shown(self.path)} (answers of {escaped(self.content.endpoint)})"

    @classmethod
    def of(
        cls, endpoint, model: str, pairs: int | None, sampling: dict, counting: Completion, answers: dict
    ) -> "Saved":
        """Answers that were just given."""
        values = dict(endpoint=str(endpoint), model=model, pairs=pairs, sampling=sampling, counting=counting)
        return cls(endpoint.name, None, Content(format=FORMAT, answers=answers, **values))

    @classmethod
    def load(cls, name: str, path: Path) -> "Saved":
        """Read a file. Raises UserError that names the file, the field, its value and what is allowed."""
        try:
            return cls(name, path, checked(Content, read_json(path, LARGEST), shown(path)))
        except FileNotFoundError:
            remedy = f"make it with `dcp-fix compare --a URL --save {shown(path.name, 80)}`"
            raise UserError(f"endpoint {name}: {shown(path)}: no such file; {remedy}") from None
        except UserError as error:
            raise UserError("\n".join(f"endpoint {name}: {line}" for line in str(error).split("\n"))) from None

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
