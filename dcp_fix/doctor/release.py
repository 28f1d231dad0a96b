"""A published release: its wheel, downloaded once into a cache folder."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from dcp_fix.base.errors import shown
from dcp_fix.doctor.target import TargetError

# What releases from 0.12.0 on are tagged with.
WHEEL_PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (28, 31, 34, 35, 39)) + (
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
UNREACHABLE = re.compile(
    "NewConnectionError|Failed to establish|Name or service not known|name resolution|ProxyError|Connection refused|"
    "ConnectTimeout|Read timed out|ReadTimeoutError|Max retries|SSLError|Network is unreachable",
    re.IGNORECASE,
)
FULL = re.compile(r"No space left|Disk quota|Read-only file system", re.IGNORECASE)


def cache_folder() -> Path:
    """Where wheels are kept: $DCP_FIX_CACHE, else dcp_fix under $XDG_CACHE_HOME or ~/.cache.

    Raises TargetError for a user without a home.
    """
    if override := os.environ.get("DCP_FIX_CACHE"):
        return Path(override)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dcp_fix"
    except RuntimeError as error:
        raise TargetError(f"no cache folder ({error}); set DCP_FIX_CACHE") from error


def fetch_release(version: str) -> Path:
    """The x86-64 wheel of that release (about 300 MB), from the cache folder or downloaded into it with pip."""
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9}){1,4}((a|b|rc)\d{1,9})?(\.post\d{1,9})?", version):
        raise TargetError(f"--release {shown(version)!r}: not a version like 0.29.0")
    cache = cache_folder()
    pattern = f"vllm-{version}-*x86_64.whl"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not any(cache.glob(pattern)):
            download(version, cache)
        found = sorted(cache.glob(pattern))
    except OSError as error:
        raise TargetError(f"the cache folder {cache}: {error.strerror or error}; set DCP_FIX_CACHE") from error
    if not found:
        raise TargetError(f"--release {version}: pip left no x86-64 wheel in {cache}")
    return found[0]


def download(version: str, cache: Path) -> None:
    """pip writes into a folder of its own, so that an interrupted download is never taken for a wheel."""
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--retries=2", "--timeout=20"]
        command += [f"--platform={platform}" for platform in WHEEL_PLATFORMS]
        run = subprocess.run([*command, "--dest", temporary, f"vllm=={version}"], capture_output=True, text=True)
        if run.returncode:
            raise TargetError(f"--release {version}: {refusal(version, cache, run.stderr)}")
        for path in Path(temporary).iterdir():
            path.replace(cache / path.name)


def refusal(version: str, cache: Path, said: str) -> str:
    """Why pip could not: no index, no space, or no such release."""
    last = shown((said.strip().splitlines() or ["pip gave no reason"])[-1])
    if FULL.search(said):
        return f"no space for its wheel in {cache} ({last}); set DCP_FIX_CACHE"
    if UNREACHABLE.search(said):
        return "the package index cannot be reached; see the network and the proxy, or give the wheel as a file"
    return f"pip could not download vllm=={version}: {last}"
