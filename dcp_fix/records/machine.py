"""What a run happened on: hardware, driver, versions, commit and command, as a record names them.

Nothing here fails where something is absent: no GPU, driver, git checkout or triton is a fact, written as None.
"""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch


def hardware() -> dict:
    """CPU model, cores usable by this process, GPU names in order, and the driver's version (None without a GPU)."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpus,
        "driver": driver() if gpus else None,
    }


def cpu_model() -> str:
    """The CPU's name as Linux gives it, else what Python knows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def driver() -> str | None:
    """The NVIDIA driver's version, or None where nvidia-smi is absent or fails."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = (output_of(query) or "").split()
    return lines[0] if lines else None


def versions() -> dict:
    """Versions of Python, torch, triton and of the CUDA that torch was built for (None where there is none)."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "cuda": torch.version.cuda,
    }


def commit() -> tuple[str | None, bool | None]:
    """The commit of this source tree and whether tracked files differ from it; (None, None) outside a git checkout.

    A copy of the tree that left its .git behind can be told: DCP_FIX_COMMIT=<sha>, with "-dirty" appended if it is.
    """
    told = os.environ.get("DCP_FIX_COMMIT")
    if told:
        return told.removesuffix("-dirty"), told.endswith("-dirty")
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None, None
    sha = output_of(["git", "-C", str(root), "rev-parse", "HEAD"])
    if sha is None:
        return None, None
    changes = output_of(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return sha.strip(), None if changes is None else bool(changes)


def output_of(command: list[str]) -> str | None:
    """Standard output of a short command, or None if it is not installed or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def command_line() -> str:
    """This process's command, quoted for a shell; program and absolute paths by their name, without the folder."""
    program = Path(sys.argv[0])
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name
    return " ".join([name, *(shlex.quote(without_folder(word)) for word in sys.argv[1:])])


def without_folder(word: str) -> str:
    """An absolute path, or the value of an option that is one, by its name.

    >>> without_folder("/elsewhere/r.json"), without_folder("--record=/elsewhere/r.json"), without_folder("tests/gpu")
    ('r.json', '--record=r.json', 'tests/gpu')
    """
    option, equals, value = word.rpartition("=")
    return option + equals + (Path(value).name if Path(value).is_absolute() else value)
