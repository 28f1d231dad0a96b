"""What vLLM's log of one boot says about the run: NCCL, attention backend, what the plugin did, the last error.

Only lines that releases have printed for long are looked for; one that is missing is None, and nothing is concluded
from it but for the plugin, whose lines are this package's own. The log is read line by line, wherever a line stands; of
a long line the beginning counts.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dcp_fix.base.errors import shown

LONGEST = 4096  # bytes of a line that are looked at
NCCL = re.compile(r"using nccl==([0-9][0-9.]*)")
BACKEND = re.compile(r"Using (?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]{3,40})(?: attention)? backend")
PLUGIN = "dcp_fix: "
ERROR = ("Error:", "Exception:", "Interrupt:")  # how the word ends that names an error
# What the front process says when another one has failed, and what says no more than the exit status.
SECOND_HAND = ("Engine core initialization failed", "EngineCore encountered an issue", "EngineDeadError", "WorkerProc")
COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")


def read(path: Path) -> dict:
    """{"nccl", "backend", "plugin": what the plugin said, each once, "error": the last one that is a cause}."""
    said: dict[str, Any] = {"nccl": None, "backend": None, "plugin": [], "error": None}
    second_hand = None
    for line in lines(path):
        for name, pattern in (("nccl", NCCL), ("backend", BACKEND)):
            if said[name] is None and (found := pattern.search(line)):
                said[name] = found[1]
        _, ours, rest = line.partition(PLUGIN)
        if ours and (words := shown(rest.strip())) not in said["plugin"]:
            said["plugin"].append(words)
        if error := error_in(line):
            first_hand = not any(phrase in error for phrase in SECOND_HAND)
            said["error"], second_hand = (error, second_hand) if first_hand else (said["error"], error)
    return said | {"error": said["error"] or second_hand}


def lines(path: Path) -> Iterator[str]:
    """The lines of a file, whatever bytes it holds, without colours."""
    with open(path, "rb") as file:
        while line := file.readline(LONGEST):
            yield COLOUR.sub("", line.decode("utf-8", errors="replace"))
            while len(line) == LONGEST and not line.endswith(b"\n"):
                line = file.readline(LONGEST)


def error_in(line: str) -> str | None:
    """`torch.OutOfMemoryError: CUDA out of memory`, if a line names an error and says more."""
    words = line.split()
    start = next((i for i, word in enumerate(words[:-1]) if word.endswith(ERROR)), None)
    return None if start is None else shown(" ".join(words[start:]))


def not_as_asked(said: dict, plugin: bool, put_back: tuple[str, ...] = (), ranks: int = 1) -> str | None:
    """Why the answers are not those of the rung: the plugin was not loaded, or was, or failed; or no NCCL."""
    off = any(line.startswith("switched off") for line in said["plugin"])
    if ranks > 1 and not said["nccl"]:
        return (
            "vLLM's log does not say that its NCCL wrapper has loaded a library: without one, reduce-scatter returns "
            "unwritten memory; name a newer libnccl.so.2 in VLLM_NCCL_SO_PATH (`pip install -U nvidia-nccl-cu13`)"
        )
    if plugin and (not said["plugin"] or off):
        return "vLLM did not load the plugin: is this package installed with its entry point where vLLM's workers run?"
    if failed := next((line for line in said["plugin"] if "cannot change" in line), None):
        return f"the plugin could not do what it is for: {failed}"
    if not plugin and any("applied to" in line for line in said["plugin"]):
        return "vLLM loaded the plugin although it was switched off"
    for name in put_back:
        if not any(line.startswith(f"{name.replace('-', '_')}_put_back applied") for line in said["plugin"]):
            return f"the plugin did not put {name} back: this vLLM does not import a module that it can be put into"
    return None
