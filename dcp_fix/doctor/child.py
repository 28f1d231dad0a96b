"""The child process of the doctor: loads the target's code, runs the probes that it is told to, reports line by line.

    python -P -m dcp_fix.doctor.child LIFELINE FD        the request on standard input, the lines of runner.py into FD

Started as two processes: one does the work, the other ends it and all that it started (base/leash.py). The request is
JSON: {"root", "version", "probes": [ids], "fixes": [ids the plugin is to repair], "environment": {settings of NCCL}}.
The target's own output goes nowhere.
"""

import json
import os
import sys


def main(channel: int, request: dict) -> None:
    """Run the requested probes and report through the file descriptor `channel`."""
    import torch  # before the target, so that it cannot stand in for it

    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any target module
    from dcp_fix.doctor.session import Session

    with os.fdopen(channel, "w", buffering=1) as lines:
        session = Session(request, device, lambda message: lines.write(json.dumps(message) + "\n"))
        for probe in request["probes"]:
            session.run(probe)
        session.say({"end": True})


if __name__ == "__main__":
    from dcp_fix.base.leash import leashed

    told = int(sys.argv[2]), json.load(sys.stdin)
    leashed(int(sys.argv[1]), lambda: main(*told), keep=told[0])
