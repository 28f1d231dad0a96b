"""The release matrix: what the doctor says of every published vLLM release since 0.26.0, recorded as data.

    python -m dcp_fix.doctor.matrix        records release_matrix.json anew (300 MB a release, kept in the cache);
                                           on a GPU recorded_workspace.json instead
    markdown()                             the recorded matrix as a table
    recorded_defects(root)                 defects of a vLLM whose files are those of a recorded release, else None

Verdicts on the kernel, the attention layer and the communicator depend on these files alone, so a vLLM is looked up by
the digests of its files, not by its version: a patched 0.30.0 is not 0.30.0.
"""

import hashlib
import json
import platform
import re
import sys
from dataclasses import asdict
from pathlib import Path

from dcp_fix.doctor.opening import opened
from dcp_fix.doctor.probes import PROBES
from dcp_fix.doctor.probes.workspace_record import RECORDED, workspace_verdict
from dcp_fix.doctor.reach import reach
from dcp_fix.doctor.release import fetch_release, pip
from dcp_fix.doctor.runner import probe_target
from dcp_fix.doctor.target import TargetError

MATRIX = Path(__file__).parent / "release_matrix.json"
FIRST = (0, 26, 0)
# The files that decide the probes which the plugin acts upon; a release has some of them.
DECISIVE = (
    "vllm/models/deepseek_v32/common/kernels.py",
    "vllm/models/deepseek_v32/nvidia/kernels.py",
    "vllm/models/deepseek_v32/attention.py",
    "vllm/models/deepseek_v32/nvidia/attention.py",
    "vllm/distributed/device_communicators/cuda_communicator.py",
    "vllm/distributed/device_communicators/pynccl.py",
)
SYMBOLS = {"ok": "ok", "defect": "**defect**", "not-applicable": "n/a", "not-run": "not run"}


def published_releases() -> list[str]:
    """Final releases from FIRST on, oldest first, as pip finds them."""
    status, said, why = pip("index", "versions", "vllm", "--only-binary=:all:")
    listed = re.search(r"Available versions: (.*)", said)
    if status or not listed:
        raise TargetError(f"pip lists no releases of vllm: {why}")
    versions = [v for v in listed[1].split(", ") if re.fullmatch(r"\d+\.\d+\.\d+", v)]
    return sorted((v for v in versions if numbers(v) >= FIRST), key=numbers)


def numbers(version: str) -> tuple[int, ...]:
    """'0.27.1' as (0, 27, 1)."""
    return tuple(map(int, version.split(".")))


def digests(root: Path) -> dict[str, str]:
    """SHA256 of the decisive files that `root` has."""
    return {
        name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in DECISIVE if (root / name).is_file()
    }


def entry(version: str) -> dict:
    """One release as the matrix holds it."""
    print(f"probing {version}", file=sys.stderr)
    with opened(str(fetch_release(version))) as target:
        probes = [asdict(probe) for probe in probe_target(target)]
        who, files = asdict(reach(target.root)), digests(target.root)
    return {"target": f"vllm=={version}", "version": version, "reach": who, "probes": probes, "files": files}


def record() -> None:
    """Without a GPU: probe every release and write the matrix. With one: the workspace of every release instead."""
    import torch
    import triton

    from dcp_fix.records.records import write_json

    versions = dict(python=platform.python_version(), torch=torch.__version__, triton=triton.__version__)
    result = {"command": "python -m dcp_fix.doctor.matrix", "versions": versions}
    entries = [entry(version) for version in published_releases()]
    if not torch.cuda.is_available():
        write_json(MATRIX, {**result, "releases": entries})
        return
    workspaces = {release["version"]: workspace_of(release) for release in entries}
    write_json(RECORDED, {**result, "hardware": torch.cuda.get_device_name(), "releases": workspaces})


def workspace_of(release: dict) -> dict:
    """The split-workspace part of a release's entry."""
    probe = next(probe for probe in release["probes"] if probe["id"] == "split-workspace")
    return {"verdict": probe["verdict"], "evidence": probe["evidence"]}


# --- reading it -------------------------------------------------------------------------------------------------------


def load() -> dict:
    """The committed matrix."""
    return json.loads(MATRIX.read_text(encoding="utf-8"))


def recorded_defects(root: Path) -> set[str] | None:
    """Probe ids with verdict `defect` of the recorded release with the same decisive files, None if there is none."""
    ours = digests(root)
    for release in load()["releases"]:
        if release["files"] == ours:
            return {probe["id"] for probe in release["probes"] if probe["verdict"] == "defect"}
    return None


def markdown() -> str:
    """A row per release, a column per probe; the workspace is what was recorded on a GPU.

    The second column says who runs the module that the probes of the kernel and of the attention layer look at.
    """
    ids = [probe.id for probe in PROBES]
    lines = [f"| vLLM | module reached | {' | '.join(ids)} |", "|" + " --- |" * (len(ids) + 2)]
    for release in load()["releases"]:
        verdicts = {probe["id"]: probe["verdict"] for probe in release["probes"]}
        verdicts["split-workspace"] = workspace_verdict(release["version"])
        cells = [release["version"], release["reach"]["short"], *(SYMBOLS[verdicts[name]] for name in ids)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    record()
