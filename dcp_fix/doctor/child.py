"""The child process: loads the target's code, runs the probes that it is told to, and reports line by line.

    python -P -m dcp_fix.doctor.child LIFELINE FD REQUEST

Started as two processes: one does the work, the other ends it and all that it started (base/leash.py). REQUEST is JSON:
{"root", "version", "probes": [ids], "fixes": [ids the plugin is to repair], "environment": {VLLM_*}}.
Each line written to file descriptor FD is JSON: {"begin": id, "case": text, "control": bool} before anything that could
hang or crash, {"id", "verdict", "evidence"} for each probe that ended, {"end": true} last. The target's own output goes
nowhere.
"""

import functools
import json
import os
import sys
from pathlib import Path


def main(channel: int, request: dict):
    """Run the requested probes and report through the file descriptor `channel`."""
    import torch  # before the target, so that it cannot stand in for it

    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any target module
    from dcp_fix.doctor.stand_ins import complete_interpreter

    if device == "cpu":
        complete_interpreter()
    with os.fdopen(channel, "w", buffering=1) as lines:
        session = Session(request, device, lambda message: lines.write(json.dumps(message) + "\n"))
        for probe in request["probes"]:
            session.run(probe)
        session.say({"end": True})


class Session:
    """One target in one process. Each part of its code is loaded once, by the first probe that needs it."""

    def __init__(self, request, device, say):
        self.root, self.version, self.device, self.say = Path(request["root"]), request["version"], device, say
        self.fixes, self.environment, self.loaded = request["fixes"], request["environment"], {}

    def run(self, probe: str):
        from dcp_fix.doctor.attempt import NotRun, attempt, one_line

        def progress(case, control=False):
            self.say({"begin": probe, "case": case, "control": control})

        progress("loading the target's code", control=True)
        try:
            outcome = attempt(functools.partial(RUN[probe], self, progress))
        except NotRun as reason:
            self.say({"id": probe, "verdict": "not-run", "evidence": str(reason)})
            return
        if outcome.raised:
            evidence = f"the target's code cannot be loaded or called: {one_line(outcome.raised)}"
            self.say({"id": probe, "verdict": "not-run", "evidence": evidence})
        else:
            verdict, evidence = outcome.value
            self.say({"id": probe, "verdict": verdict, "evidence": evidence})

    def world(self, real, stand_ins=None):
        from dcp_fix.doctor.world import World

        return World(self.root, real, stand_ins)

    # --- the parts of the target ---

    @functools.cached_property
    def kernel_world(self):
        from dcp_fix.doctor.probes.kernel_run import HELPERS, KERNELS, STAND_INS

        return self.world((*KERNELS, *HELPERS), STAND_INS)

    @functools.cached_property
    def launcher(self):
        """`fused_norm_rope`, ours if it is to be repaired. Call it while `kernel_world` is open: it imports late."""
        from dcp_fix.doctor.probes.kernel_run import load_kernel

        loaded = load_kernel(self.kernel_world)
        if {"query-rows", "k-rows", "owner-only-writes"} & set(self.fixes):
            from dcp_fix.repairs.launcher import launcher

            return launcher(loaded.fused_norm_rope)
        return loaded.fused_norm_rope

    @functools.cached_property
    def op(self):
        from dcp_fix.doctor.probes import workspace

        return workspace.load_op(self.world, self.root)


# --- one function per probe -------------------------------------------------------------------------------------------


def on_kernel(name):
    """The probe `name` of probes/kernel.py, as a function of (session, progress)."""

    def run(session, progress):
        from dcp_fix.doctor.probes import kernel

        with session.kernel_world:
            return getattr(kernel, name)(session.launcher, session.device, progress)

    return run


def combine_routing(session, progress):
    """Load the attention layer among recording collaborators, route it if asked, and watch it."""
    from dcp_fix.doctor.probes import routing
    from dcp_fix.doctor.probes.kernel_run import HELPERS
    from dcp_fix.doctor.probes.layer import Collaborators

    collaborators = Collaborators()
    with session.world((*routing.ATTENTION, *HELPERS), collaborators.stand_ins()) as world:
        attention = routing.load_attention(world)
        if "combine-routing" in session.fixes:
            from dcp_fix.repairs import repairs

            repairs.route_attention(attention)
        return routing.combine_routing(attention, collaborators, progress)


def split_workspace(session, progress):
    """Measure on a GPU; quote the recorded result without one."""
    from dcp_fix.doctor.probes import workspace, workspace_record

    if session.device == "cpu":
        return "not-run", workspace_record.workspace_sentence(session.version)
    return workspace.split_workspace(session.op, progress)


def empty_rows(session, progress):
    """Run the merges; on a GPU ask the compiled kernel for its convention as well."""
    from dcp_fix.doctor.probes import merge
    from dcp_fix.doctor.probes.kernel_run import HELPERS

    with session.world(HELPERS) as world:
        merges = merge.find_merges(world)
        verdict, evidence = merge.empty_rows(merges, session.root, session.device, progress)
    if session.device == "cuda" and (session.root / "vllm/_flashmla_C.abi3.so").is_file():
        from dcp_fix.doctor.probes import workspace

        progress("the compiled kernel's LSE", control=True)
        evidence += f"; {workspace.convention(session.op)}"
    return verdict, evidence


def silent_collective(session, progress):
    """Load the communicators, guard them if asked, and call one that is disabled."""
    from dcp_fix.doctor.probes import collective
    from dcp_fix.doctor.probes.kernel_run import HELPERS

    with session.world((*collective.REAL, *HELPERS), collective.stand_ins()) as world:
        modules = collective.load_communicators(world)
        if "silent-collective" in session.fixes:
            from dcp_fix.repairs import repairs

            repairs.refuse_disabled(modules[2])
        return collective.silent_collective(modules, session.environment, progress)


def flashinfer_workspace(session, progress):
    """Ask the target's FlashInfer backend how much workspace it would give its kernel."""
    from dcp_fix.doctor.probes import flashinfer

    with session.world(flashinfer.REAL, flashinfer.STAND_INS) as world:
        return flashinfer.flashinfer_workspace(world, progress)


def direct_a2a_layout(session, progress):
    """Ask the target's DCP manager where it sends a strided partial output."""
    from dcp_fix.doctor.probes import dcp_layout
    from dcp_fix.doctor.probes.kernel_run import HELPERS

    with session.world(HELPERS) as world:
        return dcp_layout.direct_a2a_layout(dcp_layout.load_manager(world), progress)


RUN = {
    "query-rows": on_kernel("query_rows"),
    "combine-routing": combine_routing,
    "k-rows": on_kernel("k_rows"),
    "owner-only-writes": on_kernel("owner_only_writes"),
    "split-workspace": split_workspace,
    "empty-rows": empty_rows,
    "silent-collective": silent_collective,
    "flashinfer-workspace": flashinfer_workspace,
    "direct-a2a-layout": direct_a2a_layout,
}

if __name__ == "__main__":
    from dcp_fix.base.leash import leashed

    told = int(sys.argv[2]), json.loads(sys.argv[3])
    leashed(int(sys.argv[1]), lambda: main(*told), keep=told[0])
