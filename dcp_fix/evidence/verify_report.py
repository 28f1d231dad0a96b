"""What `dcp-fix verify` prints and records: one row per DCP size and prompt, what differs and where, a verdict.

It does not: run or compare anything (verify.py).
"""

import math
import sys
from dataclasses import asdict

from rich.console import Console
from rich.table import Table


def show(report) -> None:
    """Print the whole report on standard output."""
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    settings = report.settings
    graphs = ", decode steps as CUDA graphs" if settings.cuda_graphs else ""
    console.print(f"TP{settings.tp} on {place(report)}, ranks over {report.transport}, {settings.combine}{graphs}.\n")
    console.print(table(report))
    if settings.logits:
        console.print(steps(report))
    console.print(verdict(report), style="green" if report.ok else "red")


def place(report) -> str:
    """The device of the ranks, or how many processes have which."""
    if report.transport == "threads":
        return report.devices[0]
    return ", ".join(f"{report.devices.count(name)} x {name}" for name in dict.fromkeys(report.devices))


def table(report) -> Table:
    """One line per class, prompt and DCP size."""
    grid = Table()
    for name in ("tokens", "DCP", "cached", "same tokens", "logits", "parts first at", "SHA256 of the tokens"):
        grid.add_column(name, no_wrap=True)
    rows = sorted(report.rows, key=lambda row: (report.settings.classes.index(row.prompt_class), row.number))
    last = None
    for row in rows:
        if last not in (None, (row.prompt_class, row.number)):
            grid.add_section()
        last = row.prompt_class, row.number
        equal = "yes" if row.first_token is None else f"differs at {row.first_token}"
        where = row.first_layer or ("nowhere" if row.logits_identical else "not traced")  # as a replayed graph is not
        grid.add_row(row.prompt_class, str(row.dcp), str(row.cached), equal, logits(row), where, row.sha256[:16])
    return grid


def steps(report) -> Table:
    """One line per class, prompt and step: the digest of the logits, and the DCP sizes that have it."""
    grid = Table()
    for name in ("tokens", "step", "SHA256 of the logits", "DCP"):
        grid.add_column(name, no_wrap=True)
    found = {}
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
    return "identical" if row.logits_identical else f"{row.ulps:.3g} ulps ({row.apart:.1e}) apart"


def verdict(report) -> str:
    """The last line."""
    if report.odd_ranks:
        return f"Ranks {', '.join(map(str, report.odd_ranks))} computed other numbers than rank 0."
    sizes = ", ".join(f"DCP{size}" for size in report.settings.dcp)
    if report.wrong:
        return f"{len(report.wrong)} of {len(report.rows)} runs differ from DCP{report.settings.dcp[0]}."
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
        "odd_ranks": report.odd_ranks,
        "ok": report.ok,
        "verdict": verdict(report),
    }


def finite(row: dict) -> dict:
    """None for what JSON cannot say: logits that are NaN lie infinitely far apart."""
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in row.items()}
