"""A published release: its wheel, downloaded once into a cache folder."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from dcp_fix.base.errors import shown
from dcp_fix.doctor.target import TargetError

DEADLINE_S = 1800.0  # for one call of pip; 300 MB at 170 kB a second
# What releases from 0.12.0 on are tagged with.
WHEEL_PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (28, 31, 34, 35, 39)) + (
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
# What pip says, and what it means; the first that fits.
MEANINGS = (
    (r"No space left|Disk quota|Read-only file system", "no space for the wheel; set DCP_FIX_CACHE"),
    (r"\b(401|403|407)\b.*(Error|Client)", "the package index asks for a password; give the wheel as a file"),
    (r"\b5\d\d\b.*(Error|Server)|too many 5\d\d error", "the package index fails (its error is 5xx); try later"),
    (
        "NewConnectionError|Failed to establish|Name or service not known|name resolution|ProxyError|SSLError|"
        "Connection refused|ConnectTimeout|Read timed out|ReadTimeoutError|Max retries|Network is unreachable",
        "the package index cannot be reached; see the network and the proxy, or give the wheel as a file",
    ),
)


VERSION = re.compile(r"v?(\d{1,9}(?:\.\d{1,9}){1,4})((?:a|b|rc)\d{1,9})?(\.post\d{1,9})?(?:\+[\w.]{1,40})?")


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


def normal(version: str) -> str:
    """As the index names it: 0.30, 0.30.0.0 and 0.30.0+cu129 are 0.30.0. Raises TargetError for what is no version."""
    found = VERSION.fullmatch(version)
    if not found:
        raise TargetError(f"--release {shown(version)!r}: not a version like 0.29.0")
    numbers = [int(part) for part in found[1].split(".")] + [0]
    while len(numbers) > 3 and not numbers[-1]:
        numbers.pop()
    return ".".join(map(str, numbers)) + (found[2] or "") + (found[3] or "")


def fetch_release(version: str) -> Path:
    """The x86-64 wheel of that release (about 300 MB), from the cache folder or downloaded into it with pip."""
    version, cache = normal(version), cache_folder()
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
    """pip works in a folder of its own, so that an interrupted download leaves nothing that passes for a wheel."""
    with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as temporary:
        platforms = [f"--platform={platform}" for platform in WHEEL_PLATFORMS]
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--retries=2", "--timeout=20", *platforms]
        status, _, why = pip("download", *options, "--dest", temporary, f"vllm=={version}", folder=temporary)
        if status:
            raise TargetError(f"--release {version}: {why}")
        for path in Path(temporary).glob("*.whl"):
            path.replace(cache / path.name)


def pip(*arguments: str, folder: str | None = None) -> tuple[int, str, str]:
    """(exit status, what it printed, why it failed). It asks nothing; `folder` holds its temporary files.

    Raises TargetError after DEADLINE_S. However this ends, pip and what it started are gone.
    """
    environment = {**os.environ, **({"TMPDIR": folder} if folder else {})}
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        env=environment, start_new_session=True,
    ) as run:  # fmt: skip
        try:
            said, errors = run.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise TargetError(f"pip did not end within {DEADLINE_S:.0f} s; give the wheel as a file") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    return run.returncode, said, reason(errors)


def reason(said: str) -> str:
    """Why pip could not, from its errors: its last one, and what that means where it is known."""
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith("[notice]")]
    last = next((line for line in reversed(lines) if "ERROR" in line), (lines or ["it gave no reason"])[-1])
    meant = next((means for pattern, means in MEANINGS if re.search(pattern, said, re.IGNORECASE)), None)
    return f"{meant} (pip: {shown(last.strip())})" if meant else f"pip could not: {shown(last.strip())}"
