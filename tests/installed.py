"""What `make environments` installs: for each interpreter its packages once, checked by hash, shared by venvs.

Packages that rows vary (VARIED) lie in a folder each. A venv names in a .pth file the folders that it takes.
"""

import shutil
import subprocess
from pathlib import Path

from tests.tools.lock import HEADERS, locked

ROOT = Path(__file__).resolve().parent.parent
PINS = {name: version for file in HEADERS for name, version, _ in locked((ROOT / file).read_text())}
VARIED = ("torch", "triton", "numpy")


class NotHere(Exception):
    """This machine lacks what the row needs."""


class Place:
    """The folder that holds a clone, and for each interpreter its packages, each in a folder of its own."""

    def __init__(self, folder: Path, pythons: dict[str, str]) -> None:
        self.folder, self.pythons = folder, pythons
        self.checkout = self.clone(folder / "checkout")
        self.commit = run(["git", "-C", self.checkout, "rev-parse", "HEAD"]).stdout.strip()

    def clone(self, path: Path) -> Path:
        """A clone of the last commit, anew; a later one of the first clone, so that all rows run the same."""
        shutil.rmtree(path, ignore_errors=True)
        run(["git", "clone", "--quiet", getattr(self, "checkout", ROOT), path])
        return path

    def python(self, version: str) -> str:
        if version not in self.pythons:
            raise NotHere(f"no Python {version} on PATH")
        return self.pythons[version]

    def base(self, version: str) -> Path:
        """The venv that holds everything but the packages that rows vary."""
        venv = self.folder / version / "base"
        if not (venv / "whole").exists():
            run([self.python(version), "-m", "venv", "--clear", venv])
            names = [n for n, _, _ in locked((ROOT / "requirements.lock").read_text()) if n not in VARIED]
            run([*pip(venv), "--no-deps", "--require-hashes", "-r", self.part("requirements.lock", names)])
            (venv / "whole").touch()
        return venv

    def part(self, file: str, names: list[str]) -> Path:
        """A lock file with these entries of `file` only."""
        entries = [(n, v, h) for n, v, h in locked((ROOT / file).read_text()) if n in names]
        path = self.folder / f"part-of-{file}"
        path.write_text("".join(f"{n}=={v} {' '.join(f'--hash=sha256:{d}' for d in h)}\n" for n, v, h in entries))
        return path

    def package(self, python: str, name: str, version: str) -> Path:
        """A folder with this version, hash-checked if it is the pinned one; of torch with its libraries."""
        folder = self.folder / python / f"{name}-{version}"
        if not folder.exists():
            into = folder.with_name(folder.name + ".part")
            shutil.rmtree(into, ignore_errors=True)
            install = [*pip(self.base(python)), "--no-compile", "--upgrade", "--target", into]
            if version != PINS[name]:
                run([*install, *([] if name == "torch" else ["--no-deps"]), f"{name}=={version}"])
            else:
                run([*install, "--no-deps", "--require-hashes", "-r", self.part("requirements.lock", [name])])
                if name == "torch" and not list(into.glob("torch-*+cpu.dist-info")):
                    run([*install, "--no-deps", "--require-hashes", "-r", ROOT / "requirements-cuda.lock"])
            for other in set(VARIED) - {name}:  # what torch brought along: a row chooses it
                for path in [into / other, *into.glob(f"{other}-*.dist-info")]:
                    shutil.rmtree(path, ignore_errors=True)
            into.rename(folder)
        return folder

    def venv(self, row, venv: Path) -> Path:
        """A venv whose packages are those of the row; its interpreter."""
        run([self.python(row.python), "-m", "venv", "--clear", "--without-pip", venv])
        chosen = {name: getattr(row, name) for name in VARIED}
        parts = [self.package(row.python, name, version) for name, version in chosen.items() if version]
        parts += [site_packages(self.base(row.python))]
        (site_packages(venv) / "shared.pth").write_text("".join(f"{part}\n" for part in parts))
        return venv / "bin" / "python"


def pip(venv: Path) -> list:
    return [
        venv / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--only-binary=:all:",
    ]


def site_packages(venv: Path) -> Path:
    return next(venv.glob("lib/python3.*/site-packages"))


def run(command: list, **options) -> subprocess.CompletedProcess:
    """A step of the set-up; NotHere with its last line of error where it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "ERROR" in line or "rror:" in line] or [done.stderr[-200:]]
        raise NotHere(f"{' '.join(map(str, command[1:4]))}: {said[-1][:300]}")
    return done
