"""The four defects as they were, each with the signature of the function that it stands in for.

Nothing here is called by the corrected code. The ladder and the notebooks swap these in, and a test checks that each
one fails where its counterpart passes.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from dcp_fix.combine import CombineManager
from dcp_fix.combine.reference import Partial
from dcp_fix.norm_rope import NormRopeInputs, fused_norm_rope
from dcp_fix.workspace import MIB, Plan, WorkspaceError, wanted_splits

Kernel = Callable[[NormRopeInputs], Tensor]

# --- norm and RoPE kernel ---------------------------------------------------------------------------------------------
#
# An early return leaves a row's outputs as the allocator handed them over. The same happens when the corrected function
# runs on the other rows only, which makes one description of the defect serve the reference and the compiled kernel.


def skip_all_rows(implementation: Kernel) -> Kernel:
    """Defect 1: a negative slot ends the token after its top-k reset (vLLM 0.28, issue 50095)."""

    def norm_rope_skip_all_rows(inputs: NormRopeInputs) -> Tensor:
        inputs = _reset(inputs)
        if inputs.slot_mapping is not None:  # a profiling run ended every token there
            _run_rows(implementation, inputs, inputs.slot_mapping >= 0)
        return inputs.q_out

    return norm_rope_skip_all_rows


def skip_dense_rows(implementation: Kernel) -> Kernel:
    """Defect 3: a negative slot ends the token after its top-k reset and query norm (vLLM 0.29, issue 54907)."""

    def norm_rope_skip_dense_rows(inputs: NormRopeInputs) -> Tensor:
        inputs = _reset(inputs)
        if inputs.slot_mapping is None:
            return implementation(inputs)
        _run_rows(implementation, inputs, inputs.slot_mapping >= 0)
        query_only = dict.fromkeys(("kv_cache", "kv_scale", "kv_out", "kpe_out", "indexer", "topk_indices"))
        return implementation(replace(inputs, **query_only))

    return norm_rope_skip_dense_rows


def _reset(inputs: NormRopeInputs) -> NormRopeInputs:
    """The top-k reset, of all rows; the rest as it was, output allocated."""
    if inputs.indexer is not None and inputs.topk_indices is not None:
        inputs.topk_indices[: len(inputs.q)] = -1
    return replace(inputs.with_q_out(), topk_indices=None)


def _run_rows(implementation: Kernel, inputs: NormRopeInputs, rows: Tensor) -> None:
    """Runs `implementation` on the tokens where `rows` [T] holds; every other row of the outputs keeps its memory."""
    per_token = ("positions", "q", "kv", "k_pe", "slot_mapping", "q_out", "kv_out", "kpe_out")
    given = {name: getattr(inputs, name) for name in per_token}
    part = replace(inputs, **{name: x[rows] for name, x in given.items() if x is not None})
    if (indexer := inputs.indexer) is not None:
        slots = indexer.slot_mapping
        some = replace(indexer, k=indexer.k[rows], slot_mapping=None if slots is None else slots[rows])
        part = replace(part, indexer=some)
    implementation(part)
    for name in ("q_out", "kv_out", "kpe_out"):
        if given[name] is not None:
            given[name][rows] = getattr(part, name)


norm_rope_skip_all_rows = skip_all_rows(fused_norm_rope)
norm_rope_skip_dense_rows = skip_dense_rows(fused_norm_rope)


# --- combine ----------------------------------------------------------------------------------------------------------


def attend_unrouted(q: Tensor, partial: Partial, manager: CombineManager, decode_only: bool = False) -> Tensor:
    """Defect 2: the gather and the combine ran under prefill context parallelism only (vLLM issue 50095).

    A rank attends with its own heads over its own keys and returns that as the answer. A group of one is not touched.
    """
    out, _ = partial(q)
    return out.float()


# --- workspace --------------------------------------------------------------------------------------------------------


def plan_always_allocate(
    tokens: int, heads: int, topk: int, num_sms: int, budget_bytes: int | None = None, capacity: int = 0, ranks: int = 1
) -> Plan:
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
