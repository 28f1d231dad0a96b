"""What vLLM's log of one boot says about the run: NCCL, attention backend, what the plugin did, the last error.

Only lines that releases have printed for long are looked for; one that is missing is None, and nothing is concluded
from it but for the plugin, whose lines are this package's own.
"""

import re
from pathlib import Path

TAIL = 1 << 22  # bytes from the end that are read; a boot writes some 50 kB
NCCL = re.compile(r"using nccl==([\d.]+)")
BACKEND = re.compile(r"Using (?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]{3,})(?: attention)? backend")
PLUGIN = re.compile(r"dcp_fix: (.+)")
ERROR = re.compile(r"\b([A-Za-z_.]*(?:Error|Exception|Interrupt)\b: .+)")
# What the front process says when another one has failed, and what says no more than the exit status.
SECOND_HAND = ("Engine core initialization failed", "EngineCore encountered an issue", "EngineDeadError", "WorkerProc")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def read(path: Path) -> dict:
    """{"nccl", "backend", "plugin": what the plugin said, each once, "error": the last one that is a cause}."""
    lines = [COLOUR.sub("", line) for line in tail(path)]
    return {
        "nccl": first(NCCL, lines),
        "backend": first(BACKEND, lines),
        "plugin": list(dict.fromkeys(found[1].strip() for line in lines if (found := PLUGIN.search(line)))),
        "error": last_error(lines),
    }


def tail(path: Path) -> list[str]:
    """The last lines of a file, whatever bytes it holds."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return file.read().decode("utf-8", errors="replace").splitlines()


def first(pattern: re.Pattern, lines: list[str]) -> str | None:
    """What the pattern finds first."""
    return next((found[1] for line in lines if (found := pattern.search(line))), None)


def last_error(lines: list[str]) -> str | None:
    """The last line that names an error at first hand; else at second hand."""
    errors = [found[1].strip() for line in lines if (found := ERROR.search(line))]
    causes = [error for error in errors if not any(phrase in error for phrase in SECOND_HAND)]
    return (causes or errors or [None])[-1]


def not_as_asked(said: dict, plugin: bool, put_back: tuple[str, ...]) -> str | None:
    """Why the answers are not those of the rung: the plugin was not loaded, or on the contrary, or put nothing back."""
    off = any(line.startswith("switched off") for line in said["plugin"])
    if plugin and (not said["plugin"] or off):
        return "vLLM did not load the plugin: is this package installed with its entry point where vLLM's workers run?"
    if not plugin and any("applied to" in line for line in said["plugin"]):
        return "vLLM loaded the plugin although it was switched off"
    for name in put_back:
        if not any(line.startswith(f"{name.replace('-', '_')}_put_back applied") for line in said["plugin"]):
            return f"the plugin did not put {name} back: this vLLM does not import a module that it can be put into"
    return None
