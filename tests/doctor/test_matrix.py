"""The committed release matrix: complete, well formed, and what is derived from it."""

import re
import shutil
from pathlib import Path

import pytest

from dcp_fix.doctor import matrix
from dcp_fix.doctor.probes import PROBES, VERDICTS, workspace_record


def test_every_release_has_every_probe_in_order():
    releases = matrix.load()["releases"]
    versions = [release["version"] for release in releases]
    assert versions[0] == "0.26.0"
    assert versions == sorted(versions, key=matrix.numbers)
    for release in releases:
        assert [probe["id"] for probe in release["probes"]] == [probe.id for probe in PROBES]
        assert {probe["verdict"] for probe in release["probes"]} <= set(VERDICTS)
        assert len(release["files"]) == 4
        for probe, known in zip(release["probes"], PROBES, strict=True):
            assert probe["remedy"] == (known.remedy if probe["verdict"] == "defect" else "")


def test_who_reaches_the_module_is_in_the_matrix():
    reached = {release["version"]: release["reach"] for release in matrix.load()["releases"]}
    for version in ("0.26.0", "0.27.0", "0.27.1", "0.28.0"):
        assert reached[version]["default"] is False
        assert "present, reached only by --model-class-overrides" in reached[version]["how"]
        assert "on Hopper FLASHMLA_SPARSE returns no LSE, and DCP is refused" in reached[version]["how"]
    assert all(reached[v]["default"] for v in reached if matrix.numbers(v) >= (0, 29, 0))


def verdicts(probe):
    """{version: verdict} of one probe, the workspace as a GPU found it."""
    if probe == "split-workspace":
        return {version: found["verdict"] for version, found in workspace_record.load()["releases"].items()}
    releases = matrix.load()["releases"]
    return {r["version"]: p["verdict"] for r in releases for p in r["probes"] if p["id"] == probe}


NAMING = [probe for probe in PROBES if re.search(r"\d+\.\d+\.\d+", probe.remedy)]


@pytest.mark.parametrize("probe", NAMING, ids=lambda probe: probe.id)
def test_a_remedy_names_only_releases_that_a_check_has_shown_to_be_healthy(probe):
    found = verdicts(probe.id)
    for version, newer in re.findall(r"(\d+\.\d+\.\d+)( or newer)?", probe.remedy):
        named = [v for v in found if v == version or (newer and matrix.numbers(v) >= matrix.numbers(version))]
        assert named
        # 0.29.0 has the defect k-rows, and is named with what cures it there: the plugin and the option.
        cured = {"0.29.0"} if probe.id == "k-rows" else set()
        assert set(named) - cured <= {v for v in named if found[v] == "ok"}, (version, found)


def test_the_table_has_a_row_per_release_and_names_the_workspace_from_the_gpu():
    rows = matrix.markdown().splitlines()
    assert len(rows) == 2 + len(matrix.load()["releases"])
    columns = [cell.strip() for cell in rows[0].strip("|").split("|")]
    cells = {
        row.split("|")[1].strip(): dict(zip(columns, map(str.strip, row.strip("|").split("|")), strict=True))
        for row in rows[2:]
    }
    assert cells["0.28.0"]["split-workspace"] == cells["0.30.0"]["split-workspace"] == "**defect**"
    assert cells["0.29.0"]["split-workspace"] == "ok"


def test_a_changed_file_is_not_the_release_it_was(tmp_path):
    assert matrix.recorded_defects(tmp_path) is None
    name = matrix.DECISIVE[0]
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("def fused_norm_rope(): pass\n")
    assert matrix.recorded_defects(tmp_path) is None
    assert list(matrix.digests(tmp_path)) == [name]
    shutil.rmtree(tmp_path / "vllm")


@pytest.mark.parametrize("listed", ["0.33.0, 0.33.0rc1, 0.26.0, 0.25.1, 0.27.1, 0.27.0.post1", "0.26.0"])
def test_published_releases_are_final_ones_oldest_first(monkeypatch, listed):
    monkeypatch.setattr(matrix, "pip", lambda *words: (0, f"vllm (0.33.0)\nAvailable versions: {listed}\n", ""))
    found = matrix.published_releases()
    assert found == sorted(found, key=matrix.numbers)
    assert set(found) <= {"0.26.0", "0.27.1", "0.33.0"} and "0.26.0" in found


def test_the_page_shows_the_recorded_matrix_and_says_that_code_is_executed():
    page = (Path(__file__).parents[2] / "dcp_fix" / "doctor" / "README.md").read_text()
    assert matrix.markdown() in page
    assert "A probe executes the target's code" in page
