"""Probe 2: the target's own attention layer, run with recording collaborators.

The layer's `forward` is executed among stand-ins for projections, kernels, backend and DCP manager (layer.py). Runs:

    no DCP     the backend gets this rank's heads, its result goes to the output projection     (the control)
    PCP alone  the same                                                                          (the second control)
    pure DCP   the backend gets what `query_gather` returned (every head of the group), its (out, lse) goes to
               `combine`, and what `combine` returned goes to the output projection
    PCP+DCP    the same, with DCP/PCP times the local heads; skipped where the layer never asks for PCP

This file does not check the manager itself
(see merge.py), nor the dense prefill path, which needs no combine.
"""

import torch

from dcp_fix.doctor.attempt import NotRun, attempt, one_line
from dcp_fix.doctor.probes.layer import PADDED, Collaborators, Run
from dcp_fix.doctor.world import World

ATTENTION = ("vllm.models.deepseek_v32.attention", "vllm.models.deepseek_v32.nvidia.attention")


def load_attention(world: World):
    """The target's module that defines DeepseekV32Attention."""
    for name in ATTENTION:
        if world.path_of(name).with_suffix(".py").is_file():
            return world.load(name)
    raise NotRun(f"this vLLM has no fused DeepSeek-V3.2 attention layer: none of {', '.join(ATTENTION)} exists")


def forward(collaborators: Collaborators, attention_class, run: Run):
    """(faults, error) of one run; where it broke off, the faults until then."""
    collaborators.run = run
    outcome = attempt(lambda: run.layer(attention_class).forward(torch.arange(PADDED), torch.ones(PADDED, 8)))
    if outcome.raised and run.backend.query is None:
        return [], outcome.raised
    return run.faults(), outcome.raised


def combine_routing(attention, collaborators: Collaborators, progress) -> tuple[str, str]:
    """Probe 2, as (verdict, evidence)."""
    attention_class = getattr(attention, "DeepseekV32Attention", None)
    if attention_class is None:
        raise NotRun("unknown attention module: it no longer defines DeepseekV32Attention")

    def control(name, **sizes) -> Run:
        progress(name, control=True)
        faults, error = forward(collaborators, attention_class, run := Run(**sizes))
        if error or faults:
            why = one_line(error) if error else faults[0]
            raise NotRun(f"the control ({name}) fails, so nothing can be said about DCP: {why}")
        return run

    def judge(name, **sizes) -> list[str]:
        progress(name)
        faults, error = forward(collaborators, attention_class, Run(**sizes))
        if isinstance(error, AttributeError | TypeError):
            raise NotRun(f"{name}: the layer asks its collaborators for something new: {one_line(error)}")
        said = faults or ([one_line(error)] if error else [])
        return [f"{name}: {' and '.join(said)}"] if said else []

    control("no DCP")
    found = judge("pure DCP4", dcp=4, tp=4)
    if control("PCP2 without DCP", tp=2, pcp=2).use_pcp_read:
        found += judge("PCP2+DCP4 at TP2", dcp=4, tp=2, pcp=2)
        found += judge("PCP2+DCP2 at TP2", dcp=2, tp=2, pcp=2)
        good = "pure DCP4, PCP2+DCP4 and PCP2+DCP2 gather every head they attend with and combine every partial"
    else:
        good = "pure DCP4 gathers every head and combines every partial; this layer does not know PCP"
    return ("defect" if found else "ok"), "; ".join(found) or good
