"""What is examined: the vLLM of this environment, a wheel, a site-packages folder, a checkout, or a release from PyPI.

`opened(spec)` gives a `Target` whose `root` holds `vllm/`. Of a wheel only the members that a probe may load are
unpacked, into a temporary folder; a folder is read where it lies. Nothing here imports or executes the target.

Raises TargetError, which names the path and what is wrong with it. It does not verify signatures or hashes of a wheel
beyond the CRC of each member that is read.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dcp_fix.errors import UserError

# Folders, and single files, of which the probes load modules. The compiled op is unpacked for the GPU probe.
NEEDED = (
    "vllm/__init__.py",
    "vllm/_flashmla_C.abi3.so",
    "vllm/_version.py",
    "vllm/config/",
    "vllm/distributed/device_communicators/",
    "vllm/envs.py",
    "vllm/model_executor/models/config.py",
    "vllm/model_executor/warmup/",
    "vllm/models/deepseek_v32/",
    "vllm/third_party/flashmla/",
    "vllm/utils/",
    "vllm/v1/",
)
UNPACKED_LIMIT = 64 << 20  # bytes; the members above are 12 MB in 0.33.0
WHEEL_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")


class TargetError(UserError):
    """The target cannot be read."""


@dataclass(frozen=True)
class Target:
    """`root` is the folder that holds `vllm/`; `version` is None where nothing says it."""

    name: str
    root: Path
    version: str | None


@contextlib.contextmanager
def opened(spec: str | None) -> Iterator[Target]:
    """`spec`: a path, or None for the vLLM of this environment."""
    if spec is None:
        yield installed()
    elif Path(spec).is_dir():
        yield folder(Path(spec))
    elif Path(spec).is_file():
        with tempfile.TemporaryDirectory(prefix="dcp-fix-doctor-") as temporary:
            yield wheel(Path(spec), Path(temporary))
    else:
        raise TargetError(f"{spec}: no such file or folder; give a vLLM wheel, a site-packages folder or a checkout")


def installed() -> Target:
    """The vLLM that `import vllm` would load, found without importing it."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise TargetError("no vLLM in this environment; give a wheel, a folder or --release 0.29.0")
    root = Path(found.submodule_search_locations[0]).parent
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = version_in(root)
    return Target("installed", root, version)


def folder(path: Path) -> Target:
    """A site-packages folder, a checkout, or the `vllm` folder inside one."""
    if path.name == "vllm" and (path / "__init__.py").is_file() and not (path / "vllm" / "__init__.py").is_file():
        path = path.absolute().parent
    if not (path / "vllm" / "__init__.py").is_file():
        raise TargetError(f"{path}: not a vLLM, it holds no vllm/__init__.py")
    return Target(str(path), path.resolve(), version_in(path))


def version_in(root: Path) -> str | None:
    """From the one vllm-*.dist-info, or vllm/_version.py, read as text."""
    metadata = sorted(root.glob("vllm-*.dist-info/METADATA"))
    for path, pattern in [*((m, METADATA_VERSION) for m in metadata), (root / "vllm/_version.py", SCM_VERSION)]:
        if path.is_file() and (found := pattern.search(path.read_text(encoding="utf-8", errors="replace"))):
            return found[1]
    return None


METADATA_VERSION = re.compile(r"^Version: (\S+)", re.MULTILINE)
SCM_VERSION = re.compile(r"^(?:__version__ = )?version = ['\"]([^'\"]+)['\"]", re.MULTILINE)


# --- wheels -----------------------------------------------------------------------------------------------------------


def wheel(path: Path, destination: Path) -> Target:
    """Unpack what the probes need of the wheel at `path` into `destination`."""
    try:
        with zipfile.ZipFile(path) as archive:
            version = check_members(path, archive)
            for member in archive.infolist():
                if member.filename.startswith(NEEDED) and not member.is_dir():
                    target = destination / member.filename
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(member))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise TargetError(f"{path}: damaged or truncated wheel ({error}); fetch it again") from error
    return Target(str(path), destination, version)


def check_members(path: Path, archive: zipfile.ZipFile) -> str:
    """The version. TargetError for a name that leaves the folder, for too much data, and for what is not vLLM."""
    unsafe = [m.filename for m in archive.infolist() if not is_safe(m)]
    if unsafe:
        raise TargetError(f"{path}: refused, member {unsafe[0]!r} would be written outside its folder")
    needed = [m for m in archive.infolist() if m.filename.startswith(NEEDED)]
    if (size := sum(m.file_size for m in needed)) > UNPACKED_LIMIT:
        raise TargetError(f"{path}: refused, {size} bytes to unpack where {UNPACKED_LIMIT} are allowed")
    metadata = [n for n in archive.namelist() if re.fullmatch(r"vllm-[^/]+\.dist-info/METADATA", n)]
    if len(metadata) != 1 or "vllm/__init__.py" not in archive.namelist():
        raise TargetError(f"{path}: not a vLLM wheel (no vllm/__init__.py with one vllm-*.dist-info)")
    found = METADATA_VERSION.search(archive.read(metadata[0]).decode("utf-8", errors="replace"))
    if not found:
        raise TargetError(f"{path}: not a vLLM wheel, its METADATA names no version")
    return found[1]


def is_safe(member: zipfile.ZipInfo) -> bool:
    """A relative name of plain parts, and no symbolic link."""
    name = PurePosixPath(member.filename)
    link = (member.external_attr >> 16) & 0o170000 == 0o120000
    plain = not name.is_absolute() and ".." not in name.parts and not re.search(r"[\\:\x00-\x1f]", member.filename)
    return plain and not link


# --- releases ---------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where wheels are kept: $DCP_FIX_CACHE, else dcp_fix under $XDG_CACHE_HOME or ~/.cache."""
    if override := os.environ.get("DCP_FIX_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dcp_fix"


def fetch_release(version: str) -> Path:
    """The x86-64 wheel of that release (about 300 MB), from the cache folder or downloaded into it with pip."""
    if not re.fullmatch(r"\d+(\.\d+)+((a|b|rc)\d+)?(\.post\d+)?", version):
        raise TargetError(f"--release {version!r}: not a version like 0.29.0")
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    pattern = f"vllm-{version}-*x86_64.whl"
    if not any(cache.glob(pattern)):
        download(version, cache)
    found = sorted(cache.glob(pattern))
    if not found:
        raise TargetError(f"--release {version}: pip left no x86-64 wheel in {cache}")
    return found[0]


def download(version: str, cache: Path):
    """pip writes into a folder of its own, so that an interrupted download is never taken for a wheel."""
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--retries=2", "--timeout=20"]
        command += [f"--platform={platform}" for platform in WHEEL_PLATFORMS]
        run = subprocess.run([*command, "--dest", temporary, f"vllm=={version}"], capture_output=True, text=True)
        if run.returncode:
            reason = (run.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise TargetError(f"--release {version}: pip could not download vllm=={version}: {reason}")
        for path in Path(temporary).iterdir():
            path.replace(cache / path.name)
