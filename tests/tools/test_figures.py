"""The figures of `make mutants`, `make fuzz` and `make endure`: of the present lists, and quoted as they are."""

import re
from math import ceil
from pathlib import Path

import pytest

from tests.tools import endure, figure
from tests.tools.mutant_list import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
README = " ".join((ROOT / "README.md").read_text().split())
PARTS = (*endure.MODES, "groups")


@pytest.mark.parametrize("name", ["mutants", "fuzz", "endure"])
def test_a_figure_says_what_ran_and_where(name):
    found = figure.read(name)
    assert set(figure.surroundings()) <= set(found) and found["dirty"] is False
    assert found["command"].split()[0] == f"{name}.py"
    rows = found.get("rows", []) + list(found.get("properties", {}).values())
    assert all(re.fullmatch("[0-9a-f]{40}", row["commit"]) for row in [found, *rows])


def test_every_mutant_was_noticed():
    """By its tests: not by a limit of time, and not because nothing could be imported."""
    rows = figure.read("mutants")["rows"]
    tried = [(row["file"], row["old"], row["new"], row["tests"]) for row in rows]
    assert sorted(tried) == sorted(MUTANTS) and len(set(tried)) == len(tried) >= 100
    assert {row["outcome"] for row in rows} == {"killed"}
    assert f"all {len(tried)} defects" in README


@pytest.mark.parametrize("file, old", [mutant[:2] for mutant in MUTANTS], ids=range(len(MUTANTS)))
def test_a_mutant_still_changes_the_line_that_it_means(file, old):
    assert (ROOT / file).read_text().count(old) == 1


def test_every_property_was_asked_for_ten_thousand_examples():
    """The figure holds every property there is, and no other."""
    found = figure.read("fuzz")["properties"]
    texts = {path.relative_to(ROOT): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    named = {f"{path}::{name}" for path, text in texts.items() for name in properties_in(text)}
    assert set(found) == named and all(row["passed"] and row["examples"] >= 10_000 for row in found.values())
    assert f"10,000 examples of each of {len(named)} properties" in README


def properties_in(text):
    """The names of the tests that @given decorates, alone or among other decorators."""
    return re.findall(r"^@given\(.*\n(?:@.*\n)*def (test_\w+)", text, re.M)


@pytest.mark.parametrize("part", PARTS)
def test_the_long_run_was_long_and_is_quoted(part):
    found = figure.read("endure")[part]
    assert found["ok"] and endure.flat(found["mib"]) and abs(found["growth"]) <= endure.FLAT
    assert f"{found['growth']:+.2%}" in README and f"{found['mib'][1]:.1f} to {found['mib'][-1]:.1f} MiB" in README
    if part == "groups":
        assert found["cycles"] >= 1_000 and not any(found["left"].values())
        assert f"{found['cycles']:,} groups" in README
    else:
        assert found["requests"] >= 10_000 and found["differing"] == []
        assert found["prefix_hits"] > 100 < found["evictions"] and found["dense_hits"] > 0
        assert f"{found['requests']:,} {part} requests" in README and f"holds {endure.CACHE} tokens" in README
        assert part == "ordinary" or found["largest_difference"] == 0.0
        assert part == "exact" or f"no logit further than {ceil(found['largest_difference'] * 1000) / 1000} " in README
        assert f"{found['prefix_hits']:,} prefix hits and {found['evictions']:,} evictions" in README
