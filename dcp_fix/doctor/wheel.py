"""Unpack what the probes need of a vLLM wheel, whatever the file holds.

Every read has a bound, whatever sizes the file declares. What is not a vLLM wheel is named for what it is: a damaged
one, another project's, an sdist. The compiled op is unpacked only where there is a GPU to run it on.

Not checked: signatures, and hashes beyond the CRC of each member that is read.
"""

import errno
import lzma
import re
import struct
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from dcp_fix.base.errors import shown
from dcp_fix.doctor.target import LONGEST, METADATA_VERSION, TargetError, version_from

# Folders, and single files, of which the probes load or read modules.
NEEDED = (
    "vllm/__init__.py",
    "vllm/_version.py",
    "vllm/distributed/device_communicators/",
    "vllm/engine/arg_utils.py",
    "vllm/envs.py",
    "vllm/model_executor/models/config.py",
    "vllm/model_executor/models/registry.py",
    "vllm/model_executor/warmup/",
    "vllm/models/deepseek_v32/",
    "vllm/third_party/flashmla/",
    "vllm/utils/",
    "vllm/v1/",
)
COMPILED = "vllm/_flashmla_C.abi3.so"
UNPACKED_LIMIT = 64 << 20  # bytes; the modules above are 12 MB in 0.33.0
COMPILED_LIMIT = 1 << 30
GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
DAMAGED = "damaged or truncated wheel ({}); delete it and fetch it again"
DAMAGE = (
    zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, NotImplementedError,
    RuntimeError, ValueError, OverflowError, MemoryError, IndexError, KeyError, AttributeError,
)  # fmt: skip


def unpack(path: Path, destination: Path) -> str:
    """Unpack what is needed of the wheel at `path` into the folder `destination`; returns its version."""
    try:
        if not zipfile.is_zipfile(path):
            raise TargetError(what_else(path))
        with zipfile.ZipFile(path) as archive:
            version = version_in(archive)
            for member in wanted(archive):
                write(archive, member, destination / member.filename)
            return version
    except TargetError as error:
        raise TargetError(f"{shown(path)}: {error}") from None
    except DAMAGE as error:
        raise TargetError(f"{shown(path)}: {DAMAGED.format(one_line(error))}") from error
    except OSError as error:
        raise TargetError(f"{shown(path)}: {reason(error, destination)}") from error


def one_line(error: Exception) -> str:
    """The type and text of an exception, short, nothing of it able to move the cursor."""
    return shown(" ".join(f"{type(error).__name__}: {error}".split()), 120)


def reason(error: OSError, destination: Path) -> str:
    """What an OSError says about the file, or about the place that it is unpacked into."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return f"cannot be unpacked into {destination}: {error.strerror}; free some space, or set TMPDIR"
    if error.errno == errno.EINVAL:  # a directory of members that points in front of the file
        return DAMAGED.format(one_line(error))
    return f"cannot be read ({error.strerror or error})"


def what_else(path: Path) -> str:
    """What a file is that is no zip archive."""
    with open(path, "rb") as file:
        start = file.read(8)
    if path.name.endswith((".tar.gz", ".tgz")) or start[:2] == b"\x1f\x8b":
        return "an sdist or another archive of sources, not a wheel; unpack it and give the folder"
    return DAMAGED.format("no zip archive")


# --- members ----------------------------------------------------------------------------------------------------------


def version_in(archive: zipfile.ZipFile) -> str:
    """As the METADATA of a vLLM wheel says it. TargetError for what is no vLLM."""
    names = set(archive.namelist())
    metadata = [n for n in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
    ours = [n for n in metadata if n.startswith("vllm-")]
    if len(ours) != 1 or "vllm/__init__.py" not in names:
        other = f"it is {shown(metadata[0].split('.dist-info')[0], 60)}" if metadata and not ours else "it holds"
        raise TargetError(f"not a vLLM wheel: {other} no vllm/__init__.py with one vllm-*.dist-info")
    version = version_from(read(archive, archive.getinfo(ours[0]), LONGEST, whole=False), METADATA_VERSION)
    if version is None:
        raise TargetError("not a vLLM wheel, its METADATA names no version")
    return version


def wanted(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The members to unpack: modules of NEEDED, and the compiled op where something could run it."""
    if unsafe := next((m.filename for m in archive.infolist() if not is_safe(m)), None):
        raise TargetError(f"refused, member {shown(unsafe)!r} would be written outside its folder")
    modules = [m for m in archive.infolist() if m.filename.startswith(NEEDED) and m.filename.endswith(".py")]
    size = sum(m.file_size for m in modules)
    if size > UNPACKED_LIMIT:
        raise TargetError(f"refused, {size} bytes to unpack where {UNPACKED_LIMIT} are allowed")
    gpu = any(Path(device).exists() for device in GPU_DEVICES)
    return modules + [m for m in archive.infolist() if gpu and m.filename == COMPILED]


def is_safe(member: zipfile.ZipInfo) -> bool:
    """A relative name of plain parts, and no symbolic link."""
    name = PurePosixPath(member.filename)
    link = (member.external_attr >> 16) & 0o170000 == 0o120000
    plain = not name.is_absolute() and ".." not in name.parts and not re.search(r"[\\:\x00-\x1f]", member.filename)
    return plain and not link


def read(archive: zipfile.ZipFile, member: zipfile.ZipInfo, limit: int, whole: bool = True) -> bytes:
    """At most `limit` bytes of a member. A compression that cannot be read in bounded steps is refused."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise TargetError(f"refused, {shown(member.filename)} is compressed as no wheel is")
    with archive.open(member) as file:
        content = file.read(limit)
        if whole and file.read(1):
            raise TargetError(f"refused, {shown(member.filename)} unpacks to more than {limit} bytes")
    return content


def write(archive: zipfile.ZipFile, member: zipfile.ZipInfo, place: Path) -> None:
    """One member as a file."""
    limit = COMPILED_LIMIT if member.filename == COMPILED else UNPACKED_LIMIT
    content = read(archive, member, min(limit, member.file_size))
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content)
