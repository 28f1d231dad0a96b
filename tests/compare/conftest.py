"""Short prompts for every test of compare."""

import pytest

from dcp_fix.compare import answers, endpoint, prompts

SHORT = {"96": (96, 3, 0), "160": (160, 4, 0), "128+96": (224, 5, 128)}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Short prompts and short answers."""
    monkeypatch.setattr(prompts, "CLASSES", SHORT)
    for module in (answers, endpoint, prompts):
        monkeypatch.setattr(module, "NEW_TOKENS", 12)
