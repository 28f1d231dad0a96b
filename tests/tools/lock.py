"""`make lock`: requirements.lock, the pins of constraints.txt with the hash of every wheel that Linux may take.

    python -m tests.tools.lock [--index-url URL]         needs uv (pip install uv), which asks the index

`pip install --require-hashes -r requirements.lock` then refuses any other file; what only the CUDA build of torch needs
stands in requirements-cuda.lock. Wheels of Python 3.11 and 3.12 on x86_64 and aarch64 with glibc, and no source
archives: what those would build with has no hash. PyTorch's CPU builds come from an index of their own (pytorch.org),
so their hashes stand here, as that index lists them.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[2]
HEADERS = {
    "requirements.lock": """\
# Written by `make lock`: the pins of constraints.txt and the sha256 of each wheel of Python 3.11 and 3.12 on Linux.
#     pip install --require-hashes -r requirements.lock -r requirements-cuda.lock     torch as PyPI has it
#     pip install --require-hashes -r requirements.lock                               torch of pytorch.org's CPU index
#     pip install --no-deps --no-build-isolation --editable .
""",
    "requirements-cuda.lock": "# Written by `make lock`: what the CUDA build of torch brings; see requirements.lock.\n",
}
TORCH_CPU = {
    "2.13.0": (
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",  # cp311, x86_64
        "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",  # cp312, x86_64
        "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",  # cp311, aarch64
        "6f307c2c32d764ffc6ff6893b801fad6d4752f3e67966cb8abf1843427c02604",  # cp312, aarch64
    )
}
GLIBC = ("linux", "manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{n}" for n in range(5, 50)))
PLATFORMS = [f"{kind}_{machine}" for machine in ("x86_64", "aarch64") for kind in GLIBC]
OURS = {
    tag
    for python in ((3, 11), (3, 12))
    for tags in (cpython_tags(python, platforms=PLATFORMS), compatible_tags(python, platforms=PLATFORMS))
    for tag in tags
}


def main() -> int:
    """Ask the index, write the file."""
    options = argparse.ArgumentParser()
    options.add_argument("--index-url", default="https://pypi.org/simple")
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "pylock.toml"
        command = ["uv", "pip", "compile", "--quiet", "--no-config", "--no-deps", "--universal", "--python-version"]
        command += ["3.11", "--format", "pylock.toml", "--output-file", str(found)]
        command += ["--index-url", options.parse_args().index_url, str(ROOT / "constraints.txt")]
        subprocess.run([sys.executable, "-m", *command], check=True)
        packages = tomllib.loads(found.read_text())["packages"]
    for file, header in HEADERS.items():
        wanted = [package for package in packages if file_of(package["name"]) == file]
        (ROOT / file).write_text(header + "".join(map(entry, wanted)))
    return 0


def file_of(name: str) -> str:
    """Which of the two files holds a package."""
    return "requirements-cuda.lock" if name.startswith(("cuda-", "nvidia-")) else "requirements.lock"


def entry(package: dict) -> str:
    """name==version and its hashes, in the order of their digits."""
    name, version = package["name"], package["version"]
    hashes = {wheel["hashes"]["sha256"] for wheel in package.get("wheels", ()) if fits(wheel)}
    if not hashes:
        raise SystemExit(f"error: {name} {version} has no wheel for Linux: pin another version in constraints.txt")
    hashes |= set(TORCH_CPU[version]) if name == "torch" else set()
    return f"{name}=={version}" + "".join(f" \\\n    --hash=sha256:{digest}" for digest in sorted(hashes)) + "\n"


def fits(wheel: dict) -> bool:
    """Whether one of our Pythons takes it on Linux with glibc."""
    return not OURS.isdisjoint(parse_wheel_filename(wheel["url"].rpartition("/")[2].replace("%2B", "+"))[3])


def locked(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """(name, version, hashes) of each entry of such a file."""
    for block in re.split(r"\n(?=\S)", re.sub(r"^#.*\n", "", text, flags=re.M).strip()):
        name, version = re.match(r"(\S+)==(\S+)", block).groups()
        yield name, version, re.findall(r"--hash=sha256:([0-9a-f]{64})(?= \\\n|$)", block)


if __name__ == "__main__":
    sys.exit(main())
