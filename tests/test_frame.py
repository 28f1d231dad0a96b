"""The frame: what the metadata promises, what a fresh clone sets up, and the rules that hold for every file."""

import ast
import base64
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = sorted((ROOT / "dcp_fix").rglob("*.py"))
EXTRAS = ("lab", "test")  # what constraints.txt pins; vLLM brings its own torch


def requirements(*extras) -> list[Requirement]:
    """What pyproject.toml asks for, with these extras."""
    optional = PROJECT["optional-dependencies"]
    return [Requirement(line) for lines in (PROJECT["dependencies"], *(optional[e] for e in extras)) for line in lines]


def pins() -> dict[str, Version]:
    """constraints.txt as {name: version}."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    exact = [re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line) for line in lines]
    assert all(exact), f"not of the form name==version: {[line for line, m in zip(lines, exact, strict=True) if not m]}"
    return {canonicalize_name(m[1]): Version(m[2]) for m in exact}


def tracked_files() -> list[Path]:
    """The files that git tracks."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


# --- versions ---------------------------------------------------------------------------------------------------------


def test_torch_and_triton_are_the_pair_that_was_tested():
    assert pins()["torch"] == Version("2.13.0") and pins()["triton"] == Version("3.7.1")


def test_every_requirement_has_a_pin_that_satisfies_it():
    for requirement in requirements(*EXTRAS):
        pinned = pins()[canonicalize_name(requirement.name)]
        assert pinned in requirement.specifier, f"{requirement} does not admit the pin {pinned}"


def test_everything_that_they_bring_along_is_pinned():
    unpinned, seen, queue = set(), set(), requirements(*EXTRAS)
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(key)
        if name not in pins():
            unpinned.add(name)
        queue += brought_along(name, requirement.extras)
    assert not unpinned, f"add to constraints.txt: {sorted(unpinned)}"
    assert len(seen) > 50


def brought_along(name: str, extras) -> list[Requirement]:
    """What the installed distribution `name` requires, with those extras."""
    listed = [Requirement(line) for line in metadata.requires(name) or []]
    wanted = [{"extra": extra} for extra in ("", *extras)]
    needed = [r for r in listed if r.marker is None or any(r.marker.evaluate(w) for w in wanted)]
    for requirement in needed:
        requirement.marker = None
    return needed


def test_environment_yml_agrees_with_pyproject_and_constraints():
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    conda = {(r := Requirement(line)).name: r.specifier for line in listed if isinstance(line, str)}
    (pip,) = (entry["pip"] for entry in listed if isinstance(entry, dict))
    assert conda["python"] == SpecifierSet(PROJECT["requires-python"])
    assert pins()["jupyterlab"] in conda["jupyterlab"] and "pip" in conda
    *versions, package = pip
    assert package == f"--editable .[{','.join(EXTRAS)}]"
    exact = {(r := Requirement(line)).name: str(r.specifier) for line in versions}
    assert {"torch", "triton"} <= set(exact)
    assert exact == {name: f"=={pins()[name]}" for name in exact}
    assert "vllm" not in exact


def test_metadata_names_the_package_its_command_and_its_extras():
    assert PROJECT["name"] == "dcp_fix" and PROJECT["scripts"] == {"dcp-fix": "dcp_fix.cli:main"}
    assert set(PROJECT["optional-dependencies"]) == {"lab", "test", "vllm"}
    assert PROJECT["requires-python"] == ">=3.11,<3.13"
    assert "Apache License" in (ROOT / "LICENSE").read_text() and PROJECT["license"] == "Apache-2.0"


def test_every_data_file_of_the_package_is_installed_with_it():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["dcp_fix"]
    covered = {path for pattern in patterns for path in (ROOT / "dcp_fix").glob(pattern)}
    data = [p for p in tracked_files() if p.is_relative_to(ROOT / "dcp_fix") and p.suffix != ".py"]
    assert [str(p.relative_to(ROOT)) for p in data if p not in covered] == []


# --- set-up -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path):
    """The files that set-up reads, in a folder of their own."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(folder, *arguments):
    """Run make in `folder`, without the settings of a make that runs this test."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "MFLAGS"}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def test_set_up_happens_once_and_again_when_a_version_changes(clone):
    (clone / ".venv" / "bin").mkdir(parents=True)
    assert "pip install" in make(clone, "-n", "demo").stdout
    for made in ("bin/pip", ".core", ".all"):
        (clone / ".venv" / made).touch()
    for target in ("demo", "test"):
        assert "pip install" not in make(clone, "-n", target).stdout
    later = (clone / ".venv" / ".all").stat().st_mtime + 5
    for changed in ("pyproject.toml", "constraints.txt"):
        os.utime(clone / changed, (later, later))
        for target in ("demo", "test"):
            assert "pip install" in make(clone, "-n", target).stdout
        os.utime(clone / changed, (1, 1))


def test_torch_is_never_resolved_without_the_constraints(clone):
    for target in ("demo", "test", "lab"):
        installs = [line for line in make(clone, "-n", target).stdout.splitlines() if "pip install" in line]
        assert installs and all("--constraint constraints.txt" in line for line in installs)


