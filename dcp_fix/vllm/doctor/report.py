"""The command `dcp-fix doctor`: which targets, what is printed, which exit status.

Exit status: 0 no defect, 1 a defect, 2 a target that cannot be read, or whose code could not be run by a probe that
needs nothing but the target. The highest of all targets counts. Standard output holds the tables, or with `--json -`
the JSON and nothing else; errors and progress go to standard error.
"""

import json as jsonlib
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dcp_fix.vllm.doctor.probes import PROBES
from dcp_fix.vllm.doctor.runner import Finding, finding, probe_target
from dcp_fix.vllm.doctor.target import TargetError, fetch_release, opened
from dcp_fix.vllm.repairs import REPAIRED

COLOURS = {"ok": "green", "defect": "bold red", "not-applicable": "dim", "not-run": "yellow"}


@dataclass(frozen=True)
class Report:
    """One target. `error` is set where nothing of it could be read; `note` says what the plugin did."""

    target: str
    version: str | None
    probes: list[Finding]
    error: str | None = None
    note: str | None = None

    def as_json(self) -> dict:
        return {"target": self.target, "version": self.version, "probes": [asdict(probe) for probe in self.probes]}

    def status(self) -> int:
        by_itself = {probe.id for probe in PROBES if not probe.needs}
        if self.error or any(f.verdict == "not-run" and f.id in by_itself for f in self.probes):
            return 2
        return int(any(f.verdict == "defect" for f in self.probes))


def examine(spec: str | None, *, release: str | None = None, with_plugin: bool = False, serve_args=None) -> Report:
    """The report of one target: a path, a release, or (both None) the vLLM of this environment. Never raises for it."""
    try:
        with opened(str(fetch_release(release)) if release else spec) as target:
            name = f"vllm=={release}" if release else target.name
            findings, note = probe_target(target, serve_args=serve_args), None
            if with_plugin:
                fixes = [f.id for f in findings if f.verdict == "defect" and f.id in REPAIRED]
                note = (
                    f"with the plugin, which repairs: {', '.join(fixes)}" if fixes else "the plugin does nothing here"
                )
                findings = probe_target(target, fixes=fixes, serve_args=serve_args) if fixes else findings
            return Report(name, target.version, findings, note=note)
    except TargetError as error:
        name = f"vllm=={release}" if release else spec or "installed"
        return Report(name, None, [finding(probe, "not-run", str(error)) for probe in PROBES], error=str(error))


# --- output -----------------------------------------------------------------------------------------------------------


def print_table(console: Console, report: Report):
    """One target: a table, then a line per defect with its remedy."""
    title = f"{report.target}  (vLLM {report.version or 'of unknown version'})"
    table = Table(title=title, title_justify="left", caption=report.note, caption_justify="left")
    for column in ("probe", "verdict", "evidence"):
        table.add_column(column, no_wrap=column != "evidence")
    for probe in report.probes:
        table.add_row(probe.id, f"[{COLOURS[probe.verdict]}]{probe.verdict}[/]", probe.evidence.replace("[", r"\["))
    console.print(table)
    for probe in report.probes:
        if probe.verdict == "defect":
            console.print(f"{probe.id}: {probe.remedy} ({probe.reference})", highlight=False, markup=False)
    console.print()


def write_json(path: Path, text: str):
    """The whole file or none of it."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def main(targets, *, releases=(), with_plugin=False, serve_args=None, json: str | None = None) -> int:
    """Examine every target in turn; returns the exit status."""
    if serve_args is not None:
        from dcp_fix.vllm.doctor.probes.arguments import checked

        checked(serve_args)  # a mistake in them is the caller's, and is said before any probe runs
    jobs = [*((t, None) for t in targets), *((None, r) for r in releases)] or [(None, None)]
    console, errors, reports = Console(soft_wrap=False), Console(stderr=True), []
    for spec, release in jobs:
        with errors.status(f"examining {release or spec or 'the vLLM of this environment'}"):
            report = examine(spec, release=release, with_plugin=with_plugin, serve_args=serve_args)
        reports.append(report)
        if report.error:
            print(f"error: {report.error}", file=sys.stderr)
        elif json != "-":
            print_table(console, report)
    if json:
        text = jsonlib.dumps([report.as_json() for report in reports], indent=2) + "\n"
        sys.stdout.write(text) if json == "-" else write_json(Path(json), text)
    return max(report.status() for report in reports)
