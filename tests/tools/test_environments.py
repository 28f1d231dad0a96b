"""Other surroundings and the supply chain: what `make environments` found, what is pinned by hash, who owns what."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.tools.environments import QUICK, ROWS, SIGNALS
from tests.tools.lock import HEADERS, TORCH_CPU, file_of, fits, locked

ROOT = Path(__file__).resolve().parents[2]
README = " ".join((ROOT / "README.md").read_text().split())
FIGURES = json.loads((ROOT / "tests" / "tools" / "figures" / "environments.json").read_text())
OWNED = re.compile(r"MIT|BSD|Apache|ISC|Python Software Foundation|PSF|MPL|Mozilla Public|Unlicense")


# --- the matrix -------------------------------------------------------------------------------------------------------


def test_every_row_of_the_matrix_has_been_run_and_passed():
    rows = {row["name"]: row for row in FIGURES["rows"]}
    assert list(rows) == [row.name for row in ROWS]
    assert {row["outcome"] for row in rows.values()} == {"passed"}
    assert all(row["passed"] > 0 and row["failed"] == 0 for row in rows.values())
    assert f"in {len(rows)} surroundings" in README


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_row_was_run_with_what_it_says(row):
    (found,) = (known for known in FIGURES["rows"] if known["name"] == row.name)
    assert found["ran"] == " ".join(row.tests) and re.fullmatch("[0-9a-f]{40}", found["commit"])
    assert found["versions"]["python"].startswith(row.python + ".")
    for name in ("torch", "triton", "numpy"):
        wanted, got = getattr(row, name), found["versions"][name]
        assert got == wanted or (name == "torch" and got.split("+")[0] == wanted)


@pytest.mark.parametrize("numpy", ["2.4", "2.5"])
def test_an_old_triton_under_a_new_numpy_skips_with_the_reason(numpy):
    (row,) = (row for row in FIGURES["rows"] if row["name"] == f"triton 3.6 under numpy {numpy}")
    assert int(re.match(r"(\d+) skipped: the interpreter of triton 3\.6 cannot run", row["reason"])[1]) >= 20


def test_what_a_row_runs_is_there():
    assert all((ROOT / word).is_file() for word in (*QUICK, *SIGNALS) if word.startswith("tests/"))


def test_the_caller_s_terminal_is_nothing_to_the_tests():
    """FORCE_COLOR=3 colours what rich prints, also into a pipe, and several tests compare what it prints."""
    code = "import tests.conftest; from rich.console import Console; Console().print('[red]plain[/red] ' + 'x' * 60)"
    told = os.environ | {"FORCE_COLOR": "3", "CLICOLOR_FORCE": "1", "COLUMNS": "20", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=told, capture_output=True, text=True, check=True)
    assert done.stdout == f"plain {'x' * 60}\n"


# --- what is installed ------------------------------------------------------------------------------------------------


def entries() -> dict[str, tuple[str, list[str]]]:
    """Both lock files as {name: (version, hashes)}."""
    texts = [(ROOT / file).read_text() for file in HEADERS]
    return {canonicalize_name(name): (version, hashes) for text in texts for name, version, hashes in locked(text)}


def test_every_pin_has_hashes_and_nothing_else_has():
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M)
    assert {canonicalize_name(name): version for name, version in lines} == {n: v for n, (v, _) in entries().items()}
    assert all(hashes and len(set(hashes)) == len(hashes) for _, hashes in entries().values())


def test_every_line_of_a_lock_file_is_a_pin_a_hash_or_a_comment():
    """pip would take an entry without a hash for a reason to ask for none."""
    for file in HEADERS:
        text = (ROOT / file).read_text()
        assert re.fullmatch(r"(#.*\n)*([\w.-]+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+\n)+", text)
        assert {file_of(name) for name, _, _ in locked(text)} == {file}


def test_torch_has_the_hashes_of_both_indexes():
    version, hashes = entries()["torch"]
    assert set(TORCH_CPU[version]) < set(hashes) and len(hashes) == 2 * len(TORCH_CPU[version])


@pytest.mark.parametrize(
    "file, wanted",
    {
        "a-1-py3-none-any.whl": True, "a-1-py2.py3-none-any.whl": True, "a-1-cp39-abi3-manylinux_2_28_x86_64.whl": True,
        "a-1-cp312-cp312-manylinux2014_aarch64.whl": True, "a-1-cp312-abi3-manylinux_2_17_x86_64.whl": True,
        "a-1-cp313-abi3-manylinux_2_17_x86_64.whl": False, "a-1-cp313-cp313-manylinux_2_28_x86_64.whl": False,
        "a-1-cp310-cp310-manylinux_2_28_x86_64.whl": False, "a-1-cp311-cp311-musllinux_1_2_x86_64.whl": False,
        "a-1-cp311-cp311-win_amd64.whl": False, "a-1-cp311-cp311-macosx_14_0_arm64.whl": False,
        "a-1-py3-none-manylinux_2_27_x86_64.whl": True, "torch-1%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl": True,
        "a-1-pp311-pypy311_pp73-manylinux_2_28_x86_64.whl": False, "a-1-cp39-abi3-manylinux_2_28_s390x.whl": False,
    }.items(),
)  # fmt: skip
def test_wheels_that_our_pythons_take_on_linux(file, wanted):
    assert fits({"url": f"https://index/{file}"}) is wanted


# --- licences ---------------------------------------------------------------------------------------------------------


def declared(name: str) -> str:
    """The licence that an installed distribution declares: an expression, classifiers or a line of text."""
    found = metadata.metadata(name)
    classes = [c.split(" :: ")[-1] for c in found.get_all("Classifier") or [] if c.startswith("License :: OSI")]
    return found.get("License-Expression") or "; ".join(classes) or (found.get("License") or "").split("\n")[0]


def test_nothing_that_is_needed_declares_the_gpl():
    """The CUDA libraries, which only PyPI's torch needs, are NVIDIA's."""
    names = [name for name, _, _ in locked((ROOT / "requirements.lock").read_text())]
    installed = {name: declared(name) for name in names if is_installed(name)}
    assert len(installed) > 100
    assert {n: text for n, text in installed.items() if not OWNED.search(text) or "GPL" in text} == {}
    assert f"none of the {len(names)} packages of `requirements.lock` declares the GPL" in README


def is_installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def test_a_wheel_carries_the_licence_and_says_which(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "dcp_fix").mkdir()
    shutil.copy(ROOT / "dcp_fix" / "__init__.py", tmp_path / "dcp_fix")
    code = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    info = tmp_path / done.stdout.split()[-1]
    said = (info / "METADATA").read_text().split("\n\n")[0].splitlines()
    assert {"License-Expression: Apache-2.0", "License-File: LICENSE"} <= set(said)
    assert (info / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_work_of_others_in_the_repository_has_its_licence_beside_it():
    """reveal.js, for the slides; the README names it."""
    reveal = ROOT / "notebooks" / "slides_assets" / "reveal"
    assert "Permission is hereby granted, free of charge" in (reveal / "LICENSE").read_text() and "reveal.js" in README
    others = {path for path in (ROOT / "notebooks").rglob("*.[jc]s*") if path.suffix in (".js", ".css")}
    assert others and all(path.is_relative_to(reveal) for path in others)
