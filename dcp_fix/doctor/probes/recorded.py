"""What was measured on a GPU for published releases, for machines that have none. Data: recorded_workspace.json."""

import json
from pathlib import Path

RECORDED = Path(__file__).parent.parent / "recorded_workspace.json"


def load() -> dict:
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def workspace_verdict(version: str | None) -> str:
    release = load()["releases"].get(version)
    return "not-run" if release is None else "defect" if release["always_allocates"] else "ok"


def workspace_sentence(version: str | None) -> str:
    """The evidence of a `not-run` split-workspace probe."""
    record = load()
    release = record["releases"].get(version)
    if release is None:
        return "needs a GPU; nothing is recorded for this release"
    what = "allocates accumulators although nothing is split" if release["always_allocates"] else "splits nothing"
    sizes = "; ".join(map(sentence, release["sizes"]))
    return f"needs a GPU; recorded on {record['hardware']} for {version}: it {what} ({sizes})"


def sentence(size: dict) -> str:
    return f"{size['peak_mib']} MiB peak for a {size['result_mib']} MiB result at {size['size']}"
