"""What makes two ranks do the same work: the code that they run and the checkpoint that they read."""

from pathlib import Path

import torch

import dcp_fix
from dcp_fix.base.equality import digest
from dcp_fix.records import machine


def code_terms() -> dict:
    """What makes two ranks run the same code: commit, the bytes of the sources, torch's version."""
    sha, dirty = machine.commit()
    folder = Path(dcp_fix.__file__).parent
    sources = sorted(folder.rglob("*.py"))
    listing = b"".join(str(p.relative_to(folder)).encode() + b"\0" + p.read_bytes() + b"\0" for p in sources)
    return {
        "commit": f"{sha}{'-dirty' if dirty else ''}",
        "sources": digest(listing)[:16],
        "torch": torch.__version__,
    }


def checkpoint_terms(folder: Path) -> dict:
    """What makes two checkpoint folders the same, wherever they lie: the bytes of config and weights."""
    names = ("config.json", "model.safetensors")
    return {f"checkpoint {name}": digest((Path(folder) / name).read_bytes())[:16] for name in names}
