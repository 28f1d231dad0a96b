"""The reports to upstream say what the doctor's recorded runs hold, and nothing else."""

import json
import re
from pathlib import Path

from dcp_fix.doctor import matrix
from dcp_fix.doctor.probes.workspace import MIB, SIZES, result_bytes
from dcp_fix.doctor.probes.workspace_record import RECORDED

REPORTS = Path(__file__).parents[2] / "notebooks" / "reports"


def table(name):
    """Rows of the report's tables that begin with a release, as lists of cells."""
    lines = re.findall(r"^\| \**(\d.*) \|$", (REPORTS / name).read_text(), flags=re.MULTILINE)
    return [[cell.strip("* ") for cell in line.split("|")] for line in lines]


def test_peak_bytes_are_those_of_the_recorded_run():
    recorded = json.loads(RECORDED.read_text())
    report = (REPORTS / "workspace.md").read_text()
    assert recorded["hardware"] in report and f"torch {recorded['versions']['torch']}" in report
    rows = table("workspace.md")
    assert [row[0] for row in rows] == [v for v in recorded["releases"] if matrix.numbers(v) >= (0, 28, 0)]
    for version, *peaks in rows:
        said = re.findall(r"([\d.]+) MiB peak", recorded["releases"][version]["evidence"])
        assert peaks == [f"{peak} MiB" for peak in said], version
        wrong = recorded["releases"][version]["verdict"] == "defect"
        assert wrong == (version != "0.29.0")
    results = [round(result_bytes(rows, heads) / MIB, 2) for rows, heads, _ in SIZES]
    assert "The result alone is {}, {} and {} MiB".format(*results) in report


def test_every_release_of_the_matrix_has_the_silent_collective_and_the_need_that_the_report_names():
    needs = {}
    for release in matrix.load()["releases"]:
        probe = next(probe for probe in release["probes"] if probe["id"] == "silent-collective")
        assert probe["verdict"] == "defect"
        needs[release["version"]] = re.search(r"NCCL ([\d.]+) or newer", probe["evidence"])[0]
    told = {version: need for versions, need in table("silent_reduce_scatter.md") for version in versions.split(", ")}
    assert told == {version: need.removeprefix("NCCL ") for version, need in needs.items()}
