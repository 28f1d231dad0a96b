"""The figures of the long runs: of the present lists, whole, and shown as they are."""

import ast
import re
from pathlib import Path

import pytest

from tests.tools import endure, figure
from tests.tools.environments import QUICK, ROWS, SIGNALS
from tests.tools.mutant_list import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["mutants", "fuzz", "endure"])
def test_a_figure_says_what_ran_and_where(name):
    found = figure.read(name)
    assert set(figure.surroundings()) <= set(found) and found["dirty"] is False
    assert found["command"].split()[0] == f"{name}.py"
    rows = found.get("rows", []) + list(found.get("properties", {}).values())
    assert all(re.fullmatch("[0-9a-f]{40}", row["commit"]) for row in [found, *rows])


def test_the_readme_shows_the_figures():
    assert figure.SECTION.search(figure.README.read_text())[0] == figure.markdown(), "python -m tests.tools.figure"


def test_every_mutant_was_noticed():
    """By its tests: not by a limit of time, and not because nothing could be imported."""
    rows = figure.read("mutants")["rows"]
    tried = [(row["file"], row["old"], row["new"], row["tests"]) for row in rows]
    assert sorted(tried) == sorted(MUTANTS) and len(set(tried)) == len(tried)
    assert {row["outcome"] for row in rows} == {"killed"}


@pytest.mark.parametrize("file, old", [mutant[:2] for mutant in MUTANTS], ids=range(len(MUTANTS)))
def test_a_mutant_still_changes_the_line_that_it_means(file, old):
    assert (ROOT / file).read_text().count(old) == 1


def test_every_property_was_asked_for_ten_thousand_examples():
    """The figure holds every property there is, and no other."""
    found = figure.read("fuzz")["properties"]
    files = {path.relative_to(ROOT): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(found) == {f"{path}::{name}" for path, text in files.items() for name in properties_in(text)}
    assert all(row["passed"] and row["examples"] >= 10_000 for row in found.values())


def properties_in(text: str) -> list[str]:
    """The names of the tests that @given decorates."""
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if any(ast.unparse(d).startswith("given(") for d in f.decorator_list)]


@pytest.mark.parametrize("part", [*endure.MODES, "groups"])
def test_the_long_run_was_long(part):
    found = figure.read("endure")[part]
    assert found["ok"] and endure.flat(found["mib"]) and abs(found["growth"]) <= endure.FLAT
    if part == "groups":
        assert found["cycles"] >= 1_000 and not any(found["left"].values())
    else:
        assert found["requests"] >= 10_000 and found["differing"] == []
        assert found["prefix_hits"] > 100 < found["evictions"] and found["dense_hits"] > 0
        assert part == "ordinary" or found["largest_difference"] == 0.0


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_every_environment_was_run_with_what_it_says_and_passed(row):
    (found,) = (known for known in figure.read("environments")["rows"] if known["name"] == row.name)
    assert found["outcome"] == "passed" and found["passed"] > 0 == found["failed"]
    assert found["ran"] == " ".join(row.tests) and re.fullmatch("[0-9a-f]{40}", found["commit"])
    assert found["versions"]["python"].startswith(row.python + ".")
    for name in ("torch", "triton", "numpy"):
        wanted, got = getattr(row, name), found["versions"][name]
        assert got == wanted or (name == "torch" and got.split("+")[0] == wanted)


def test_what_an_environment_runs_is_there():
    assert all((ROOT / word).is_file() for word in (*QUICK, *SIGNALS) if word.startswith("tests/"))
