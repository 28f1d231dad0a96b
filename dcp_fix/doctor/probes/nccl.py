"""The NCCL of this environment: which library vLLM's wrapper would load, which one is installed, and what each lacks.

Found where vLLM looks: VLLM_NCCL_SO_PATH, else whatever `libnccl.so.2` the loader gives, which is torch's own once
torch is imported. Nothing initialises a GPU. A newer NCCL beside the one that loads is of no use, so both are named.
"""

import ctypes
import ctypes.util
import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path

from dcp_fix.doctor.attempt import attempt

SONAME = "libnccl.so.2"
TRUE = ("true", "1")  # what upstream takes for yes, in any case


@dataclass(frozen=True)
class Nccl:
    """A library file and its version; `library` None for one that is installed and not loaded."""

    path: str
    version: str
    library: object = None


class _Place(ctypes.Structure):
    """`Dl_info` of dladdr(3)."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("at", ctypes.c_void_p),
    ]


def disabled_by(environment: dict) -> str | None:
    """The setting that switches the wrapper off, None if there is none."""
    value = environment.get("VLLM_DISABLE_PYNCCL", "")
    return f"VLLM_DISABLE_PYNCCL={value}" if value.lower() in TRUE else None


def loaded_nccl(environment: dict) -> Nccl | None:
    """The library that vLLM would load here."""
    named = environment.get("VLLM_NCCL_SO_PATH")
    candidates = (
        [named] if named else [SONAME, *(one.path for one in installed_nccl()), ctypes.util.find_library("nccl")]
    )
    for path in filter(None, candidates):
        library = attempt(lambda path=path: ctypes.CDLL(path))
        if not library.raised:
            return Nccl(file_of(library.value) or path, version_of(library.value), library.value)
    return None


def version_of(library) -> str:
    """'2.29.7', as the library itself says."""
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def file_of(library) -> str | None:
    """The file that a loaded library comes from."""
    place = _Place()
    found = attempt(
        lambda: ctypes.CDLL(None).dladdr(ctypes.cast(library.ncclGetVersion, ctypes.c_void_p), ctypes.byref(place))
    )
    return place.file.decode(errors="replace") if found.value and place.file else None


def installed_nccl() -> list[Nccl]:
    """The nvidia-nccl packages of this environment."""
    found = []
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata.get("Name") or ""
        if re.fullmatch(r"nvidia[-_]nccl[-_]cu\d+", name):
            place = Path(str(distribution.locate_file("nvidia/nccl/lib/libnccl.so.2")))
            if place.is_file():
                found.append(Nccl(str(place), distribution.version))
    return found


def describe(loaded: Nccl | None, missing: list[str], installed: list[Nccl]) -> str:
    """What is loaded, what it lacks, and what else is installed, as the end of a sentence."""
    others = [one for one in installed if loaded is None or not same_file(one.path, loaded.path)]
    beside = "".join(f"; installed, and not the one that loads: {one.version} at {one.path}" for one in others)
    if loaded is None:
        return f"this environment has none that loads{beside}"
    enough = f"lacks {', '.join(missing)}: it will be disabled" if missing else "will do"
    return f"NCCL {loaded.version} here ({loaded.path}) {enough}{beside}"


def same_file(a: str, b: str) -> bool:
    """Whether two paths are one file."""
    return Path(a).resolve() == Path(b).resolve()
