"""The repairs of a vLLM that lacks them, each a function of one of its modules.

    replace_launcher      `fused_norm_rope` becomes ours, under upstream's signature of that release
    route_attention       pure DCP gathers the query heads and combines the partial outputs
    guard_communicator    reduce_scatter raises when NCCL was not loaded

Not here: when they are applied and to whom (plugin.py).
"""

import functools
import importlib
import os
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType

from dcp_fix.repairs.launcher import UnsupportedRelease, launcher

KERNELS = ("vllm.models.deepseek_v32.common.kernels", "vllm.models.deepseek_v32.nvidia.kernels")
ATTENTION = ("vllm.models.deepseek_v32.attention", "vllm.models.deepseek_v32.nvidia.attention")
COMMUNICATOR = "vllm.distributed.device_communicators.cuda_communicator"
SWITCH = "DCP_FIX_PLUGIN"
OFF = ("0", "false", "off", "no")


def kept_out(environment: Mapping[str, str] = os.environ) -> str | None:
    """Why vLLM, started in this environment, would repair nothing: an assignment that says so; None if it would."""
    if environment.get(SWITCH, "1").lower() in OFF:
        return f"{SWITCH}={environment[SWITCH]}"
    allowed = environment.get("VLLM_PLUGINS")
    return None if allowed is None or "dcp_fix" in allowed.split(",") else f"VLLM_PLUGINS={allowed}"


def replace_launcher(module: ModuleType) -> None:
    """Our launcher under the name that the kernel module defines and the attention module has imported."""
    module.fused_norm_rope = launcher(module.fused_norm_rope)  # type: ignore[attr-defined]


def route_attention(module: ModuleType) -> None:
    """Pure DCP in DeepseekV32Attention goes through gather and combine, whatever the layer does of it by itself."""
    attention = module.DeepseekV32Attention
    forward = attention.forward
    if getattr(forward, "is_dcp_fix", False):
        return

    @functools.wraps(forward)
    def routed(self, *args, **kwargs):
        if self.impl.dcp_world_size > 1 and not self.use_pcp and not hasattr(self.impl, "dcp_fix_routing"):
            self.impl.dcp_fix_routing = Routing(self)
        return forward(self, *args, **kwargs)

    routed.is_dcp_fix = True  # type: ignore[attr-defined]
    attention.forward = routed


class Routing:
    """Stands around one layer's backend and manager so that gather and combine happen once, in one place.

    The backend's `forward_mqa` gathers the query unless the layer has done so, and combines what comes out. A combine
    that the layer asks for afterwards gets the combined output back. Both tensors are known by weak reference only: one
    kept per layer would hold gigabytes.
    """

    def __init__(self, layer) -> None:
        manager = getattr(layer, "dcp_manager", None)
        if manager is None:
            raise UnsupportedRelease("this vLLM has no DCP manager in its MLA layers: DCP needs 0.28.0 or newer")
        self.gather, self.combine, self.attend = manager.query_gather, manager.combine, layer.impl.forward_mqa
        self.gathered = self.combined = lambda: None
        manager.query_gather, manager.combine = self.query_gather, self.combine_once
        layer.impl.forward_mqa = self.forward_mqa

    def query_gather(self, query):
        gathered = self.gather(query)
        self.gathered = weakref.ref(gathered)
        return gathered

    def combine_once(self, partial_output, partial_lse, **metadata):
        if partial_output is self.combined():
            return partial_output
        return self.combine(partial_output, partial_lse, **metadata)

    def forward_mqa(self, query, kv_cache, metadata, layer):
        import torch

        if query is not self.gathered():
            query = self.query_gather(torch.cat(query, dim=-1) if isinstance(query, tuple) else query)
        out, lse = self.attend(query, kv_cache, metadata, layer)
        if lse is None:
            raise UnsupportedRelease(
                f"{type(layer.impl).__name__} of this vLLM returns no LSE, without which partial outputs cannot be "
                "combined: use another --attention-backend, or 0.29.0 or newer"
            )
        combined = self.combine(out, lse, seq_lens=None, query_start_loc=None)
        self.combined = weakref.ref(combined)
        return combined, lse


def guard_communicator(attention: ModuleType) -> None:
    """`refuse_disabled`, once a model that is concerned is imported: the communicator serves every other model too."""
    refuse_disabled(importlib.import_module(COMMUNICATOR))


def refuse_disabled(module: ModuleType) -> None:
    """reduce_scatter of CudaCommunicator raises where it would return unwritten memory."""
    for name in ("reduce_scatter", "reduce_scatterv"):
        method = getattr(module.CudaCommunicator, name, None)
        if method is not None and not getattr(method, "is_dcp_fix", False):
            setattr(module.CudaCommunicator, name, guarded(method))


def guarded(method: Callable) -> Callable:
    """`method` of a communicator, refusing to run without NCCL."""

    @functools.wraps(method)
    def checked(self, *args, **kwargs):
        if self.pynccl_comm is None or self.pynccl_comm.disabled:
            raise RuntimeError(
                f"{method.__name__} without NCCL would return unwritten memory: unset VLLM_DISABLE_PYNCCL, and give "
                "vLLM a libnccl that has every symbol it asks for (run `dcp-fix doctor`)"
            )
        return method(self, *args, **kwargs)

    checked.is_dcp_fix = True  # type: ignore[attr-defined]
    return checked


# {repair: (defects that it repairs, modules that it is applied to)}
REPAIRS = {
    replace_launcher: ({"query-rows", "k-rows", "owner-only-writes"}, (*KERNELS, *ATTENTION)),
    route_attention: ({"combine-routing"}, ATTENTION),
    guard_communicator: ({"silent-collective"}, ATTENTION),
}
REPAIRED = set().union(*(defects for defects, _ in REPAIRS.values()))
