"""Run the probes of one target in child processes with a time limit, and turn what happens to them into findings.

A child says, a JSON line each, on a pipe of its own: {"begin", "case", "control"} before anything that could hang or
crash, {"id", "verdict", "evidence"} of each probe that ended, {"end": true} last. The target's code runs there too and
may write to that pipe: a line of another form says nothing.

A child that hangs is killed with everything it started; one that crashes or leaves early is replaced for the probes
that are left. What the last line from it says decides the verdict: while loading code or in a control, the probe and
all that need the same code are `not-run`; in a case whose control has passed, the hang or crash is the defect.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from dcp_fix.base.errors import shown
from dcp_fix.base.process import ending
from dcp_fix.doctor.probes import PROBES, VERDICTS, Probe
from dcp_fix.doctor.probes.nccl import SETTINGS
from dcp_fix.doctor.target import Target

TIME_LIMIT = 60.0  # seconds for one target; it takes 3 to 5
MESSAGE_LIMIT = 1 << 20  # bytes that a child may report; it reports about 10 kB
EVIDENCE_LIMIT = 2000  # characters; the longest that a probe writes is 700
END = b'{"end": true}\n'
LEASH = 10.0  # seconds for a child to end what it started


@dataclass(frozen=True)
class Finding:
    """One row of the report."""

    id: str
    verdict: str
    evidence: str
    reference: str
    remedy: str


@dataclass(frozen=True)
class Begin:
    """A case that is about to run. In a `control` the target is asked for what every vLLM can do."""

    probe: str
    case: str
    control: bool


def finding(probe: Probe, verdict: str, evidence: str) -> Finding:
    """A row of the report; only a defect comes with a remedy."""
    return Finding(probe.id, verdict, evidence, probe.reference, probe.remedy if verdict == "defect" else "")


def probe_target(target: Target, *, fixes=(), time_limit: float = TIME_LIMIT, on_cpu: bool = False) -> list[Finding]:
    """Findings of all probes, in their order.

    `fixes`: probe ids that the plugin repairs before they run. `on_cpu`: the child sees no GPU.
    """
    told: dict[str, tuple[str, str]] = {}
    deadline, left = time.monotonic() + time_limit, list(PROBES)
    while left:
        request = dict(root=str(target.root), version=target.version, fixes=list(fixes))
        said, last, end = run_child(request, [probe.id for probe in left], deadline, on_cpu)
        told |= said
        left = [probe for probe in left if probe.id not in told]
        told |= blame(left, last, end)
        left = [probe for probe in left if probe.id not in told]
    return [finding(probe, *told[probe.id]) for probe in PROBES]


def blame(left: list[Probe], last: Begin | None, end: str) -> dict[str, tuple[str, str]]:
    """Verdicts for the probe that was running when the child ended, and for those that cannot do better."""
    running = next((probe for probe in left if last and probe.id == last.probe), None)
    if running is None:
        return {probe.id: ("not-run", f"the probe process {end} without a verdict") for probe in left}
    where = f"the target's code {end} in: {shown(last.case)}"
    if not last.control:
        return {running.id: ("defect", where)}
    return {probe.id: ("not-run", where) for probe in left if probe.code == running.code}


# --- what a child says ------------------------------------------------------------------------------------------------


def parse(text: bytes, asked: list[str]) -> tuple[dict[str, tuple[str, str]], Begin | None]:
    """({id: (verdict, evidence)} of the probes that were `asked` for, the last case that was begun and not ended)."""
    said, last = {}, None
    for line in text.decode("utf-8", errors="replace").splitlines():
        match value_of(line):
            case {"begin": str(probe), "case": str(case), "control": bool(control)} if probe in asked:
                last = Begin(probe, case, control)
            case {"id": str(probe), "verdict": str(verdict), "evidence": str(evidence)}:
                if probe in asked and verdict in VERDICTS:
                    said[probe] = (verdict, shown(evidence, EVIDENCE_LIMIT))
            case {"end": True}:
                last = None
    return said, last


def value_of(line: str):
    """The JSON value of a line, None where it has none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


# --- one child --------------------------------------------------------------------------------------------------------


def run_child(request: dict, probes: list[str], deadline: float, on_cpu: bool) -> tuple[dict, Begin | None, str]:
    """({id: (verdict, evidence)}, the last case that was begun, how the child ended)"""
    reader, writer = os.pipe()
    leash, held = os.pipe()
    settings = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    request = {**request, "probes": probes, "environment": settings}
    command = [sys.executable, "-P", "-m", "dcp_fix.doctor.child", str(leash), str(writer)]
    with os.fdopen(reader, "rb") as pipe, os.fdopen(held, "wb", buffering=0) as lifeline:
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[leash, writer], env=child_environment(on_cpu), start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(writer)
            os.close(leash)
        in_time, text = False, b""
        try:
            with contextlib.suppress(BrokenPipeError), child.stdin:
                child.stdin.write(json.dumps(request).encode())  # not as an argument, which other users can read
            text, in_time = read_until(pipe, deadline)
        finally:  # also when this process is interrupted
            end = finish(child, lifeline, in_time)
    return *parse(text, probes), end


def child_environment(on_cpu: bool) -> dict[str, str]:
    """Ours, without vLLM's and Triton's own settings, and with this package importable wherever we were started."""
    package = str(Path(__file__).parents[2])
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "TRITON_INTERPRET"))}
    path = os.pathsep.join(filter(None, [package, ours.get("PYTHONPATH")]))
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    return {**ours, **hidden, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def read_until(pipe, deadline: float) -> tuple[bytes, bool]:
    """(what arrived, whether it ended in time and within the limit). A grandchild may hold the pipe open after END."""
    text = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while len(text) < MESSAGE_LIMIT:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return text, False
            part = os.read(pipe.fileno(), 65536)
            text += part
            if not part or text.endswith(END):
                return text, True
    return text, False


def finish(child: subprocess.Popen, lifeline, in_time: bool) -> str:
    """How it ended, as the end of a sentence. It and what it started are gone afterwards, see base/leash.py."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=5 if in_time else 0)
    in_time = child.returncode is not None
    with contextlib.suppress(BrokenPipeError):
        lifeline.write(b".")
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=LEASH)
    with contextlib.suppress(ProcessLookupError):  # what is left where a target has killed its leash
        os.killpg(child.pid, signal.SIGKILL)
    code = child.wait()
    return ending(code) if in_time else "did not end within the time limit"
