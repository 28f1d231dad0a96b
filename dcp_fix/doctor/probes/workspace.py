"""What the target's compiled sparse-decode op allocates, on a GPU.

The op is loaded alone, from `vllm/_flashmla_C.abi3.so`, and called as vLLM calls it for a mixed batch: one sequence of
T query rows. A launch that splits nothing needs its result only; the historical one allocates accumulators as well:

    result      T * H * (512 * 2 + 4)            bytes: bf16 output, fp32 LSE
    always      2 * T * H * (512 * 4 + 4)        bytes more: fp32 output and LSE, (1 + parts) of them with parts = 1

The verdict asks whether the peak lies nearer to the first or to their sum. Sizes fill every multiprocessor, so that
nothing is split. Without a GPU the recorded result of the release is quoted, and the verdict stays `not-run`.
"""

import functools
from pathlib import Path

import torch

from dcp_fix.doctor.attempt import NotRun, attempt, one_line
from dcp_fix.doctor.stand_ins import module
from dcp_fix.doctor.world import World

LIBRARY = "vllm/_flashmla_C.abi3.so"
INTERFACE = "vllm.third_party.flashmla.flash_mla_interface"
SIZES = ((132, 64, 64), (2048, 64, 2048), (8192, 64, 2048))  # query rows, heads, selected keys
BLOCKS, BLOCK, ENTRY_BYTES, QUERY, LATENT = 64, 64, 656, 576, 512
MIB = 1 << 20


def result_bytes(rows: int, heads: int) -> int:
    """Of a launch that splits nothing: bf16 output and fp32 LSE."""
    return rows * heads * (LATENT * 2 + 4)


def always_bytes(rows: int, heads: int) -> int:
    """What the historical launch allocates on top: (1 + parts) fp32 outputs and LSEs, parts = 1."""
    return 2 * rows * heads * (LATENT * 4 + 4)


def load_op(root: Path):
    """The target's flash_mla_interface module with its compiled op."""
    if not torch.cuda.is_available():
        raise NotRun("needs a GPU")
    if not (root / LIBRARY).is_file():
        raise NotRun(f"this vLLM has no compiled {LIBRARY} (a checkout that was never built?)")
    loaded = attempt(lambda: torch.ops.load_library(str(root / LIBRARY)))
    if loaded.raised:
        raise NotRun(f"the compiled op does not load under torch {torch.__version__}: {one_line(loaded.raised)}")
    with World(root, (INTERFACE,), {"vllm._flashmla_C": module()}) as world:
        return world.load(INTERFACE)


def prepared(op, rows: int, heads: int, indices: torch.Tensor):
    """A launch over a cache of zeros, whose logits are all 0: call it for (out, lse). `indices` [1, rows, keys]."""
    cache = torch.zeros(BLOCKS, BLOCK, 1, ENTRY_BYTES, dtype=torch.uint8, device="cuda")
    query = torch.zeros(1, rows, heads, QUERY, dtype=torch.bfloat16, device="cuda")
    metadata, _ = op.get_mla_metadata()
    return functools.partial(
        op.flash_mla_with_kvcache,
        q=query,
        k_cache=cache,
        block_table=None,
        cache_seqlens=None,
        head_dim_v=LATENT,
        tile_scheduler_metadata=metadata,
        is_fp8_kvcache=True,
        indices=indices,
        softmax_scale=QUERY**-0.5,
    )


def peak_bytes(op, rows: int, heads: int, topk: int) -> int:
    """Peak allocation above what the inputs take."""
    indices = torch.arange(topk, dtype=torch.int32, device="cuda").expand(1, rows, topk).contiguous()
    launch = prepared(op, rows, heads, indices)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    launch()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def allocates_always(peak: int, rows: int, heads: int) -> bool:
    """Whether a peak holds accumulators beside the result: more than half of those that are always allocated."""
    return peak > result_bytes(rows, heads) + always_bytes(rows, heads) / 2


def split_workspace(op, progress) -> tuple[str, str]:
    """(verdict, evidence)"""
    progress("peak allocation", control=True)
    measured = attempt(lambda: [(*size, peak_bytes(op, *size)) for size in SIZES])
    if measured.raised:
        raise NotRun(f"the compiled op raises {one_line(measured.raised)}")
    sizes = "; ".join(
        f"{round(peak / MIB, 2)} MiB peak for a {round(result_bytes(rows, heads) / MIB, 2)} MiB result at "
        f"{rows} rows x {heads} heads, {topk} keys"
        for rows, heads, topk, peak in measured.value
    )
    gpu = torch.cuda.get_device_name()
    if any(allocates_always(peak, rows, heads) for rows, heads, _, peak in measured.value):
        return "defect", f"split-KV accumulators are allocated although nothing is split ({gpu}): {sizes}"
    return "ok", f"no accumulators where nothing is split ({gpu}): {sizes}"
