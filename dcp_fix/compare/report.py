"""What compare prints: for each prompt what is equal and what differs, then a verdict; and the same as JSON."""

import math
from dataclasses import asdict
from pathlib import Path

from dcp_fix.base import equality
from dcp_fix.base.errors import escaped, shown
from dcp_fix.compare.compare import Comparison, Logprobs, Row, mcnemar
from dcp_fix.compare.endpoint import Endpoint

HEAD = 60  # characters of an answer that are shown
SHOWN = 6  # rows of a paired test that are shown


def show_saved(endpoint: Endpoint, path: Path) -> None:
    """What to do with answers that were kept."""
    print(f"{endpoint}: answers kept in {path}; now serve the other one, and: dcp-fix compare --a {path} --b URL")


def show(result: Comparison) -> None:
    """Print everything on standard output."""
    print(f"A: {result.a}\nB: {result.b}\nmodel {escaped(result.model)}\n")
    for row in [row for row in result.rows if not row.equal][:SHOWN] if result.pairs else result.rows:
        print(sentence(row))
        for name, one in row.sides:
            cached = "" if one.cached_tokens is None else f" ({one.cached_tokens} cached)"
            digest = equality.digest(one.encoded)[:16]
            print(f"    {name}: {one.prompt_tokens} tokens sent{cached}; SHA256 {digest}: {shown(one.text, HEAD)}")
    equal = sum(row.equal for row in result.rows)
    print(f"\n{result.verdict.capitalize()}: {equal} of {len(result.rows)} prompts are answered alike.")
    if result.pairs:
        different, noise = result.votes
        print(f"{different} speak for a difference, {noise} for noise: McNemar p = {mcnemar(different, noise):.3g}.")


def sentence(row: Row) -> str:
    """What is equal and what differs, on one line."""
    text = f"text equal ({len(row.a.encoded)} bytes)"
    if row.text_difference is not None:
        text = f"text differs at byte {row.text_difference}"
    return f"{row.prompt.name}: {'; '.join([text, ids(row), logprobs(row.logprobs)])}"


def ids(row: Row) -> str:
    """Whether the token ids are the same, or why they were not compared."""
    if missing := [f"{name} offers {why}" for name, one in row.sides if (why := one.lacking(one.token_ids))]:
        return f"token ids not compared ({'; '.join(missing)})"
    at = row.token_difference
    return f"token ids equal ({len(row.a.ids)})" if at is None else f"token ids differ at token {at}"


def logprobs(found: Logprobs) -> str:
    """How far the logprobs of the tokens in common are apart."""
    if found.missing:
        return f"logprobs not compared ({found.missing})"
    odd = f", {found.one_sided} of them NaN at one endpoint only," if found.one_sided else ""
    return f"logprobs of {found.count} tokens{odd} at most {found.largest:.3g} apart"


def as_json(result: Comparison) -> dict:
    """The same content, whole, for a file."""
    rows = [row_as_json(row) for row in result.rows]
    head = {"a": str(result.a), "b": str(result.b), "model": result.model, "verdict": result.verdict}
    return head | {"votes": result.votes if result.pairs else None, "rows": rows}


def row_as_json(row: Row) -> dict:
    """One prompt. A difference between logprobs that no float holds is text, since JSON has no infinity."""
    largest = row.logprobs.largest
    values = {name: getattr(row, name) for name in ("equal", "noisy", "text_difference", "token_difference")}
    values["logprobs"] = asdict(row.logprobs) | {"largest": largest if math.isfinite(largest) else str(largest)}
    return {"prompt_class": row.prompt.name} | values | {"a": row.a.model_dump(), "b": row.b.model_dump()}
