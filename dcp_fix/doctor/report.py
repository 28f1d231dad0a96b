"""The command `dcp-fix doctor`: which targets, what is printed, which exit status.

Exit status: 0 no defect, 1 a defect, 2 a target that cannot be read, or whose code could not be run by a probe that
needs nothing but the target. The highest of all targets counts. Standard output holds the tables, or with `--json -`
the JSON and nothing else; errors and progress go to standard error.
"""

import sys
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dcp_fix.base import output
from dcp_fix.base.errors import escaped, shown, shown_lines
from dcp_fix.doctor.opening import opened
from dcp_fix.doctor.probes import PROBES
from dcp_fix.doctor.reach import PROBED, reach
from dcp_fix.doctor.release import fetch_release
from dcp_fix.doctor.runner import Finding, finding, probe_target
from dcp_fix.doctor.target import TargetError
from dcp_fix.repairs.repairs import REPAIRED

COLOURS = {"ok": "green", "defect": "bold red", "not-applicable": "dim", "not-run": "yellow"}


@dataclass(frozen=True)
class Report:
    """One target. `error` is set where nothing of it could be read; `notes`: what else there is to know of it."""

    target: str
    version: str | None
    probes: list[Finding]
    error: str | None = None
    notes: tuple[str, ...] = ()
    reach: str | None = None

    def as_json(self) -> dict:
        probes = [asdict(probe) for probe in self.probes]
        head = {"target": self.target, "version": self.version, "reach": self.reach, "notes": list(self.notes)}
        return {**head, "probes": probes}

    def status(self) -> int:
        by_itself = {probe.id for probe in PROBES if not probe.needs}
        if self.error or any(f.verdict == "not-run" and f.id in by_itself for f in self.probes):
            return 2
        return int(any(f.verdict == "defect" for f in self.probes))


def examine(spec: str | None, *, release: str | None = None, with_plugin: bool = False, serve_args=None) -> Report:
    """The report of one target: a path, a release, or (both None) the vLLM of this environment. Never raises for it."""
    name = f"vllm=={release}" if release else spec or "installed"
    try:
        with opened(str(fetch_release(release)) if release else spec) as target:
            who = reach(target.root).how
            findings, notes = probe_target(target, serve_args=serve_args), [target.note] if target.note else []
            if with_plugin:
                fixes = [f.id for f in findings if f.verdict == "defect" and f.id in REPAIRED]
                findings = probe_target(target, fixes=fixes, serve_args=serve_args) if fixes else findings
                notes.append(
                    f"with the plugin, which repairs: {', '.join(fixes)}" if fixes else "the plugin does nothing"
                )
            return Report(name if release else target.name, target.version, findings, notes=tuple(notes), reach=who)
    except TargetError as error:
        return Report(shown(name), None, [finding(p, "not-run", str(error)) for p in PROBES], error=str(error))


# --- output -----------------------------------------------------------------------------------------------------------


def print_tables(reports: list[Report]):
    """Every target that could be read."""
    for report in reports:
        if not report.error:
            print_table(Console(soft_wrap=False), report)


def print_table(console: Console, report: Report):
    """One target: a table, then a line per defect with its remedy."""
    version = report.version or "of unknown version"
    console.print(Text(f"{escaped(report.target)}  (vLLM {version})"), soft_wrap=True)
    caption = Text("\n".join(map(escaped, report.notes))) if report.notes else None
    table = Table(caption=caption, caption_justify="left")
    for column in ("probe", "verdict", "evidence"):
        table.add_column(column, no_wrap=column != "evidence")
    for probe in report.probes:
        table.add_row(probe.id, f"[{COLOURS[probe.verdict]}]{probe.verdict}[/]", Text(escaped(probe.evidence)))
    console.print(table)
    for probe in report.probes:
        if probe.verdict == "defect":
            console.print(f"{probe.id}: {probe.remedy} ({probe.reference})", highlight=False, markup=False)
    looked_at = {probe.id for probe in PROBES if probe.code in PROBED}
    if report.reach and any(f.verdict == "defect" and f.id in looked_at for f in report.probes):
        console.print(f"who is affected: {report.reach}", highlight=False, markup=False)
    console.print()


def main(targets, *, releases=(), with_plugin=False, serve_args=None, json: str | None = None) -> int:
    """Examine every target in turn; returns the exit status."""
    if serve_args is not None:
        from dcp_fix.doctor.probes.arguments import checked

        checked(serve_args)  # a mistake in them is the caller's, and is said before any probe runs
    output.check(json)
    jobs = [*((t, None) for t in targets), *((None, r) for r in releases)] or [(None, None)]
    errors, reports = Console(stderr=True), []
    for spec, release in jobs:
        what = shown(release or spec or "the vLLM of this environment")
        with errors.status(Text(f"examining {what}")):
            reports.append(examine(spec, release=release, with_plugin=with_plugin, serve_args=serve_args))
    try:
        output.deliver(json, [report.as_json() for report in reports], print_tables, reports)
    finally:
        for report in reports:
            if report.error:
                print(f"error: {shown_lines(report.error)}", file=sys.stderr)
    return max(report.status() for report in reports)
