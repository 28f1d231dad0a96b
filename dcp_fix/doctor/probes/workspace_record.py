"""What split-workspace found on a GPU, for machines without one. Data: recorded_workspace.json."""

from pathlib import Path
from typing import Literal

from dcp_fix.base.bounded import MIB, read_json
from dcp_fix.base.errors import UserError
from dcp_fix.base.schema import Schema, allowed, checked
from dcp_fix.doctor.attempt import NotRun
from dcp_fix.doctor.probes import VERDICTS

RECORDED = Path(__file__).parent.parent / "recorded_workspace.json"


class Found(Schema):
    """What was found of one release."""

    verdict: Literal[VERDICTS] = allowed(f"one of {', '.join(VERDICTS)}")
    evidence: str = allowed("text")


class Content(Schema):
    """The whole file."""

    command: str = allowed("a command line")
    hardware: str = allowed("a GPU's name")
    versions: dict[str, str] = allowed("an object of versions")
    releases: dict[str, Found] = allowed("an object: a verdict and its evidence by version")


def load() -> dict:
    """{"hardware", "versions", "releases": {version: {"verdict", "evidence"}}}. NotRun for a damaged file of ours."""
    try:
        content = read_json(RECORDED, MIB)
        checked(Content, content, RECORDED.name)
        return content
    except (UserError, FileNotFoundError) as error:
        why = str(error).split("\n")[0]
        raise NotRun(f"dcp_fix's own {RECORDED.name} is damaged ({why}): install dcp_fix again") from None


def workspace_verdict(version: str | None) -> str:
    """The recorded verdict, `not-run` where there is none."""
    return load()["releases"].get(version, {"verdict": "not-run"})["verdict"]


def workspace_sentence(version: str | None) -> str:
    """The evidence of a `not-run` split-workspace probe."""
    release = load()["releases"].get(version)
    if release is None:
        return "needs a GPU; nothing is recorded for this release"
    return f"needs a GPU; recorded for {version} ({release['verdict']}): {release['evidence']}"