@pytest.fixture
def python(clone):
    """Makes an interpreter that says it has the version asked for."""

    def pretend(version: str) -> Path:
        other = clone / f"python{version}"
        told = f"import sys; sys.version_info = ({version.replace('.', ', ')}, 0); exec(sys.argv[1])"
        other.write_text(
            f'#!/bin/sh\nif [ "$1" = --version ]; then echo Python {version}.0; exit; fi\n'
            f"if [ \"$1\" = -c ]; then exec '{sys.executable}' -c '{told}' \"$2\"; fi\n"
            "echo venv made by $0; exit 1\n"
        )
        other.chmod(0o755)
        return other

    return pretend


@pytest.mark.parametrize("version", ["3.10", "3.13", "3.14"])
def test_another_python_is_refused_by_its_version(clone, python, version):
    done = make(clone, f"PYTHON={python(version)}", "demo")
    assert done.returncode != 0
    assert "needs Python 3.11 or 3.12" in done.stderr and f"Python {version}.0" in done.stderr
    assert "make PYTHON=" in done.stderr and "venv made" not in done.stdout


@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_a_right_python_makes_the_venv(clone, python, version):
    other = python(version)
    assert f"venv made by {other}" in make(clone, f"PYTHON={other}", "demo").stdout


def test_a_right_python_is_found_by_itself(clone):
    plan = make(clone, "-n", "demo").stdout
    assert "for name in python3 python3.12 python3.11" in plan


def test_ci_runs_the_whole_suite():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    assert script.read_text().startswith("#!/usr/bin/env bash\n") and "\nmake test\n" in script.read_text()


# --- rules for every file ---------------------------------------------------------------------------------------------


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


def test_the_path_rule_sees_paths_and_only_those():
    slash = "/"
    for seen in ("home/ada/run.json", "root/.cache", "work/x", "Users/ada"):
        assert ABSOLUTE_PATH.search(f'"{slash}{seen}"') and ABSOLUTE_PATH.search(f"--json={slash}{seen}")
    for passed in ("https://example.org/home/ada", "docs/work/x", "$HOME/work/x", "./home/x", "and/or"):
        assert not ABSOLUTE_PATH.search(passed)


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


# A size modulo the DCP size asks whether it can be divided; a position modulo the DCP size asks who owns it.
SIZES = re.compile(r"(^|\.)(tp|tp_size|world_size|heads|num_heads|classes)$")


def ownership_arithmetic(source: str) -> list[str]:
    """The expressions that take something other than a size `% dcp`, also by divmod and remainder."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            left, right = ast.unparse(node.left), node.right
        elif (
            isinstance(node, ast.Call) and re.search(r"(divmod|remainder|fmod)$", ast.unparse(node.func)) and node.args
        ):
            left, right = ast.unparse(node.args[0]), node.args[-1]
        else:
            continue
        names = {n.id for n in ast.walk(right) if isinstance(n, ast.Name)}
        names |= {n.attr for n in ast.walk(right) if isinstance(n, ast.Attribute)}
        if any("dcp" in name.lower() for name in names) and not SIZES.search(left):
            found.append(ast.unparse(node))
    return found


def test_ownership_is_decided_in_one_place():
    elsewhere = {
        str(path.relative_to(ROOT)): found
        for path in SOURCES
        if path.name != "ownership.py" and (found := ownership_arithmetic(path.read_text()))
    }
    assert elsewhere == {}
    assert ownership_arithmetic((ROOT / "dcp_fix" / "ownership.py").read_text()), "the rule must see its own place"


@pytest.mark.parametrize(
    "code, seen",
    [
        ("p % dcp_size", True),
        ("(p // interleave) % self.dcp_size == r", True),
        ("p % (plan.dcp * interleave)", True),
        ("divmod(p, dcp)", True),
        ("torch.remainder(p, group.dcp_size)", True),
        ("if tp % dcp: raise", False),
        ("self.tp_size % dcp_size", False),
        ("p % block_size", False),
    ],
)
def test_the_ownership_rule_sees_it_however_it_is_written(code, seen):
    assert bool(ownership_arithmetic(code.replace("raise", "pass"))) is seen


def test_the_module_map_has_a_line_for_every_module():
    room, listed = "", []
    for line in (ROOT / "dcp_fix" / "README.md").read_text().splitlines():
        if heading := re.match(r"## (.*)", line):
            room = heading[1] if heading[1].endswith("/") else ""
        elif row := re.match(r"\| `([a-z_0-9]+(?:\.py|/))` \|", line):
            listed.append(room + row[1])
    package = ROOT / "dcp_fix"
    rooms = {f"{p.parent.name}/" for p in package.glob("*/__init__.py")}
    modules = {str(p.relative_to(package)) for p in [*package.glob("*.py"), *package.glob("*/*.py")]}
    modules |= {f"{p.parent.relative_to(package)}/" for p in package.glob("*/*/__init__.py")}
    assert sorted(listed) == sorted(m for m in modules if not re.search(r"__(init|main)__\.py$", m))
    assert rooms == {"ranks/", "engine/", "tiny/", "evidence/", "vllm/", "learn/"}


def test_the_picture_of_the_readme_is_what_the_first_page_drew():
    page = json.loads((ROOT / "notebooks" / "00_start_here.ipynb").read_text())
    drawn = next(o["data"]["image/png"] for c in page["cells"] for o in c.get("outputs", ()) if "data" in o)
    name = re.search(r"!\[[^]]+\]\((\S+\.png)\)", (ROOT / "README.md").read_text())[1]
    assert (ROOT / name).read_bytes() == base64.b64decode(drawn)
