"""Packing: holes taken out of the ids that vLLM's fp8 path hands to FlashMLA's sparse decode. Opt-in, DCP_FIX_PACK=1.

Under DCP a rank owns a part of the selected ids; vLLM leaves -1 in the place of the others, and FlashMLA spends as much
time on a hole as on a key. Here the ids of each token come first and the tensor ends where few tokens have more
(workspace.expected_columns); the keys that those have beyond it are attended to by attention/spill.py and merged. So
nothing waits for the device, CUDA graphs hold it too, and no key is dropped, however many fall to one rank. Results are
the same up to where FlashMLA's blocks begin, and one rounding to bf16 more for a token that exceeds the width.

Source: vLLM 0.28 to 0.33, v1/attention/backends/mla/flashmla_sparse.py. Not here: the bf16 path, which packs already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from dcp_fix.repairs.launcher import logger

if TYPE_CHECKING:  # the plugin must not load torch before vLLM does
    import torch

VARIABLE = "DCP_FIX_PACK"
MODULE = "vllm.v1.attention.backends.mla.flashmla_sparse"
ON = ("1", "true", "on", "yes")
FEWEST = 256  # tokens: a decode step of 64 requests in real vLLM took 5 % longer when packed (h200x2_pack0300)
GIVEN = {"q", "k_cache", "indices", "softmax_scale", "tile_scheduler_metadata"}  # what a call must name to be cut


def hooks(asked: str) -> dict[str, list[Callable[[ModuleType], None]]]:
    """{module name: functions to call with that module}, for the value of DCP_FIX_PACK."""
    return {MODULE: [pack_and_cut]} if asked.lower() in ON else {}


def pack_and_cut(module: ModuleType) -> None:
    """Wrap the FlashMLA that the backend has imported, once: what it cannot be sure of is passed on as it is."""
    original, new_schedule = module.flash_mla_with_kvcache, module.get_mla_metadata
    if getattr(original, "packs", False):
        return

    @functools.wraps(original)
    def flash_mla_with_kvcache(*args, **arguments):
        columns = width(arguments) if not args and arguments.keys() >= GIVEN else None
        if columns is None:
            return original(*args, **arguments)
        return cut(original, arguments, columns, new_schedule)

    flash_mla_with_kvcache.packs = True  # type: ignore[attr-defined]
    module.flash_mla_with_kvcache = flash_mla_with_kvcache  # type: ignore[attr-defined]


@functools.cache
def dcp_size() -> int:
    """As vLLM's process groups have it, which exist when the first call comes; 1, so that nothing is cut, without."""
    try:
        from vllm.distributed.parallel_state import get_dcp_group

        return get_dcp_group().world_size
    except (ImportError, AttributeError, AssertionError) as error:
        logger.warning("dcp_fix: ids are not packed, this vLLM does not say its DCP size: %s", error)
        return 1


def width(arguments: dict) -> int | None:
    """How many columns to keep of indices [1, T, K] into a cache of fp8_ds_mla; None where all of them should stay."""
    from dcp_fix.kv_cache import ENTRY_BYTES
    from dcp_fix.workspace import expected_columns

    indices, cache = arguments["indices"], arguments["k_cache"]
    if indices is None or cache.shape[-1] != ENTRY_BYTES or indices.shape[0] != 1 or indices.shape[1] < FEWEST:
        return None
    columns = expected_columns(indices.shape[2], dcp_size())
    return columns if columns < indices.shape[2] else None


def cut(original: Callable, arguments: dict, columns: int, new_schedule: Callable) -> tuple[torch.Tensor, torch.Tensor]:
    """One call over the first `columns` packed ids of each token, and what is beyond: out [1, T, H, 512], lse [1, H, T]
    as `original` returns them. The schedule is kept beside vLLM's own: that is one a step, for all layers.
    """
    from dcp_fix.attention.kernel import pack
    from dcp_fix.attention.spill import with_spill

    schedules = vars(arguments["tile_scheduler_metadata"]).setdefault("cut_schedules", {})
    if columns not in schedules:
        schedules[columns] = new_schedule()[0]
    packed, counts = pack(arguments["indices"][0], tail=-1)
    given = {"indices": packed[None, :, :columns].contiguous(), "tile_scheduler_metadata": schedules[columns]}
    out, lse = original(**arguments | given)
    q, cache, scale = arguments["q"][0], arguments["k_cache"][..., 0, :], arguments["softmax_scale"]
    with_spill(q, cache, "fp8_ds_mla", packed, counts, columns, scale, out[0], lse[0].T, in_place=True)
    return out, lse
