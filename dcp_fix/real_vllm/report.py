"""What the ladder in real vLLM prints and records: each rung's rows as they come, then a verdict.

It does not: boot anything or judge an answer (boot.py, rows.py).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from dcp_fix.base.errors import escaped
from dcp_fix.real_vllm.rows import RungRow, broken, repaired
from dcp_fix.real_vllm.rungs import INSTALLED, PLUGIN, REFERENCE, Settings

LINE = "{:18.18}  {:15.15}  {:40.40}  {:8}  {:8}  {:8}  {:3}  {:8.8}"
HEADER = ("rung", "tokens", "answer", "right", "= DCP1", "logprobs", "NaN", "SHA256")
NOTE = (
    "= DCP1: yes, or the first token that differs. logprobs: the largest difference from DCP1's over the leading equal "
    "tokens. NaN: answers with a logprob that is no number. batch: all prompts at once."
)


@contextmanager
def booting(rung: str, log: Path) -> Iterator[None]:
    """Says on standard error that a boot is under way, which takes minutes; a spinner on a terminal."""
    print(f"{rung}: booting vLLM, log in {log}", file=sys.stderr, flush=True)
    with Console(stderr=True).status(f"{rung}: vLLM boots and works"):
        yield


def say(text: str = "", style: str | None = None) -> None:
    """A line on standard output, in which nothing means more than it says."""
    Console(highlight=False, markup=False).print(escaped(text), style=style, soft_wrap=True)


def show_title(settings: Settings, vllm: str) -> None:
    """What is compared with what, and the head of the table."""
    pcp = f"/PCP{settings.pcp}" if settings.pcp > 1 else ""
    sizes = f"TP{settings.tp}{pcp}/DCP{settings.dcp} against TP{settings.tp}/DCP1"
    how = "CUDA graphs" if settings.cuda_graphs else "eager"
    say(f"vLLM {vllm}, {settings.model or 'a checkpoint of this package'}: {sizes}, {how}.")
    say()
    say(LINE.format(*HEADER).rstrip())


def show_rows(rows: list[RungRow]) -> None:
    """A line for each row; below them why there are no answers, if so."""
    for row in rows:
        tokens = f"{row.prompt_class} batch" if row.batch else row.prompt_class
        say(LINE.format(row.rung, tokens, *cells(row)).rstrip())
    for failure in dict.fromkeys(row.failure for row in rows if row.failure):
        say(f"No answer at {rows[0].rung}: {failure}.")


def cells(row: RungRow) -> tuple[str, ...]:
    """Columns from the answer on."""
    if not row.answers:
        return "none", "no", "no", "", "", ""
    first, prompts = row.answers[0], len(row.answers)
    right, equal = ("yes" if first.right else "no"), "yes"
    if first.first_difference is not None:
        equal = f"token {first.first_difference}"
    if prompts > 1:
        right, equal = f"{row.right} of {prompts}", f"{row.equal} of {prompts}"
    apart = [a.logprob_difference for a in row.answers if a.logprob_difference is not None]
    return first.text, right, equal, f"{max(apart):.1e}" if apart else "", str(row.nan or ""), first.sha256


def show_verdict(ladder) -> None:
    """The note and the last line."""
    say(NOTE)
    say()
    say(verdict(ladder), style="green" if ladder.ok else "red")


def verdict(ladder) -> str:
    """The last line: the outcome, and how many answers of each rung are DCP1's."""
    counts = []
    for rung in dict.fromkeys(row.rung for row in ladder.rows if row.rung != REFERENCE):
        own = [row for row in ladder.rows if row.rung == rung]
        counts.append(f"{sum(row.equal for row in own)} of {ladder.settings.prompts * len(own)} {rung}")
    said = "; ".join(counts) or "none were asked for"
    return f"{outcome(ladder.rows)}: answers of DCP{ladder.settings.dcp} equal to DCP1's: {said}."


def outcome(rows: list[RungRow]) -> str:
    """The verdict in a few words."""
    rungs, wrong = {row.rung for row in rows}, broken(rows)
    if repaired(rows):
        return f"Wrong {', '.join(wrong)}, right with the plugin"
    if wrong and PLUGIN not in rungs:
        return f"Wrong {', '.join(wrong)}; the plugin was not tried"
    if all(row.whole for row in rows):
        return "Healthy as installed" if INSTALLED in rungs else "Nothing differs"
    return "NOT the expected picture"


def as_json(ladder) -> dict:
    """The same content for a file."""
    return {
        "engine": f"vLLM {ladder.vllm}",
        "tp": ladder.settings.tp,
        "dcp": ladder.settings.dcp,
        "prompts": ladder.settings.prompts,
        "terms": ladder.terms,
        "boots": ladder.boots,
        "rows": [row_json(row) for row in ladder.rows],
        "repaired": repaired(ladder.rows),
        "verdict": verdict(ladder),
    }


def row_json(row: RungRow) -> dict:
    """A row and its counts."""
    return asdict(row) | {"right": row.right, "equal": row.equal, "nan": row.nan}
