"""What the ladder prints: progress while it runs, the DCP1 answers, one table row per rung and class, a verdict.

It does not: run anything or judge an answer (ladder.py).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

SHA_HEAD = 8  # hexadecimal digits of a digest that a row shows
HEADER = ("rung", "tokens", "answer", "right", "= DCP1", "share", "SHA256")
TABLE_NOTE = "= DCP1: yes, or the first token that differs. share: of the commonest token, which measures no repair."
WIDTH = 120  # of the printed ladder where no terminal says otherwise
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
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False)
    say = partial(console.print, soft_wrap=True)
    say(f"TP{setup.tp}/DCP{setup.dcp} against TP{setup.tp}/DCP1 on {setup.device}.")
    say(f"Rows that a broken kernel leaves unwritten hold {MEMORY[setup.stale]}.\n")
    for row in rows:
        if row.rung == "DCP1":
            say(f"DCP1, {row.prompt_class} tokens: {row.answers[0].text}")
    console.print(table(rows, prompts, console.width))
    say(TABLE_NOTE)
    for row in rows:
        if row.failure:
            say(f"No answer at {row.rung}, {row.prompt_class} tokens: {row.failure}.")
    say(f"\n{verdict(rows, prompts, setup, ok)}", style="green" if ok else "red")


def table(rows, prompts: int, width: int) -> Table:
    """One line per rung and class: the first prompt's answer, and how many of all prompts are right and equal."""
    return grid(HEADER, [(row.rung, row.prompt_class, *cells(row, prompts)) for row in rows], width)


def grid(header: tuple[str, ...], lines: list[tuple[str, ...]], width: int) -> Table:
    """Lines that begin with their rung, said once; the column `answer` takes what is left of `width`."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    answer = header.index("answer")
    widths[answer] = max(len("answer"), width - sum(w + 2 for i, w in enumerate(widths) if i != answer) - 3)
    drawn = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, wide in zip(header, widths, strict=True):
        drawn.add_column(name, no_wrap=True, overflow="ellipsis", width=wide)
    last = None
    for rung, *rest in lines:
        if last not in (None, rung):
            drawn.add_section()
        drawn.add_row("" if rung == last else rung, *rest)
        last = rung
    return drawn


def cells(row, prompts: int) -> tuple[str, ...]:
    """Columns from the answer on. Without an answer, why there is none."""
    if row.failure:
        return f"none: {row.failure}", "no", "no", "", ""
    first = row.answers[0]
    right, equal = ("yes" if first.right else "no"), equality(first.first_difference)
    if prompts > 1:
        right, equal = f"{row.right} of {prompts}", f"{row.equal} of {prompts}"
    return first.text, right, equal, f"{first.commonest_share:.0%}", first.sha256[:SHA_HEAD]


def equality(first_difference: int | None) -> str:
    """`yes`, or the index of the first token that is not DCP1's."""
    return "yes" if first_difference is None else f"token {first_difference}"


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
