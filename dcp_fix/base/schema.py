"""Schemas of what comes from outside, by pydantic: allowed values in one table, one line for every error.

    class Person(Schema):
        age: int = allowed("an age in years, 0 .. 150", ge=0, le=150)

    checked(Person, {"age": "old"}, "people.json")
    UserError: people.json: age is "old"; allowed: an age in years, 0 .. 150

Strict: no string is taken for a number, no 3.0 for an int, no True for 1. What a schema does not name is refused, or
let pass where the class says `extra="ignore"`.
"""

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dcp_fix.base.errors import UserError, shown

MOST_LINES = 20  # errors that are listed
LONGEST_VALUE = 60  # characters of a value that a line shows


class Schema(BaseModel):
    """A strict object that cannot be changed, of the fields that it names and no other."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


Kind = TypeVar("Kind", bound=BaseModel)


def allowed(words: str, default: Any = ..., **limits) -> Any:
    """A field whose allowed values are `words`, as an error line says them; `limits` are pydantic's (ge, le, ...)."""
    return Field(default, description=words, **limits)


def checked(schema: type[Kind], value: object, name: str, error: type[UserError] = UserError) -> Kind:
    """`value`, which came from `name`, as a `schema`. Raises `error`, a line for each thing that is wrong."""
    try:
        return schema.model_validate(value)
    except ValidationError as found:
        raise error("\n".join(lines(schema, found, name))) from None


def lines(schema: type[BaseModel], found: ValidationError, name: str) -> list[str]:
    """What is wrong: file, field, value, what is allowed.

    One line for a field, however many of its forms failed, and none for a list of which an item is named.
    """
    said: dict[tuple, list[str]] = {}
    for error in found.errors(include_url=False):
        field = field_of(schema, error["loc"])
        said.setdefault(field, sentences(schema, error, field))
    whole = {field for field in said if any(other != field and other[: len(field)] == field for other in said)}
    every = [f"{name}: {text}" for field, texts in said.items() if field not in whole for text in texts]
    more = [f"{name}: and {len(every) - MOST_LINES} more errors"] if len(every) > MOST_LINES else []
    return every[:MOST_LINES] + more


def sentences(schema: type[BaseModel], error, field: tuple) -> list[str]:
    """One error, without the file's name; several, if a validator of our own found them and named the fields itself."""
    where, words = ".".join(shown(part, LONGEST_VALUE) for part in field), words_of(schema, field)
    if error["type"] == "value_error":
        return str(error["ctx"]["error"]).split("\n")
    if error["type"] == "missing":
        return [f"lacks {where}; allowed: {words or error['msg']}"]
    if error["type"] == "extra_forbidden":
        return [f"{where} is not known here, so it would count for nothing; remove it if it should"]
    value, words = shown(as_json(error["input"]), LONGEST_VALUE), words if field else "an object"
    said = f"; allowed: {words}" if words else f": {error['msg'][:1].lower()}{error['msg'][1:]}"
    return [f"{where or 'the file'} is {value}{said}"]


def as_json(value: object) -> str:
    """A value as its file has it."""
    return json.dumps(value, ensure_ascii=False, default=repr)


def field_of(schema: type[BaseModel], place: tuple) -> tuple:
    """The part of a place that names fields of the schema and items of lists: pydantic adds the forms of a union."""
    found = []
    for part in place:
        if isinstance(part, str) and schema is not None and part in schema.model_fields:
            found.append(part)
            schema = inner(schema, part)
        elif isinstance(part, int) or not found:
            found.append(part)
        elif schema is not None:  # a field that the inner object does not have
            found.append(part)
    return tuple(found)


def inner(schema: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The schema of a field that is an object or a list of them."""
    kind = schema.model_fields[name].annotation
    for candidate in (kind, *getattr(kind, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def words_of(schema: type[BaseModel] | None, field: tuple) -> str | None:
    """What the innermost named field allows, in words."""
    words = None
    for part in field:
        if schema is None or part not in schema.model_fields:
            continue
        words, schema = schema.model_fields[part].description, inner(schema, part)
    return words
