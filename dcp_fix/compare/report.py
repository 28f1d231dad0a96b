"""What compare prints: progress while it asks, one table line per prompt and endpoint, what differs, a verdict; JSON.

It does not: ask or judge (compare.py).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dcp_fix.base import equality
from dcp_fix.base.errors import escaped, shown

HEAD = 60  # characters of an answer that the table shows
SHOWN = 6  # rows of a paired test that are shown
PARTLY = 0.7  # of the part to be cached: only whole blocks are, and under DCP a block holds that of every rank


@contextmanager
def progress(requests: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, else one line per request, on standard error; yields what compare.run reports to."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("", total=requests, completed=-1)

    def report(what: str) -> None:
        if not console.is_terminal:
            print(what, file=sys.stderr, flush=True)
        bar.update(task, description=what, advance=1)

    with bar:
        yield report


def show(result) -> None:
    """Print everything on standard output."""
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    if not result.rows:
        return
    console.print(f"{result.a}\n{result.b}\nmodel {escaped(result.model)}\n", soft_wrap=True)
    shown_rows = [row for row in result.rows if not row.equal][:SHOWN] if result.pairs else result.rows
    if shown_rows:
        console.print(table(shown_rows))
    for row in shown_rows:
        console.print(sentence(row), style="green" if row.equal else "red", soft_wrap=True)
    equal = sum(row.equal for row in result.rows)
    of = f"{equal} of {len(result.rows)} prompts are answered alike; compared: {result.compared}"
    console.print(f"\n{result.verdict.capitalize()}: {of}.", soft_wrap=True)
    if result.paired:
        console.print(paired(result.paired), soft_wrap=True)


def paired(test) -> str:
    """The paired test on one line."""
    return (
        f"Of {test.prompts} prompts A and B differ on {test.differ}, A from itself on {test.noise_a}, "
        f"B on {test.noise_b}; {test.for_difference} speak for a difference, {test.for_noise} for noise: "
        f"McNemar p = {test.p:.3g}."
    )


def saved(endpoint, path) -> None:
    """What to do with answers that were kept."""
    print(f"{endpoint}: answers kept in {path}; now serve the other one, and: dcp-fix compare --a {path} --b URL")


def table(rows) -> Table:
    """A line per prompt and endpoint."""
    grid = Table()
    for name in ("prompt", "tokens sent", "", "answer", "SHA256 of the text", "SHA256 of the token ids"):
        grid.add_column(name, no_wrap=name != "answer")
    for row in rows:
        for name, answer in (("A", row.a), ("B", row.b)):
            sent = f"{answer.prompt_tokens}{cached(answer)}"
            digests = (short(digest) for digest in digests_of(answer))
            grid.add_row(row.prompt.name if name == "A" else "", sent, name, shown(answer.text, HEAD), *digests)
        grid.add_section()
    return grid


def sentence(row) -> str:
    """What is equal and what differs, on one line."""
    parts = [
        f"text differs at byte {row.text_difference}"
        if row.text_difference is not None
        else f"text equal ({len(row.a.encoded)} bytes)"
    ]
    if not row.ids:
        lacking = [
            f"{name} offers {answer.ids_missing or 'none'}"
            for name, answer in (("A", row.a), ("B", row.b))
            if answer.token_ids is None
        ]
        parts.append(f"token ids not compared ({', '.join(lacking)})")
    elif row.token_difference is None:
        parts.append(f"token ids equal ({len(row.a.token_ids)})")
    else:
        at = row.token_difference
        there = [ids[at] if at < len(ids) else "no more" for ids in (row.a.token_ids, row.b.token_ids)]
        parts.append(f"token ids differ at token {at} (A {there[0]}, B {there[1]})")
    return f"{row.prompt.name}: {'; '.join([*parts, logprobs_sentence(row.logprobs), *cache_misses(row)])}"


def cache_misses(row) -> list[str]:
    """What to say of a prompt that is not of the class that it stands for; nothing where an endpoint does not tell."""
    found = []
    for number, (name, answer) in enumerate((("A", row.a), ("B", row.b))):
        answers = [answer, row.again[number]] if row.again else [answer]
        cached = [one.cached_tokens for one in answers if one.cached_tokens is not None]
        if not cached:
            continue
        words = len(row.prompt.prefix.split()) / max(1, len(row.prompt.text.split())) * answer.prompt_tokens
        if not row.prompt.prefix and max(cached) > 0:
            found.append(f"{name} had {max(cached)} tokens cached under a new salt: it ignores cache_salt")
        elif row.prompt.prefix and min(cached) == 0:
            found.append(f"NOT cached at {name}: is prefix caching on?")
        elif row.prompt.prefix and min(cached) < PARTLY * words:
            found.append(f"only {min(cached)} of about {words:.0f} tokens cached at {name}")
    return found


def logprobs_sentence(logprobs) -> str:
    """How far the logprobs of the tokens in common are apart."""
    if logprobs.missing:
        return f"logprobs not compared ({logprobs.missing})"
    apart = "identical" if logprobs.identical else f"at most {logprobs.largest:.3g} apart"
    odd = "".join(
        f", of which {count} no numbers in {name}"
        for name, count in zip("AB", logprobs.not_numbers, strict=True)
        if count
    )
    return f"logprobs of {logprobs.count} tokens{odd} {apart}"


def cached(answer) -> str:
    """How many tokens the prefix cache had, where the endpoint says so."""
    return "" if answer.cached_tokens is None else f" ({answer.cached_tokens} cached)"


def digests_of(answer) -> tuple[str, str | None]:
    """SHA256 of the text's UTF-8 bytes and of the token ids (as int64), if there are any."""
    ids = answer.token_ids
    return equality.digest(answer.encoded), None if ids is None else equality.digest(ids)


def short(digest: str | None) -> str:
    """As much of a digest as a table has room for."""
    return digest[:16] if digest else "not offered"


def as_json(result) -> dict:
    """The same content, whole, for a file."""
    return {
        "a": str(result.a),
        "b": str(result.b),
        "model": result.model,
        "compared": result.compared if result.rows else None,
        "rows": [row_as_json(row) for row in result.rows],
        "paired": asdict(result.paired) if result.paired else None,
        "verdict": result.verdict,
        "error": result.error,
    }


def row_as_json(row) -> dict:
    """One prompt."""
    return {
        "prompt_class": row.prompt.name,
        "prompt_sha256": equality.digest(row.prompt.text.encode()),
        "equal": row.equal,
        "text_difference": row.text_difference,
        "token_difference": row.token_difference,
        "logprobs": asdict(row.logprobs),
        "a": answer_as_json(row.a),
        "b": answer_as_json(row.b),
    }


def answer_as_json(answer) -> dict:
    """One answer with its digests; a logprob that is no number is null."""
    text_sha256, tokens_sha256 = digests_of(answer)
    fields = answer.model_dump(exclude={"prompt_ids"})  # long, and the same on both sides
    return fields | {"text_sha256": text_sha256, "tokens_sha256": tokens_sha256}
