"""What `dcp-fix verify` prints and records: one row per DCP size and prompt, what was proved, what was not, a verdict.

It does not: run or compare anything (verify.py, forced.py).
"""

import math
import sys
from dataclasses import asdict

import torch
from rich.console import Console
from rich.table import Table

from dcp_fix.verify.steps import BOUNDS, STEPS
from dcp_fix.verify.sublayers import LONG

WIDTH = 100
LEGEND = """
ulp: one unit in the last place of the row's largest number (for logits: of the largest logit)
margin: by how much the chosen token's logit leads, at the closest step
forced: every sublayer on DCP1's input, step by step
"""


def show(report) -> None:
    """Print the whole report on standard output."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    settings = report.settings
    graphs = ", decode steps as CUDA graphs" if settings.cuda_graphs else ""
    plant = f", planted: {settings.plant}" if settings.plant else ""
    console.print(
        f"TP{settings.tp} on {place(report)}, ranks over {report.transport}, {settings.combine}{graphs}{plant}.\n"
    )
    console.print(table(report))
    if settings.logits:
        console.print(steps(report))
    console.print(LEGEND)
    for line in proved(report):
        console.print(line)
    console.print(verdict(report), style="green" if report.ok else "red")


def place(report) -> str:
    """The device of the ranks, or how many processes have which."""
    if report.transport == "threads":
        return report.devices[0]
    return ", ".join(f"{report.devices.count(name)} x {name}" for name in dict.fromkeys(report.devices))


def table(report) -> Table:
    """One line per prompt and DCP size: the free run, and the forced one beside it."""
    grid = Table()
    for name in ("prompt", "DCP", "tokens", "logits", "margin", "forced: parts from DCP1 at"):
        grid.add_column(name, overflow="fold")
    free = {(row.prompt_class, row.number, row.dcp): row for row in report.rows}
    forced = {(row.case, 0, row.dcp): row for row in report.forced}
    names = [*report.settings.classes, *(row.case for row in report.forced)]
    last = None
    for key in sorted(free | forced, key=lambda key: (names.index(key[0]), key[1:])):
        if last not in (None, key[:2]):
            grid.add_section()
        last = key[:2]
        grid.add_row(key[0], str(key[2]), *answer(free.get(key)), stepwise(forced.get(key), report.settings.dtype))
    return grid


def answer(row) -> tuple[str, str, str]:
    """The columns of a free run."""
    if row is None:
        return "-", "-", "-"
    equal = "same" if row.first_token is None else f"differ at {row.first_token}"
    return equal, logits(row), "-" if row.margin is None or math.isnan(row.margin) else f"{row.margin:.2g}"


def stepwise(row, dtype: torch.dtype) -> str:
    """The column of a forced run."""
    if row is None:
        return "-"
    return where(row.first) if row.first else f"nowhere; {closest(row.largest, dtype)}"


def where(first: dict) -> str:
    """A finding in words."""
    allowed = f"bound {first['bound']:g}" if first["bound"] else "must be equal"
    return f"{first['step']}, layer {first['layer']}, rank {first['rank']}, {first['what']}: {first['told']}, {allowed}"


def closest(largest: dict[str, float], dtype: torch.dtype) -> str:
    """The rounding that came closest to its bound."""
    shares = {step: largest.get(step, 0.0) / bound for step, bound in BOUNDS[dtype].items()}
    step = max(shares, key=shares.get)
    return f"{step} {largest.get(step, 0.0):.3g} of {BOUNDS[dtype][step]:g} ulps"


def steps(report) -> Table:
    """One line per class, prompt and step: the digest of the logits, and the DCP sizes that have it."""
    grid = Table()
    for name in ("tokens", "step", "SHA256 of the logits", "DCP"):
        grid.add_column(name, no_wrap=True)
    found: dict = {}
    for row in report.rows:
        for step, digest in enumerate(row.logits):
            found.setdefault((row.prompt_class, row.number, step, digest), []).append(str(row.dcp))
    order = report.settings.classes.index
    for key in sorted(found, key=lambda key: (order(key[0]), *key[1:3])):
        name, _, step, digest = key
        grid.add_row(name, str(step), digest[:16], ", ".join(found[key]))
    return grid


def logits(row) -> str:
    """How the logits compare."""
    if row.logits_identical:
        return "identical"
    return f"{row.ulps:.3g} ulps" if math.isfinite(row.ulps) else "no numbers"


def proved(report) -> list[str]:
    """What this run proved and what it did not, a line each."""
    lines = []
    if report.rows and report.ok:
        lines.append(f"Tokens: equal, {len({(r.prompt_class, r.number) for r in report.rows})} prompts.")
    if report.forced and not report.parted:
        bits = [step for step in STEPS if step not in BOUNDS[report.settings.dtype]]
        lines.append(f"Step by step on DCP1's input, equal in every bit: {', '.join(bits)}.")
        lines.append(f"Within rounding: {rounding(report)}.")
        computed, pieces = (sum(row.pieces[i] for row in report.forced) for i in (0, 1))
        if pieces:
            lines.append(
                f"Of batches beyond {LONG} tokens {computed} of {pieces} pieces were computed again on DCP1's input."
            )
    if not report.forced:
        lines.append("Step by step: not compared.")
    if not all(row.logits_identical for row in report.rows):
        lines.append("Bits of the logits: not equal, nor expected to be; --combine exact makes them so.")
    return lines


def rounding(report) -> str:
    """Each step that may round: the largest difference of all runs, and its bound."""
    bounds = BOUNDS[report.settings.dtype]
    largest = {step: max(row.largest.get(step, 0.0) for row in report.forced) for step in bounds}
    return ", ".join(f"{step} {largest[step]:.3g} of {bound:g}" for step, bound in bounds.items()) + " ulps"


def verdict(report) -> str:
    """The last line."""
    if report.odd_ranks:
        return f"Ranks {', '.join(map(str, report.odd_ranks))} computed other numbers than rank 0."
    if report.parted:
        row = report.parted[0]
        return f"DCP{row.dcp} makes something else of DCP1's input, prompt {row.case}: {where(row.first)}."
    sizes = ", ".join(f"DCP{size}" for size in report.settings.dcp)
    if report.wrong:
        odd = sum(not math.isfinite(row.ulps) for row in report.wrong)
        said = f", {odd} of them by logits that are no numbers" if odd else ""
        return f"{len(report.wrong)} of {len(report.rows)} runs differ from DCP{report.settings.dcp[0]}{said}."
    if not report.rows:
        return f"{sizes}: every sublayer makes the same of the same input."
    if report.settings.logits:
        return f"{sizes} give the same tokens and the same logits for every prompt and step, bit for bit."
    return f"{sizes} give the same tokens for every prompt, byte for byte."


def as_json(report) -> dict:
    """The same content for a record."""
    return {
        "settings": report.settings.terms(),
        "dtype": str(report.settings.dtype).removeprefix("torch."),
        "transport": report.transport,
        "devices": report.devices,
        "rows": [finite(asdict(row)) | {"same": row.same} for row in report.rows],
        "forced": [forced_json(row) for row in report.forced],
        "bounds": BOUNDS[report.settings.dtype],
        "odd_ranks": report.odd_ranks,
        "ok": report.ok,
        "verdict": verdict(report),
    }


def forced_json(row) -> dict:
    """A forced run for a record."""
    told = asdict(row) | {"largest": finite(row.largest), "ok": row.ok}
    return told | {"first": row.first and finite(row.first)}


def finite(row: dict) -> dict:
    """None for what JSON cannot say: logits that are NaN lie infinitely far apart."""
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in row.items()}
