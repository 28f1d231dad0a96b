"""The figures of `make mutants` and `make endure`: of the present lists, and quoted as they are."""

import json
from pathlib import Path

import pytest

from tests.mutant_list import MUTANTS

ROOT = Path(__file__).resolve().parent.parent
README = " ".join((ROOT / "README.md").read_text().split())


def figures(name):
    return json.loads((ROOT / "tests" / "figures" / f"{name}.json").read_text())


def test_every_mutant_that_was_tried_was_noticed():
    """By its tests, not by a limit of time; the list may hold later ones, which the README counts."""
    rows = figures("mutants")["rows"]
    tried = [(row["file"], row["old"], row["new"], row["tests"]) for row in rows]
    assert set(tried) <= set(MUTANTS) and len(set(tried)) == len(tried) >= 80
    assert {row["outcome"] for row in rows} == {"killed"}
    assert f"{len(tried)} of {len(MUTANTS)} defects" in README


@pytest.mark.parametrize("file, old", [mutant[:2] for mutant in MUTANTS], ids=range(len(MUTANTS)))
def test_a_mutant_still_changes_the_line_that_it_means(file, old):
    assert (ROOT / file).read_text().count(old) == 1


def test_the_long_run_is_quoted_with_its_length():
    found = figures("endure")
    assert all(found[part]["ok"] for part in ("exact", "ordinary", "groups"))
    for mode in ("exact", "ordinary"):
        assert f"{found[mode]['requests']:,} {mode}" in README and found[mode]["prefix_hits"] > 0
    assert f"{found['groups']['cycles']:,} groups" in README
