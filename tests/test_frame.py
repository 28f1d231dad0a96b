"""The rules that hold for every file, and what a fresh clone sets up."""

import ast
import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "dcp_fix").rglob("*.py"))


def tracked_files() -> list[Path]:
    """The files that git tracks."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def make(folder, *arguments):
    """Run make in `folder`, without the settings of a make that runs this test."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "MFLAGS"}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("version, made", [("3.10", False), ("3.12", True), ("3.13", False)])
def test_a_venv_is_made_by_a_right_python_and_another_is_refused(tmp_path, version, made):
    """The interpreter is one that only says which version it has."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    python = tmp_path / "python"
    told = f"import sys; sys.version_info = ({version.replace('.', ', ')}, 0); exec(sys.argv[1])"
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo Python {version}.0; exit; fi\n'
        f"if [ \"$1\" = -c ]; then exec '{sys.executable}' -c '{told}' \"$2\"; fi\n"
        "echo venv made by $0; exit 1\n"
    )
    python.chmod(0o755)
    done = make(tmp_path, f"PYTHON={python}", ".venv/bin/pip")
    assert (f"venv made by {python}" in done.stdout) is made
    assert made or f"needs Python 3.11 or 3.12; '{python}' is Python {version}.0" in done.stderr


def test_import_leaves_what_is_heavy_alone():
    code = "import sys, dcp_fix; print({'torch', 'triton', 'numpy', 'typer'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == "set()", run.stderr


ABSOLUTE_PATH = re.compile(r"(?<![\w/.:~$}-])/(?:home|root|work|Users|workspace|mnt)/[\w.-]+")


def test_no_tracked_file_names_a_folder_of_somebodys_machine():
    here = {str(ROOT), str(Path.home())} - {"/", "/root"}
    found = []
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        hits = ABSOLUTE_PATH.findall(text) + [h for h in here if h + "/" in text]
        found += [f"{path.relative_to(ROOT)}: {hit}" for hit in hits]
    assert not found, "\n".join(found)


def documented(tree: ast.Module):
    """The module and its public functions and classes, as (name, docstring); kernels speak through their module's."""
    yield "module", ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                yield node.name, ast.get_docstring(node)


def test_public_functions_and_classes_have_docstrings():
    bare = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name, docstring in documented(ast.parse(path.read_text()))
        if not docstring
    ]
    assert not bare, "without a docstring:\n" + "\n".join(bare)


def test_every_folder_says_what_it_is():
    """Three lines at least: what it is, what it is not, where to begin."""
    rooms = (ROOT / "dcp_fix").glob("*/__init__.py")
    said = {path.parent.name: ast.get_docstring(ast.parse(path.read_text())) or "" for path in rooms}
    assert len(said) > 10 and [name for name, text in said.items() if len(text.splitlines()) < 3] == []


# A size modulo the DCP size asks whether it can be divided; a position modulo the DCP size asks who owns it.
SIZES = re.compile(r"(^|\.)(tp|tp_size|world_size|heads|num_heads|classes)$")


def ownership_arithmetic(source: str) -> list[str]:
    """The expressions that take something other than a size `% dcp`."""
    remainders = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod)]
    of_dcp = [node for node in remainders if "dcp" in ast.unparse(node.right).lower()]
    return [ast.unparse(node) for node in of_dcp if not SIZES.search(ast.unparse(node.left))]


def test_ownership_is_decided_in_one_place():
    elsewhere = {
        str(path.relative_to(ROOT)): found
        for path in SOURCES
        if path.name != "ownership.py" and (found := ownership_arithmetic(path.read_text()))
    }
    assert elsewhere == {}
    assert ownership_arithmetic((ROOT / "dcp_fix" / "ownership.py").read_text()), "the rule must see its own place"


def test_the_picture_of_the_readme_is_what_the_first_page_drew():
    page = json.loads((ROOT / "notebooks" / "00_start_here.ipynb").read_text())
    drawn = next(o["data"]["image/png"] for c in page["cells"] for o in c.get("outputs", ()) if "data" in o)
    name = re.search(r"!\[[^]]+\]\((\S+\.png)\)", (ROOT / "README.md").read_text())[1]
    assert (ROOT / name).read_bytes() == base64.b64decode(drawn)
