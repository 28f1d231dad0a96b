"""`dcp-fix verify --plant all`: healthy runs of every configuration pass, and every planted defect is caught and named.

    healthy    every prompt class and small case at every DCP size with ag_rs; the small cases and one class with a2a;
               one class in the other two cache formats
    planted    each defect of planted.py, at every DCP size, on the smallest case that shows it

Only the forced pass runs. Threads on one device suffice: what is planted does not depend on who carries the messages.

It does not: plant the four defects of broken.py (the ladder does), or run exact mode, which has combines of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dcp_fix import planted
from dcp_fix.combine import METHODS
from dcp_fix.engine.engine import resolve_device
from dcp_fix.engine.model import Model
from dcp_fix.kv_cache import CACHE_FORMATS
from dcp_fix.ladder import ladder
from dcp_fix.ladder import report as ladder_report
from dcp_fix.ranks import launch
from dcp_fix.ranks.group import TIMEOUT_S, Group
from dcp_fix.records.records import deliver_record
from dcp_fix.verify import forced, verify
from dcp_fix.verify import report as verify_report
from dcp_fix.verify.settings import Settings, planted_ops
from dcp_fix.verify.steps import BOUNDS


@dataclass(frozen=True)
class Planted:
    """One defect at one DCP size: what was found."""

    name: str
    shows: str  # the sublayer that should be named
    row: forced.ForcedRow

    @property
    def ok(self) -> bool:
        """Whether it was caught and the right sublayer named."""
        return self.row.first is not None and self.row.first["step"] == self.shows


def listing() -> str:
    """Every planted defect by name: where it shows, what it is, who made it."""
    lines = []
    for name, plant in planted.PLANTS.items():
        lines += [f"{name}  (shows in: {plant.shows})", f"    {plant.function.__doc__}", f"    {plant.who}"]
    return "\n".join(lines)


def healthy(
    group: Group, settings: Settings, model: Model, progress: Callable | None
) -> list[tuple[str, forced.ForcedRow]]:
    """(combine, row) of every healthy configuration."""
    small, classes = forced.small_cases(), [forced.class_case(name) for name in settings.classes]
    formats = [replace(classes[-1], cache_format=name) for name in CACHE_FORMATS if name != classes[-1].cache_format]
    asked = {name: small + classes[-1:] for name in METHODS}
    asked["ag_rs"] = small + classes + formats
    found = []
    for combine, cases in asked.items():
        for case in cases:
            rows = forced.Forced(group, model, combine, progress).rows(case, settings.dcp)
            found += [(combine, row) for row in rows]
    return found


def caught(group: Group, settings: Settings, model: Model, progress: Callable | None) -> list[Planted]:
    """Every planted defect at every DCP size."""
    cases = {case.name: case for case in forced.small_cases()}
    by_step = forced.Forced(group, model, "ag_rs", progress)
    return [
        Planted(name, plant.shows, row)
        for name, plant in planted.PLANTS.items()
        for row in by_step.rows(cases[plant.case], settings.dcp, planted_ops(name))
    ]


def main(settings: Settings, record_path: Path | None = None, timeout: float = TIMEOUT_S) -> int:
    """Run both, print, record; 0 if all healthy runs pass and all planted defects are caught and named, else 1."""
    settings = replace(settings, classes=tuple(sorted(settings.classes, key=lambda name: name == "1536")))  # last
    settings.check()
    device = resolve_device(settings.device)
    model = Model.load(settings.checkpoint, device, settings.dtype)
    with ladder_report.progress() as progress:

        def rank(group: Group) -> tuple[list, list]:
            told = progress if group.rank == 0 else None
            return healthy(group, settings, model, told), caught(group, settings, model, told)

        good, bad = ladder.on_threads(settings.tp, rank, timeout=timeout, device=device)
    results = as_json(settings, verify.device_name(device), good, bad)
    deliver_record(record_path, lambda: results, show, good, bad, results)
    return 0 if results["ok"] else launch.DIFFERS


def as_json(settings: Settings, device: str, good, bad: list[Planted]) -> dict:
    """The content of a record."""
    ok = all(row.ok for _, row in good) and all(each.ok for each in bad)
    return {
        "settings": settings.terms(),
        "devices": [device],
        "bounds": BOUNDS[settings.dtype],
        "healthy": [{"combine": combine} | verify_report.forced_json(row) for combine, row in good],
        "planted": [
            {"name": each.name, "shows": each.shows, "named": each.ok} | verify_report.forced_json(each.row)
            for each in bad
        ],
        "ok": ok,
        "verdict": verdict(good, bad),
    }


def verdict(good, bad: list[Planted]) -> str:
    """The last line."""
    names = dict.fromkeys(each.name for each in bad)
    named = sum(all(each.ok for each in bad if each.name == name) for name in names)
    passed = sum(row.ok for _, row in good)
    return f"{passed} of {len(good)} healthy runs pass; {named} of {len(names)} planted defects are caught and named."


def show(good, bad: list[Planted], results: dict) -> None:
    """Print what healthy runs part at, a line per planted defect, and the verdict."""
    print(f"TP{results['settings']['tp']} on {results['devices'][0]}, {len(good)} healthy runs.")
    for combine, row in good:
        if not row.ok:
            print(f"{row.case}, DCP{row.dcp}, {combine}: {verify_report.where(row.first)}")
    for each in bad:
        at = verify_report.where(each.row.first) if each.row.first else "nowhere"
        named = "caught" if each.ok else f"NOT CAUGHT in {each.shows}"
        print(f"{each.name}, DCP{each.row.dcp}, {each.row.case}: {named}: {at}")
    print(results["verdict"])
