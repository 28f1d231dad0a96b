"""The NCCL of this environment: which library vLLM's wrapper would load, which one is installed, and what each lacks.

Found where vLLM looks: VLLM_NCCL_SO_PATH, else whatever `libnccl.so.2` the loader gives, which is torch's own once
torch is imported. Nothing initialises a GPU. A newer NCCL beside the one that loads is of no use, so both are named.
"""

import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dcp_fix.doctor.attempt import attempt

SONAME = "libnccl.so.2"
DISABLE, PATH = SETTINGS = ("VLLM_DISABLE_PYNCCL", "VLLM_NCCL_SO_PATH")
TRUE = ("true", "1")  # what upstream takes for yes, in any case


@dataclass(frozen=True)
class Nccl:
    """The library that loads."""

    path: str
    version: str
    library: object


def disabled_by(environment: Mapping[str, str]) -> str | None:
    """The setting that switches the wrapper off, None if there is none."""
    value = environment.get(DISABLE, "")
    return f"{DISABLE}={value}" if value.lower() in TRUE else None


def loaded_nccl(environment: Mapping[str, str]) -> Nccl | None:
    """The library that vLLM would load here."""
    for path in [environment[PATH]] if environment.get(PATH) else [SONAME, *map(str, installed_nccl())]:
        library = attempt(lambda path=path: ctypes.CDLL(path))
        if not library.raised:
            return Nccl(file_of(path), version_of(library.value), library.value)
    return None


def version_of(library) -> str:
    """'2.29.7', as the library itself says."""
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def file_of(path: str) -> str:
    """The file of a library that is loaded under its name alone."""
    mapped = {line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps") if SONAME in line}
    return path if os.sep in path or not mapped else min(mapped)


def installed_nccl() -> list[Path]:
    """The libraries of the nvidia-nccl packages of this environment."""
    found = [Path(folder, "nvidia/nccl/lib", SONAME) for folder in sys.path]
    return [path for path in found if path.is_file()]


def describe(loaded: Nccl | None, missing: list[str], installed: list[Path]) -> str:
    """What is loaded, what it lacks, and what else is installed, as the end of a sentence."""
    others = [path for path in installed if loaded is None or path.resolve() != Path(loaded.path).resolve()]
    beside = "".join(f"; installed, and not the one that loads: {path}" for path in others)
    if loaded is None:
        return f"this environment has none that loads{beside}"
    enough = f"lacks {', '.join(missing)}: it will be disabled" if missing else "will do"
    return f"NCCL {loaded.version} here ({loaded.path}) {enough}{beside}"
