"""One target in one child process: for each probe, which part of its code is loaded, repaired if asked, and judged.

Each part is loaded once, by the first probe that needs it. Importing this needs torch, and TRITON_INTERPRET set.
"""

import functools
from collections.abc import Callable
from pathlib import Path

from dcp_fix.doctor.attempt import NotRun, attempt, one_line
from dcp_fix.doctor.probes import (
    collective,
    dcp_layout,
    flashinfer,
    index_filter,
    kernel,
    kernel_run,
    layer,
    merge,
    mtp_lengths,
    pcp_partition,
    query_preparation,
    routing,
    scale_contract,
    slot_mapping,
    workspace,
    workspace_record,
)
from dcp_fix.doctor.stand_ins import complete_interpreter
from dcp_fix.doctor.world import World
from dcp_fix.repairs import launcher, repairs
from dcp_fix.repairs.repairs import KERNEL_DEFECTS

HELPERS = ("vllm.utils.", "vllm.envs", "vllm.v1.", "vllm.model_executor.warmup.")  # of the target, and harmless
Verdict = tuple[str, str]


class Session:
    """`request`: what child.py was told; `say` writes one message."""

    def __init__(self, request: dict, device: str, say: Callable[[dict], object]) -> None:
        self.root, self.version, self.device, self.say = Path(request["root"]), request["version"], device, say
        self.fixes, self.environment = request["fixes"], request["environment"]
        if device == "cpu":
            complete_interpreter()

    def run(self, probe: str) -> None:
        """One probe, and what it found."""

        def progress(case: str, control: bool = False) -> None:
            self.say({"begin": probe, "case": case, "control": control})

        progress("loading the target's code", control=True)
        try:
            outcome = attempt(functools.partial(RUN[probe], self, progress))
        except NotRun as reason:
            verdict, evidence = "not-run", str(reason)
        else:
            if outcome.raised:
                verdict = "not-run"
                evidence = f"the target's code cannot be loaded or called: {one_line(outcome.raised)}"
            else:
                verdict, evidence = outcome.value
        self.say({"id": probe, "verdict": verdict, "evidence": evidence})

    def world(self, real: tuple[str, ...] = (), stand_ins: dict | None = None) -> World:
        return World(self.root, (*real, *HELPERS), stand_ins)

    @functools.cached_property
    def kernel_world(self) -> World:
        return self.world(kernel_run.KERNELS, kernel_run.STAND_INS)

    @functools.cached_property
    def launcher(self) -> Callable:
        """`fused_norm_rope`, ours if it is to be repaired. Call it while `kernel_world` is open: it imports late."""
        theirs = kernel_run.load_kernel(self.kernel_world).fused_norm_rope
        return launcher.launcher(theirs) if KERNEL_DEFECTS & set(self.fixes) else theirs


def on_kernel(probe: Callable) -> Callable:
    """A probe of probes/kernel.py as a function of (session, progress)."""

    def run(session: Session, progress: Callable) -> Verdict:
        with session.kernel_world:
            return probe(session.launcher, session.device, progress)

    return run


def in_world(probe: Callable, real: tuple[str, ...] = (), stand_ins: Callable[[], dict] = dict) -> Callable:
    """The same of a probe that takes (session, world, progress)."""

    def run(session: Session, progress: Callable) -> Verdict:
        with session.world(real, stand_ins()) as world:
            return probe(session, world, progress)

    return run


def combine_routing(session: Session, progress: Callable) -> Verdict:
    """The attention layer among recording collaborators."""
    collaborators = layer.Collaborators()
    with session.world(routing.ATTENTION, collaborators.stand_ins()) as world:
        attention = routing.load_attention(world)
        if "combine-routing" in session.fixes:
            repairs.route_attention(attention)
        return routing.combine_routing(attention, collaborators, progress)


def split_workspace(session: Session, progress: Callable) -> Verdict:
    """Measured on a GPU; without one the recorded result is quoted."""
    if session.device == "cpu":
        return "not-run", workspace_record.workspace_sentence(session.version)
    return workspace.split_workspace(workspace.load_op(session.root), progress)


def empty_rows(session: Session, world: World, progress: Callable) -> Verdict:
    return merge.empty_rows(merge.find_merges(world), session.device, progress)


def direct_a2a_layout(session: Session, world: World, progress: Callable) -> Verdict:
    return dcp_layout.direct_a2a_layout(dcp_layout.load_manager(world), progress)


def silent_collective(session: Session, world: World, progress: Callable) -> Verdict:
    """The communicators, one of which is disabled."""
    modules = collective.load_communicators(world)
    if "silent-collective" in session.fixes:
        repairs.refuse_disabled(modules[2])
    return collective.silent_collective(modules, session.environment, progress)


def flashinfer_workspace(session: Session, progress: Callable) -> Verdict:
    """How much workspace the FlashInfer backend would give its kernel."""
    with World(session.root, flashinfer.REAL, flashinfer.STAND_INS) as world:
        return flashinfer.flashinfer_workspace(world, progress)


def slots(session: Session, world: World, progress: Callable) -> Verdict:
    return slot_mapping.slot_mapping(slot_mapping.load_kernel(world), session.device, progress)


def ids(session: Session, world: World, progress: Callable) -> Verdict:
    """The read side against the write side."""
    loaded = index_filter.load_filter(world), slot_mapping.load_kernel(world)
    return index_filter.index_filter(*loaded, session.device, progress)


def lengths(session: Session, world: World, progress: Callable) -> Verdict:
    return mtp_lengths.mtp_lengths(mtp_lengths.load_builder(world), session.device, progress)


def partition(session: Session, world: World, progress: Callable) -> Verdict:
    return pcp_partition.pcp_partition(pcp_partition.load_manager(world), progress)


def queries(session: Session, progress: Callable) -> Verdict:
    """The attention layer with its own kernels, among recording collaborators."""
    collaborators = layer.Collaborators()
    with session.world(query_preparation.REAL, query_preparation.stand_ins(collaborators)) as world:
        attention = routing.load_attention(world)
        return query_preparation.query_preparation(attention, collaborators, session.device, progress)


RUN: dict[str, Callable] = {
    "query-rows": on_kernel(kernel.query_rows),
    "combine-routing": combine_routing,
    "k-rows": on_kernel(kernel.k_rows),
    "owner-only-writes": on_kernel(kernel.owner_only_writes),
    "split-workspace": split_workspace,
    "empty-rows": in_world(empty_rows),
    "silent-collective": in_world(silent_collective, collective.REAL, collective.stand_ins),
    "flashinfer-workspace": flashinfer_workspace,
    "direct-a2a-layout": in_world(direct_a2a_layout),
    "scale-contract": on_kernel(scale_contract.scale_contract),
    "slot-mapping": in_world(slots),
    "index-filter": in_world(ids, stand_ins=lambda: index_filter.STAND_INS),
    "mtp-lengths": in_world(lengths, stand_ins=lambda: mtp_lengths.STAND_INS),
    "pcp-partition": in_world(partition),
    "query-preparation": queries,
}
