"""What the ladder prints: progress while it runs, the DCP1 answers, one table row per rung and class, a verdict.

It does not: run anything or judge an answer (ladder.py).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

HEAD = 44  # characters of an answer that a row shows
MEMORY = {
    "previous": "another request's rows",
    "zeros": "zeros",
    "noise": "seeded noise",
}


@contextmanager
def progress() -> Iterator[Callable[[str, str, int, int], None]]:
    """A bar on a terminal, else one line per run, on standard error; yields what ladder.run reports to."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task, seen = bar.add_task("loading", total=None), set()

    def report(rung: str, prompt_class: str, done: int, total: int) -> None:
        if (rung, prompt_class) not in seen and not console.is_terminal:
            print(f"{rung}: {prompt_class} tokens", file=sys.stderr, flush=True)
        seen.add((rung, prompt_class))
        bar.update(task, description=f"{rung:16}  {prompt_class:>9} tokens", completed=done, total=total)

    with bar:
        yield report


def show(rows, prompts: int, setup, ok: bool) -> None:
    """Print the whole ladder on standard output."""
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(f"TP{setup.tp}/DCP{setup.dcp} against TP{setup.tp}/DCP1 on {setup.device}. ", end="")
    console.print(f"Memory that a broken kernel leaves unwritten holds {MEMORY[setup.stale]}.\n")
    for row in rows:
        if row.rung == "DCP1":
            console.print(f"DCP1, {row.prompt_class} tokens: {row.answers[0].text}", markup=False)
    console.print()
    console.print(table(rows, prompts))
    console.print(verdict(rows, prompts, setup, ok), style="green" if ok else "red")


def table(rows, prompts: int) -> Table:
    """One line per rung and class: the first prompt's answer, and how many of all prompts are right and equal."""
    grid = Table()
    for name in ("rung", "tokens", "answer", "right", "equal to DCP1", "commonest", "SHA256 of the tokens"):
        grid.add_column(name, no_wrap=name != "answer")
    last = None
    for row in rows:
        if last not in (None, row.rung):
            grid.add_section()
        grid.add_row("" if row.rung == last else row.rung, row.prompt_class, *cells(row, prompts))
        last = row.rung
    return grid


def cells(row, prompts: int) -> tuple[str, ...]:
    """Columns from the answer on."""
    if row.failure:
        return row.failure, "no", "no answer", "", ""
    first = row.answers[0]
    right, equal = ("yes" if first.right else "no"), equality(row)
    if prompts > 1:
        right, equal = f"{row.right}/{prompts}", f"{row.equal}/{prompts}"
    text = first.text if len(first.text) <= HEAD else first.text[: HEAD - 3] + "..."
    return text, right, equal, f"{first.commonest_share:.0%}", first.sha256[:16]


def equality(row) -> str:
    """`yes`, or where the first prompt's tokens part from DCP1's."""
    first = row.answers[0].first_difference
    return "yes" if first is None else f"differs at token {first}"


def verdict(rows, prompts: int, setup, ok: bool) -> str:
    """The last line."""
    of = lambda rung: [row for row in rows if row.rung == rung]  # noqa: E731
    first, last = of("unpatched"), of("+workspace")
    counts = [f"{sum(row.equal for row in part)} of {prompts * len(part)}" for part in (first, last)]
    outcome = "Broken as reported, repaired byte for byte" if ok else "NOT the expected picture"
    of_answers = f"in {counts[0]} answers unpatched, and in {counts[1]} with all four fixes"
    return f"{outcome}: DCP{setup.dcp} equals DCP1 {of_answers}."


def as_json(rows, prompts: int, setup, ok: bool) -> dict:
    """The same content for a file."""
    return {
        "tp": setup.tp,
        "dcp": setup.dcp,
        "device": str(setup.device),
        "stale": setup.stale,
        "prompts": prompts,
        "rows": [asdict(row) | {"right": row.right, "equal": row.equal} for row in rows],
        "repaired": ok,
        "verdict": verdict(rows, prompts, setup, ok),
    }
