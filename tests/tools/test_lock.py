"""The supply chain: what is pinned is pinned by hash, and who owns what."""

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.tools.lock import HEADERS, TORCH_CPU, file_of, fits, locked

ROOT = Path(__file__).resolve().parents[2]
OWNED = re.compile(r"MIT|BSD|Apache|ISC|Python Software Foundation|PSF|MPL|Mozilla Public|Unlicense")


def entries() -> dict[str, tuple[str, list[str]]]:
    """Both lock files as {name: (version, hashes)}."""
    texts = [(ROOT / file).read_text() for file in HEADERS]
    return {canonicalize_name(name): (version, hashes) for text in texts for name, version, hashes in locked(text)}


def test_every_pin_has_hashes_and_nothing_else_has():
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M)
    assert {canonicalize_name(name): version for name, version in lines} == {n: v for n, (v, _) in entries().items()}
    assert all(hashes and len(set(hashes)) == len(hashes) for _, hashes in entries().values())
    assert all(file_of(name) == file for file in HEADERS for name, _, _ in locked((ROOT / file).read_text()))


def test_torch_has_the_hashes_of_both_indexes():
    version, hashes = entries()["torch"]
    assert set(TORCH_CPU[version]) < set(hashes) and len(hashes) == 2 * len(TORCH_CPU[version])


@pytest.mark.parametrize(
    "file, wanted",
    {
        "a-1-py2.py3-none-any.whl": True, "a-1-cp39-abi3-manylinux_2_28_x86_64.whl": True,
        "a-1-cp312-cp312-manylinux2014_aarch64.whl": True, "torch-1%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl": True,
        "a-1-cp313-abi3-manylinux_2_17_x86_64.whl": False, "a-1-cp310-cp310-manylinux_2_28_x86_64.whl": False,
        "a-1-cp311-cp311-musllinux_1_2_x86_64.whl": False, "a-1-cp311-cp311-macosx_14_0_arm64.whl": False,
    }.items(),
)  # fmt: skip
def test_wheels_that_our_pythons_take_on_linux(file, wanted):
    assert fits({"url": f"https://index/{file}"}) is wanted


def declared(name: str) -> str:
    """The licence that an installed distribution declares: an expression, classifiers or a line of text."""
    found = metadata.metadata(name)
    classes = [c.split(" :: ")[-1] for c in found.get_all("Classifier") or [] if c.startswith("License :: OSI")]
    return found.get("License-Expression") or "; ".join(classes) or (found.get("License") or "").split("\n")[0]


def test_nothing_that_is_needed_declares_the_gpl():
    """The CUDA libraries, which only PyPI's torch needs, are NVIDIA's."""
    installed = {canonicalize_name(found.metadata["Name"]) for found in metadata.distributions()}
    names = [name for name, _, _ in locked((ROOT / "requirements.lock").read_text()) if name in installed]
    licences = {name: declared(name) for name in names}
    assert len(licences) > 100
    assert {n: text for n, text in licences.items() if not OWNED.search(text) or "GPL" in text} == {}


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
    """reveal.js, for the slides."""
    reveal = ROOT / "notebooks" / "slides_assets" / "reveal"
    assert "Permission is hereby granted, free of charge" in (reveal / "LICENSE").read_text()
    others = {path for path in (ROOT / "notebooks").rglob("*.[jc]s*") if path.suffix in (".js", ".css")}
    assert others and all(path.is_relative_to(reveal) for path in others)
