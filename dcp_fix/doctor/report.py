"""The command `dcp-fix doctor`: which targets, what is printed, which exit status.

Exit status: 0 no defect, 1 a defect, 2 a target that cannot be read, or whose code could not be run by a probe that
needs nothing but the target. The highest of all targets counts; what a command reaches changes nothing about it.
Standard output holds the tables, or with `--json -` the JSON and nothing else; errors and progress go to standard
error.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dcp_fix.base import output
from dcp_fix.base.errors import escaped, shown, shown_lines
from dcp_fix.doctor import serve_args as serving
from dcp_fix.doctor.opening import opened
from dcp_fix.doctor.probes import PROBES
from dcp_fix.doctor.probes.workspace_record import workspace_verdict
from dcp_fix.doctor.reach import PROBED, reach
from dcp_fix.doctor.release import fetch_release
from dcp_fix.doctor.runner import Finding, finding, probe_target
from dcp_fix.doctor.target import Target, TargetError
from dcp_fix.repairs.repairs import REPAIRED, kept_out

COLOURS = {"ok": "green", "defect": "bold red", "not-applicable": "dim", "not-run": "yellow"}


@dataclass(frozen=True)
class Report:
    """One target. `error` is set where nothing of it could be read; `notes`: what else there is to know of it.

    `served`: which defects a `vllm serve` command reaches, None where none was given.
    """

    target: str
    version: str | None
    probes: list[Finding]
    error: str | None = None
    notes: tuple[str, ...] = ()
    reach: str | None = None
    served: list[serving.Answer] | None = None

    def as_json(self) -> dict:
        probes = [asdict(probe) for probe in self.probes]
        head = {"target": self.target, "version": self.version, "reach": self.reach, "notes": list(self.notes)}
        served = None if self.served is None else [asdict(answer) for answer in self.served]
        return {**head, "probes": probes, "serve_args": served}

    def status(self) -> int:
        by_itself = {probe.id for probe in PROBES if not probe.needs}
        if self.error or any(f.verdict == "not-run" and f.id in by_itself for f in self.probes):
            return 2
        return int(any(f.verdict == "defect" for f in self.probes))


def examine(
    spec: str | None, *, release: str | None = None, with_plugin: bool = False, command: serving.Command | None = None
) -> Report:
    """The report of one target: a path, a release, or (both None) the vLLM of this environment. Never raises for it."""
    name = spec or "installed" if release is None else f"vllm=={release}"
    try:
        with opened(spec if release is None else str(fetch_release(release))) as target:
            who = reach(target.root).how
            findings, notes = probe_target(target), [target.note] if target.note else []
            if with_plugin:
                findings, said = repaired(target, findings, command.environment if command else os.environ)
                notes.append(said)
            title = target.name if release is None else name
            report = Report(title, target.version, findings, notes=tuple(notes), reach=who)
            return report if command is None else with_answers(report, command, target)
    except TargetError as error:
        return Report(shown(name), None, [finding(p, "not-run", str(error)) for p in PROBES], error=str(error))


def repaired(target: Target, findings: list[Finding], environment: Mapping[str, str]) -> tuple[list[Finding], str]:
    """(the findings with the plugin applied, what it does)"""
    fixes = [f.id for f in findings if f.verdict == "defect" and f.id in REPAIRED]
    if not fixes:
        return findings, "the plugin does nothing"
    said = f"with the plugin, which repairs: {', '.join(fixes)}"
    if assignment := kept_out(environment):
        said += f"; but this environment keeps it out: {shown(assignment)}"
    return probe_target(target, fixes=fixes), said


def with_answers(report: Report, command: serving.Command, target: Target) -> Report:
    """The report with the defects that the command reaches; for the workspace what was recorded on a GPU counts."""
    defects = [f.id for f in report.probes if f.verdict == "defect"]
    verdicts = {f.id: f.verdict for f in report.probes}
    if verdicts.get("split-workspace") == "not-run" and workspace_verdict(target.version) == "defect":
        defects.append("split-workspace")
    unread = f"not looked at in --serve-args: {', '.join(command.not_read)}" if command.not_read else ""
    notes = (*report.notes, *([unread] if unread else []))
    return replace(report, notes=notes, served=serving.reached(command, defects, target.root))


# --- output -----------------------------------------------------------------------------------------------------------


def print_tables(reports: list[Report]):
    """Every target that could be read."""
    for report in reports:
        if not report.error:
            print_table(Console(soft_wrap=False), report)


def print_table(console: Console, report: Report):
    """One target: a table, then a line per defect with its remedy, and whether the given command reaches it."""
    version = report.version or "of unknown version"
    console.print(Text(f"{escaped(report.target)}  (vLLM {version})"), soft_wrap=True)
    caption = Text("\n".join(map(escaped, report.notes))) if report.notes else None
    table = Table(caption=caption, caption_justify="left")
    for column in ("probe", "verdict", "evidence"):
        table.add_column(column, no_wrap=column != "evidence")
    for probe in report.probes:
        table.add_row(probe.id, f"[{COLOURS[probe.verdict]}]{probe.verdict}[/]", Text(escaped(probe.evidence)))
    console.print(table)
    lines = [f"{f.id}: {f.remedy} ({f.reference})" for f in report.probes if f.verdict == "defect"]
    looked_at = {probe.id for probe in PROBES if probe.code in PROBED}
    if report.reach and any(f.verdict == "defect" and f.id in looked_at for f in report.probes):
        lines.append(f"who is affected: {report.reach}")
    lines += [f"{answer.id} with these arguments: {answer.reach} ({answer.why})" for answer in report.served or ()]
    for line in lines:
        console.print(escaped(line), highlight=False, markup=False)
    console.print()


def main(targets: list[str], *, releases=(), with_plugin=False, serve_args=None, json: Path | str | None = None) -> int:
    """Examine every target in turn; returns the exit status."""
    command = None if serve_args is None else serving.parsed(serve_args)
    output.check(json)
    jobs = [*((t, None) for t in targets), *((None, r) for r in releases)] or [(None, None)]
    errors, reports = Console(stderr=True), []
    for spec, release in jobs:
        fetched = f"{release}, whose wheel is downloaded first (300 MB) unless it is in the cache"
        what = spec or "the vLLM of this environment" if release is None else fetched
        with errors.status(Text(f"examining {shown(what)}")):
            reports.append(examine(spec, release=release, with_plugin=with_plugin, command=command))
    try:
        output.deliver(json, [report.as_json() for report in reports], print_tables, reports)
    finally:
        for report in reports:
            if report.error:
                print(f"error: {shown_lines(report.error)}", file=sys.stderr)
    return max(report.status() for report in reports)
