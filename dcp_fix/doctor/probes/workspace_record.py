"""What split-workspace found on a GPU, for machines without one. Data: recorded_workspace.json."""

import json
from pathlib import Path

RECORDED = Path(__file__).parent.parent / "recorded_workspace.json"


def load() -> dict:
    """{"hardware", "versions", "releases": {version: {"verdict", "evidence"}}}"""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def workspace_verdict(version: str | None) -> str:
    """The recorded verdict, `not-run` where there is none."""
    return load()["releases"].get(version, {"verdict": "not-run"})["verdict"]


def workspace_sentence(version: str | None) -> str:
    """The evidence of a `not-run` split-workspace probe."""
    release = load()["releases"].get(version)
    if release is None:
        return "needs a GPU; nothing is recorded for this release"
    return f"needs a GPU; recorded for {version} ({release['verdict']}): {release['evidence']}"
