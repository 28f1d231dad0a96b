"""What the ladder in real vLLM prints and records: progress while it boots, a row per rung and class, a verdict.

It does not: boot anything or judge an answer (boot.py, rows.py).
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from dcp_fix.ladder import report as ladder_report
from dcp_fix.real_vllm import rows as real_rows
from dcp_fix.real_vllm import rungs as real_rungs

HEADER = ("rung", "tokens", "answer", "right", "= DCP1", "logprobs", "NaN", "SHA256")
NOTE = (
    "= DCP1: yes, or the first token that differs. logprobs: the largest difference from DCP1's over the leading equal "
    "tokens. NaN: answers with a logprob that is no number. batch: all prompts at once."
)
SIGN_OF_LIFE_S = 30.0  # between two lines where no terminal shows a spinner
ORDER = (real_rungs.REFERENCE, real_rungs.INSTALLED, real_rungs.WORKAROUND, *real_rungs.CLIMBED)


@contextmanager
def progress(rung: str, total: int, log: Path) -> Iterator[Callable[[dict | None], None]]:
    """A spinner on a terminal, else a line now and then, on standard error; yields what real_boot.boot reports to."""
    console = Console(stderr=True, highlight=False)
    state = Progress(rung, total)
    line = partial(print, file=sys.stderr, flush=True)
    line(f"{rung}: booting vLLM, log in {log}")
    with console.status(state.text()) as spinner:

        def report(event: dict | None) -> None:
            state.take(event)
            spinner.update(state.text())
            if not console.is_terminal and state.due():
                line(state.text())

        yield report
    line(f"{rung}: {state.done} of {total} answers after {state.seconds:.0f} s")


class Progress:
    """How far one boot is."""

    def __init__(self, rung: str, total: int):
        self.rung, self.total, self.done, self.booted = rung, total, 0, False
        self.began = self.said = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.began

    def take(self, event: dict | None) -> None:
        """Count an event."""
        kind = event and event["event"]
        self.booted |= kind == "booted"
        self.done += kind == "answer"

    def text(self) -> str:
        """One line."""
        what = f"{self.done} of {self.total} answers" if self.booted else "vLLM boots"
        return f"{self.rung}: {what}, {self.seconds:.0f} s"

    def due(self) -> bool:
        """Whether it is time for another line."""
        due = time.monotonic() - self.said > SIGN_OF_LIFE_S
        if due:
            self.said = time.monotonic()
        return due


# --- the result -------------------------------------------------------------------------------------------------------


def show(climbed) -> None:
    """Print the whole ladder on standard output."""
    settings, rows = climbed.settings, ordered(climbed.rows)
    width = None if sys.stdout.isatty() else ladder_report.WIDTH
    console = Console(width=width, highlight=False, markup=False)
    say = partial(console.print, soft_wrap=True)
    say(f"{title(climbed)}\n")
    for row in rows:
        if row.rung == real_rungs.REFERENCE and row.answers and not row.batch:
            say(f"DCP1, {row.prompt_class} tokens: {row.answers[0].text}")
    lines = [(row.rung, label(row), *cells(row, settings.prompts)) for row in rows]
    console.print(ladder_report.grid(HEADER, lines, console.width))
    say(NOTE)
    for failure in dict.fromkeys(f"No answer at {row.rung}: {row.failure}." for row in rows if row.failure):
        say(failure)
    say(f"\n{verdict(climbed)}", style="green" if climbed.ok else "red")


def title(climbed) -> str:
    """What was compared with what."""
    settings = climbed.settings
    pcp = f"/PCP{settings.pcp}" if settings.pcp > 1 else ""
    how = "CUDA graphs" if settings.cuda_graphs else "eager"
    model = settings.model or "this package's checkpoint"
    sizes = f"TP{settings.tp}{pcp}/DCP{settings.dcp} against TP{settings.tp}/DCP1"
    return f"vLLM {climbed.found['vllm']}, {model}: {sizes}, {how}."


def ordered(rows: list) -> list:
    """By rung as the ladder is climbed, whatever the order in which they were run."""

    def place(row) -> int:
        if row.rung == real_rungs.PLUGIN:
            return len(ORDER) + 1
        return ORDER.index(row.rung) if row.rung in ORDER else len(ORDER)

    return sorted(rows, key=place)


def label(row) -> str:
    """Its prompt class and way of asking."""
    return f"{row.prompt_class} batch" if row.batch else row.prompt_class


def cells(row, prompts: int) -> tuple[str, ...]:
    """Columns from the answer on. Without an answer, why there is none."""
    if row.failure or not row.answers:
        return f"none: {row.failure}", "no", "no", "", "", ""
    first, apart = row.answers[0], row.logprob_difference
    right, equal = ("yes" if first.right else "no"), ladder_report.equality(first.first_difference)
    if prompts > 1:
        right, equal = f"{row.right} of {prompts}", f"{row.equal} of {prompts}"
    logprobs = "" if apart is None else f"{apart:.1e}"
    return first.text, right, equal, logprobs, str(row.nan or ""), first.sha256[: ladder_report.SHA_HEAD]


def count(rows: list, rung: str, what: str, prompts: int) -> str:
    """`5 of 11` over all rows of a rung; `what` is right or equal."""
    own = [row for row in rows if row.rung == rung]
    return f"{sum(getattr(row, what) for row in own)} of {prompts * len(own)}"


def verdict(climbed) -> str:
    """The last line."""
    rows, settings, prompts = climbed.rows, climbed.settings, climbed.settings.prompts
    counts = {rung: count(rows, rung, "equal", prompts) for rung in dict.fromkeys(row.rung for row in ordered(rows))}
    counts.pop(real_rungs.REFERENCE, None)
    said = "; ".join(f"{number} {rung}" for rung, number in counts.items())
    return f"{outcome(climbed)}: answers of DCP{settings.dcp} equal to DCP1's: {said or 'none were asked for'}."


def outcome(climbed) -> str:
    """The verdict in a few words."""
    rungs = {row.rung for row in climbed.rows}
    broken = real_rows.broken(climbed.rows, climbed.settings.prompts)
    if climbed.ok:
        return f"Wrong {', '.join(broken)}, right with the plugin"
    if broken and real_rungs.PLUGIN not in rungs:
        return f"Wrong {', '.join(broken)}; the plugin was not tried"
    if not broken and real_rungs.INSTALLED in rungs:
        return "Healthy as installed"
    return "NOT the expected picture"


def as_json(climbed) -> dict:
    """The same content for a file."""
    rows = ordered(climbed.rows)
    return {
        "engine": f"vLLM {climbed.found['vllm']}",
        "tp": climbed.settings.tp,
        "dcp": climbed.settings.dcp,
        "prompts": climbed.settings.prompts,
        "terms": climbed.terms,
        "nccl": without_folders(climbed.found["nccl"]),
        "boots": climbed.boots,
        "rows": [asdict(row) | {"right": row.right, "equal": row.equal, "nan": row.nan} for row in rows],
        "repaired": climbed.ok,
        "verdict": verdict(climbed),
    }


def without_folders(nccl: dict | None) -> dict | None:
    """Both NCCL libraries by name and version: where they lie is the host's own business."""
    return nccl and {name: one | {"path": one["path"] and Path(one["path"]).name} for name, one in nccl.items()}
