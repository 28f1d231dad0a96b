"""The four defects as they were, each with the signature of the function that it stands in for.

Nothing here is called by the corrected code. The ladder and the notebooks swap these in, and a test checks that each
one fails where its counterpart passes.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dcp_fix.norm_rope import fused_norm_rope
from dcp_fix.workspace import MIB, Plan, WorkspaceError, wanted_splits

# --- norm and RoPE kernel ---------------------------------------------------------------------------------------------
#
# An early return leaves a row's outputs as the allocator handed them over. The same happens when the corrected function
# runs on the other rows only, which makes one description of the defect serve the reference and the compiled kernel.


def skip_all_rows(implementation: Callable) -> Callable:
    """Defect 1: a negative slot ends the token after its top-k reset (vLLM 0.28, issue 50095)."""

    def run(call: dict) -> None:
        if call["slot_mapping"] is not None:  # a profiling run ended every token there
            _run_rows(implementation, call, call["slot_mapping"] >= 0)

    return _same_signature(implementation, run, skip_all_rows)


def skip_dense_rows(implementation: Callable) -> Callable:
    """Defect 3: a negative slot ends the token after its top-k reset and query norm (vLLM 0.29, issue 54907)."""

    def run(call: dict) -> None:
        if call["slot_mapping"] is None:
            implementation(**call)
            return
        _run_rows(implementation, call, call["slot_mapping"] >= 0)
        query_only = dict.fromkeys(("kv_cache", "kv_scale", "kv_out", "kpe_out", "indexer", "topk_indices"))
        implementation(**{**call, **query_only})

    return _same_signature(implementation, run, skip_dense_rows)


def _same_signature(implementation: Callable, run: Callable[[dict], None], defect: Callable) -> Callable:
    """`run` behind the signature of `implementation`: arguments by name, output allocated, top-k all reset."""
    signature = inspect.signature(implementation)

    def broken(*args, **kwargs) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = bound.arguments
        if call["q_out"] is None:
            call["q_out"] = torch.empty_like(call["q"])
        if call["indexer"] is not None and call["topk_indices"] is not None:
            call["topk_indices"][: len(call["q"])] = -1
        run(dict(call))
        return call["q_out"]

    functools.update_wrapper(broken, implementation)
    broken.__name__ = broken.__qualname__ = f"norm_rope_{defect.__name__}"
    broken.__doc__ = defect.__doc__
    return broken


def _run_rows(implementation: Callable, call: dict, rows: Tensor) -> None:
    """Runs `implementation` on the tokens where `rows` [T] holds; every other row of the outputs keeps its memory."""
    per_token = ("positions", "q", "kv", "k_pe", "slot_mapping", "q_out", "kv_out", "kpe_out")
    part = call | {name: call[name][rows] for name in per_token if call[name] is not None}
    part["topk_indices"] = None  # already reset, for all rows
    indexer = call["indexer"]
    if indexer is not None:
        slots = indexer.slot_mapping
        part["indexer"] = replace(indexer, k=indexer.k[rows], slot_mapping=None if slots is None else slots[rows])
    implementation(**part)
    for name in ("q_out", "kv_out", "kpe_out"):
        if call[name] is not None:
            call[name][rows] = part[name]


norm_rope_skip_all_rows = skip_all_rows(fused_norm_rope)
norm_rope_skip_dense_rows = skip_dense_rows(fused_norm_rope)


# --- combine ----------------------------------------------------------------------------------------------------------


def attend_unrouted(q, partial, manager, decode_only=False):
    """Defect 2: the gather and the combine ran under prefill context parallelism only (vLLM issue 50095).

    A rank attends with its own heads over its own keys and returns that as the answer. A group of one is not touched.
    """
    out, _ = partial(q)
    return out.float()


# --- workspace --------------------------------------------------------------------------------------------------------


def plan_always_allocate(tokens, heads, topk, num_sms, budget_bytes=None, capacity=0, ranks=1):
    """Defect 4: 1 + parts accumulators on every call, also where nothing is split, and no chunks (vLLM issue 53413).

    Upstream ran out of GPU memory; here the budget says so.
    """
    splits = wanted_splits(tokens, heads, topk, num_sms)
    plan = Plan(tokens, heads, topk, splits, token_chunk=tokens, accumulators=1 + splits)
    if budget_bytes is not None and plan.bytes > budget_bytes:
        raise WorkspaceError(
            f"{tokens} tokens of {heads} heads need {plan.bytes / MIB:.0f} MiB of workspace, "
            f"the budget is {budget_bytes / MIB:.0f} MiB"
        )
    return plan
