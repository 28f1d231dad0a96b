"""What the ladder prints: each row as it comes, a table to each prompt class, then a verdict; a bar on a terminal.

It does not: run anything or judge an answer (ladder.py).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from dcp_fix.base.errors import UserError
from dcp_fix.base.process import printed

SHA_HEAD = 8  # hexadecimal digits of a digest that a row shows
NARROW = {"rung": 16, "right": 8, "= DCP1": 8, "SHA256": SHA_HEAD}  # columns; the answer gets what is left
NOTE = "= DCP1: yes, or the first token that differs. Equal tokens have equal digests."
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
    bar = Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal,
        redirect_stdout=sys.stdout.isatty(),  # what is printed meanwhile stands above the bar, but a pipe keeps it
    )  # fmt: skip
    task, seen = bar.add_task("loading", total=None), set()

    def report(rung: str, prompt_class: str, done: int, total: int) -> None:
        if (rung, prompt_class) not in seen and not console.is_terminal:
            print(f"{rung}: {prompt_class} tokens", file=sys.stderr, flush=True)
        seen.add((rung, prompt_class))
        bar.update(task, description=f"{rung:16}  {prompt_class:>9} tokens", completed=done, total=total)

    with bar:
        yield report


class Screen:
    """Standard output while the ladder is climbed; `silent` where it must hold the record and nothing else.

    An output that cannot be written does not stop the run: the record comes first, and then `end` says so.
    """

    def __init__(self, setup, prompts: int, silent: bool) -> None:
        self.setup, self.prompts, self.silent = setup, prompts, silent
        self.width = Console().width if sys.stdout.isatty() else WIDTH
        self.lost: UserError | None = None
        self.say(f"TP{setup.tp}/DCP{setup.dcp} against TP{setup.tp}/DCP1 on {setup.device}.")
        self.say(f"Rows that a broken kernel leaves unwritten hold {MEMORY[setup.stale]}.")

    def say(self, text: str) -> None:
        """Print a line now, also into a pipe."""
        try:
            if not self.silent:
                printed(print, text)
        except UserError as error:
            self.lost = error

    def row(self, row) -> None:
        """Print a row, under the heading of its class if it is DCP1's."""
        if row.rung == "DCP1":
            columns = ("answer", *list(NARROW)[1:])
            self.say(f"\n{row.prompt_class} tokens\n{line('rung', columns, self.width)}")
        self.say(line(row.rung, cells(row, self.prompts), self.width))

    def end(self, rows, ok: bool) -> None:
        """Print the verdict. Raises UserError if something could not be printed."""
        self.say(f"\n{NOTE}\n{verdict(rows, self.prompts, self.setup, ok)}")
        if self.lost:
            raise self.lost


def line(rung: str, cells: tuple[str, ...], width: int) -> str:
    """One line of the table, `width` characters at most; a row without further columns is not cut."""
    first, *rest = cells
    if not rest:
        return f"{rung:{NARROW['rung']}}  {first}"
    room = max(len("answer"), width - sum(NARROW.values()) - 2 * len(NARROW))
    first = first if len(first) <= room else first[: room - 1] + "…"
    right, equal, digest = rest
    return f"{rung:16}  {first:{room}}  {right:8}  {equal:8}  {digest}"


def cells(row, prompts: int) -> tuple[str, ...]:
    """Columns from the answer on, the first prompt's; how many of all are right and equal. Or why there is none."""
    if row.failure:
        return (f"none: {row.failure}",)
    first = row.answers[0]
    right, equal = ("yes" if first.right else "no"), equality(first.first_difference)
    if prompts > 1:
        right, equal = f"{row.right} of {prompts}", f"{row.equal} of {prompts}"
    return first.text, right, equal, first.sha256[:SHA_HEAD]


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
