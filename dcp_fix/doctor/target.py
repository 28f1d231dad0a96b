"""What is examined, and which version it is: the version of the code itself, not of what lies beside it.

A version is read as text, from `vllm/_version.py` and from the vllm-*.dist-info beside the package. Where they do not
agree the code's own word counts, and `Target.note` says so; several dist-info and no word of the code give no version.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from dcp_fix.base import bounded
from dcp_fix.base.errors import UserError, shown

METADATA_VERSION = re.compile(r"^Version:[ \t]*(\S+)", re.MULTILINE)
SCM_VERSION = re.compile(r"^(?:__version__ = )?version = ['\"]([^'\"\n]+)['\"]", re.MULTILINE)
LONGEST = 1 << 20  # bytes that are read of a file for its version


class TargetError(UserError):
    """The target cannot be read."""


@dataclass(frozen=True)
class Target:
    """`root` is the folder that holds `vllm/`; `version` is None where nothing says it; `note`: what else to know."""

    name: str
    root: Path
    version: str | None
    note: str | None = None


def version_of(root: Path) -> tuple[str | None, str | None]:
    """(version of the vLLM in `root`, a sentence where the files disagree)"""
    own = version_in(root / "vllm/_version.py", SCM_VERSION)
    beside = {v for path in sorted(root.glob("vllm-*.dist-info/METADATA")) if (v := version_in(path, METADATA_VERSION))}
    if own is None and len(beside) == 1:
        return beside.pop(), None
    others = sorted(v for v in beside if public(v) != public(own))
    if not others:
        return own, None
    if own is None:
        return None, f"which version it is cannot be told: beside it lie dist-info of {' and '.join(others)}"
    return own, f"its own files say {own}, and beside them lies dist-info of {' and '.join(others)}"


def public(version: str | None) -> str | None:
    """Without a local part: 0.30.0+cu129 is 0.30.0."""
    return version and version.partition("+")[0]


def version_in(path: Path, pattern: re.Pattern) -> str | None:
    """What `pattern` finds at the beginning of a file, printable; None where there is no regular file."""
    try:
        with os.fdopen(bounded.opened(path), "rb") as file:
            return version_from(file.read(LONGEST), pattern)
    except (OSError, UserError):
        return None


def version_from(content: bytes, pattern: re.Pattern) -> str | None:
    """What `pattern` finds in `content`."""
    found = pattern.search(content.decode("utf-8", errors="replace"))
    return shown(found[1], 60) if found else None
