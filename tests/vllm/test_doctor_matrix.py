"""The committed release matrix: complete, well formed, and what is derived from it."""

import shutil
from pathlib import Path

import pytest

from dcp_fix.vllm.doctor import matrix
from dcp_fix.vllm.doctor.probes import PROBES, VERDICTS


def test_every_release_has_every_probe_in_order():
    releases = matrix.load()["releases"]
    versions = [release["version"] for release in releases]
    assert versions[0] == "0.26.0"
    assert versions == sorted(versions, key=matrix.numbers)
    for release in releases:
        assert [probe["id"] for probe in release["probes"]] == [probe.id for probe in PROBES]
        assert {probe["verdict"] for probe in release["probes"]} <= set(VERDICTS)
        assert len(release["files"]) == 4


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
    class Done:
        stdout, stderr = f"vllm (0.33.0)\nAvailable versions: {listed}\n", ""

    monkeypatch.setattr(matrix.subprocess, "run", lambda *a, **k: Done)
    found = matrix.published_releases()
    assert found == sorted(found, key=matrix.numbers)
    assert set(found) <= {"0.26.0", "0.27.1", "0.33.0"} and "0.26.0" in found


def test_the_readme_shows_the_recorded_matrix_and_says_that_code_is_executed():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert matrix.markdown() in readme
    assert "A probe executes the target's code" in readme
