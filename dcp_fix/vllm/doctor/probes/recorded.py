"""What split-workspace found on a GPU, for machines without one. Data: recorded_workspace.json."""

import json
from pathlib import Path

from dcp_fix.vllm.doctor.attempt import NotRun

RECORDED = Path(__file__).parent.parent / "recorded_workspace.json"


def load() -> dict:
    """{"hardware", "versions", "releases": {version: {"verdict", "evidence"}}}. NotRun for a damaged file of ours."""
    try:
        content = json.loads(RECORDED.read_text(encoding="utf-8"))
        if all(set(found) == {"verdict", "evidence"} for found in content["releases"].values()):
            return content
        why = "a release without verdict or evidence"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
    raise NotRun(f"dcp_fix's own {RECORDED.name} is damaged ({why}): install dcp_fix again")


def workspace_verdict(version: str | None) -> str:
    """The recorded verdict, `not-run` where there is none."""
    return load()["releases"].get(version, {"verdict": "not-run"})["verdict"]


def workspace_sentence(version: str | None) -> str:
    """The evidence of a `not-run` split-workspace probe."""
    release = load()["releases"].get(version)
    if release is None:
        return "needs a GPU; nothing is recorded for this release"
    return f"needs a GPU; recorded for {version} ({release['verdict']}): {release['evidence']}"
