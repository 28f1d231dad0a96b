"""Run the probes of one target in child processes with a time limit, and turn what happens to them into findings.

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
from dcp_fix.doctor.messages import END, Begin, parse
from dcp_fix.doctor.probes import PROBES, VERDICTS, Probe
from dcp_fix.doctor.target import Target

TIME_LIMIT = 60.0  # seconds for one target; it takes 3 to 5
MESSAGE_LIMIT = 1 << 20  # bytes that a child may report; it reports about 10 kB
LEASH = 10.0  # seconds for a child to end what it started


@dataclass(frozen=True)
class Finding:
    """One row of the report."""

    id: str
    verdict: str
    evidence: str
    reference: str
    remedy: str

    def __post_init__(self):
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict {self.verdict!r} is none of {VERDICTS}")


def finding(probe: Probe, verdict: str, evidence: str) -> Finding:
    """A row of the report; only a defect comes with a remedy."""
    return Finding(probe.id, verdict, evidence, probe.reference, probe.remedy if verdict == "defect" else "")


def probe_target(
    target: Target, *, fixes=(), serve_args=None, time_limit: float = TIME_LIMIT, on_cpu: bool = False
) -> list[Finding]:
    """Findings of all eight probes, in their order.

    `fixes`: probe ids that the plugin repairs before they run. `on_cpu`: the child sees no GPU.
    """
    told = configuration(target, serve_args)
    deadline = time.monotonic() + time_limit
    left = [probe for probe in PROBES if probe.id not in told]
    while left:
        request = dict(root=str(target.root), version=target.version, fixes=list(fixes), on_cpu=on_cpu)
        said, last, end = run_child(request, [probe.id for probe in left], deadline)
        told |= said
        left = [probe for probe in left if probe.id not in told]
        if left:
            told |= blame(left, last, end)
            left = [probe for probe in left if probe.id not in told]
    return [finding(probe, *told[probe.id]) for probe in PROBES]


def configuration(target: Target, serve_args) -> dict:
    """The one probe that runs nothing of the target, so it needs no child."""
    if serve_args is None:
        return {"configuration": ("not-run", 'needs the arguments of `vllm serve`: --serve-args "..."')}
    from dcp_fix.doctor.probes.arguments import checked
    from dcp_fix.doctor.probes.configuration import configuration

    return {"configuration": configuration(checked(serve_args), target.root)}


def blame(left: list[Probe], last: Begin | None, end: str) -> dict:
    """Verdicts for the probe that was running when the child ended, and for those that cannot do better."""
    running = next((probe for probe in left if last and probe.id == last.begin), None)
    if running is None:
        return {probe.id: ("not-run", f"the probe process {end} before it reported anything") for probe in left}
    where = f"the target's code {end} in: {shown(last.case)}"
    if not last.control:
        return {running.id: ("defect", where)}
    return {probe.id: ("not-run", where) for probe in left if probe.code == running.code}


# --- one child --------------------------------------------------------------------------------------------------------


def run_child(request: dict, probes: list[str], deadline: float) -> tuple[dict, Begin | None, str]:
    """({id: (verdict, evidence)}, the last case that was begun, how the child ended)"""
    reader, writer = os.pipe()
    leash, held = os.pipe()
    environment = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    request = {**request, "probes": probes, "environment": environment}
    command = [sys.executable, "-P", "-m", "dcp_fix.doctor.child", str(leash), str(writer), json.dumps(request)]
    with os.fdopen(reader, "rb") as pipe, os.fdopen(held, "wb", buffering=0) as lifeline:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[leash, writer],
                env=child_environment(request["on_cpu"]),
                start_new_session=True,
            )
        finally:
            os.close(writer)
            os.close(leash)
        in_time, text = False, b""
        try:
            text, in_time = read_until(pipe, deadline)
        finally:  # also when this process is interrupted
            end = finish(child, lifeline, in_time)
    return *parse(text, probes), end


def child_environment(on_cpu: bool) -> dict:
    """Ours, without vLLM's and Triton's own settings, and with this package importable wherever we were started."""
    package = str(Path(__file__).parents[2])
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "TRITON_INTERPRET"))}
    path = os.pathsep.join(filter(None, [package, ours.get("PYTHONPATH")]))
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    return {**ours, **hidden, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def read_until(pipe, deadline: float) -> tuple[bytes, bool]:
    """(what arrived, whether it ended in time and within the limit). A grandchild may hold the pipe open after END."""
    parts, size = [], 0
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while size < MESSAGE_LIMIT:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return b"".join(parts), False
            part = os.read(pipe.fileno(), 65536)
            if not part:
                return b"".join(parts), True
            parts.append(part)
            size += len(part)
            if part.endswith(END):
                return b"".join(parts), True
    return b"".join(parts), False


def finish(child: subprocess.Popen, lifeline, in_time: bool) -> str:
    """How it ended, as the end of a sentence. It and what it started are gone afterwards, see base/leash.py."""
    if in_time:
        try:
            child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            in_time = False
    with contextlib.suppress(BrokenPipeError):
        lifeline.write(b".")
    try:
        code = child.wait(timeout=LEASH)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        code = child.wait()
    if not in_time:
        return "did not end within the time limit"
    return ending(code) if code < 0 else f"ended the process (exit status {code})"
