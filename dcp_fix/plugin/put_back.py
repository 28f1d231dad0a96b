"""Historical defects put back into a vLLM that lacks them, in memory, through the same hooks as the plugin's repairs.

    query-norm         query rows of a token that another rank owns keep what lay in their memory      vLLM issue 50095
    combine-routing    a rank attends with its heads over its keys and returns that as the answer      vLLM issue 50095
    k-rows             dense K rows of a token that another rank owns keep what lay in their memory    vLLM issue 54907

DCP_FIX_PUT_BACK=query-norm,k-rows asks for them, for the ladder in real vLLM. They come after the repairs, so that a
rung has the defects that it names and no other. Semantics as in dcp_fix/broken.py: the function runs in full and the
rows that the defect left out get their former contents back. No row is chosen on the host, so CUDA graphs can be
captured. PCP takes other paths and is left alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from dcp_fix.repairs.repairs import ATTENTION, KERNELS

if TYPE_CHECKING:  # the plugin must not load torch before vLLM does
    import torch

HISTORY = ("query-norm", "combine-routing", "k-rows")  # in the order in which upstream repaired them
VARIABLE = "DCP_FIX_PUT_BACK"


def parse(text: str) -> tuple[str, ...]:
    """Names separated by commas or plus signs, in historical order. ValueError for one that is unknown."""
    names = [name.strip() for name in text.replace("+", ",").split(",") if name.strip()]
    for name in names:
        if name not in HISTORY:
            raise ValueError(f"'{name}' is no defect that can be put back: choose from {', '.join(HISTORY)}")
    return tuple(name for name in HISTORY if name in names)


def hooks(names: tuple[str, ...]) -> dict[str, list[Callable[[ModuleType], None]]]:
    """{module name: functions to call with that module}"""
    found = {module: [FUNCTIONS[name] for name in names] for module in ATTENTION if names}
    kernel = [FUNCTIONS[name] for name in names if name != "combine-routing"]
    return found | {module: kernel for module in KERNELS if kernel}


def query_norm_put_back(module: ModuleType) -> None:
    """Defect 1, on the launcher that the kernel module defines and the attention module has imported."""
    module.fused_norm_rope = forgetting(module.fused_norm_rope, "q_c_out")  # type: ignore[attr-defined]


def k_rows_put_back(module: ModuleType) -> None:
    """Defect 3, likewise."""
    module.fused_norm_rope = forgetting(module.fused_norm_rope, "k_pe_out", "kv_c_out")  # type: ignore[attr-defined]


def combine_routing_put_back(module: ModuleType) -> None:
    """Defect 2, on the manager of every layer that is made: a rank keeps its own heads and its own keys' answer."""
    attention = module.DeepseekV32Attention
    make = attention.__init__
    if getattr(make, "is_put_back", False):
        return

    @functools.wraps(make)
    def unrouted(self, *args, **kwargs):
        make(self, *args, **kwargs)
        manager = getattr(self, "dcp_manager", None)
        if manager is not None and not self.use_pcp:
            manager.query_gather = lambda query: query
            manager.combine = lambda partial_output, partial_lse, **metadata: partial_output.contiguous()

    unrouted.is_put_back = True  # type: ignore[attr-defined]
    attention.__init__ = unrouted


FUNCTIONS: dict[str, Callable[[ModuleType], None]] = {
    "query-norm": query_norm_put_back,
    "combine-routing": combine_routing_put_back,
    "k-rows": k_rows_put_back,
}


def forgetting(launcher: Callable, *outputs: str) -> Callable:
    """`launcher` whose `outputs` keep their former rows where the slot is negative; itself if it is so already."""
    done = getattr(launcher, "put_back", ())
    if set(outputs) <= set(done):
        return launcher
    names = list(inspect.signature(launcher).parameters)

    @functools.wraps(launcher)
    def forgetful(*args, **kwargs):
        call = {**dict(zip(names, args)), **kwargs}  # noqa: B905 the rest has defaults
        slots = call.get("slot_mapping")
        if slots is None:  # profiling, or PCP, which caches by itself
            return launcher(**call)
        if "q_c_out" in outputs and call.get("q_c_out") is None:
            call["q_c_out"] = unwritten(call["q_c"])
        before = {name: call[name].clone() for name in outputs if call.get(name) is not None}
        result = launcher(**call)
        for name, old in before.items():
            owned = slots[: len(old)] >= 0
            call[name].copy_(old.where(~owned.view(-1, *[1] * (old.ndim - 1)), call[name]))
        return result

    forgetful.put_back = (*done, *outputs)  # type: ignore[attr-defined]
    return forgetful


def unwritten(like: torch.Tensor) -> torch.Tensor:
    """Memory of the shape of `like` that nobody has written, as upstream's launcher takes it for its result."""
    import torch

    return torch.empty_like(like, memory_format=torch.contiguous_format)
