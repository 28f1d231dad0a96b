"""Probe 5: what the target's compiled sparse-decode op allocates, on a GPU; and what it reports for an empty row.

The op is loaded alone, from `vllm/_flashmla_C.abi3.so`, and called as vLLM calls it for a mixed batch: one sequence of
T query rows. A launch that splits nothing needs its result only; the historical one allocates accumulators as well:

    result      T * H * (512 * 2 + 4)            bytes: bf16 output, fp32 LSE
    always      2 * T * H * (512 * 4 + 4)        bytes more: fp32 output and LSE, (1 + parts) of them with parts = 1

The verdict asks whether the peak lies nearer to the first or to their sum. Sizes fill every multiprocessor, so that
nothing is split. Without a GPU the recorded result of the release is quoted, and the verdict stays `not-run`.
"""

import math
from pathlib import Path

import torch

from dcp_fix.doctor.attempt import NotRun, attempt, one_line
from dcp_fix.doctor.stand_ins import module

LIBRARY = "vllm/_flashmla_C.abi3.so"
INTERFACE = "vllm.third_party.flashmla.flash_mla_interface"
SIZES = ((132, 64, 64), (2048, 64, 2048), (8192, 64, 2048))  # query rows, heads, selected keys
BLOCKS, BLOCK, ENTRY_BYTES, QUERY, LATENT = 64, 64, 656, 576, 512
MIB = 1 << 20


def result_bytes(rows, heads):
    """Of a launch that splits nothing: bf16 output and fp32 LSE."""
    return rows * heads * (LATENT * 2 + 4)


def always_bytes(rows, heads):
    """What the historical launch allocates on top: (1 + parts) fp32 outputs and LSEs, parts = 1."""
    return 2 * rows * heads * (LATENT * 4 + 4)


def load_op(world_of, root: Path):
    """The target's flash_mla_interface module with its compiled op."""
    if not torch.cuda.is_available():
        raise NotRun("needs a GPU")
    if not (root / LIBRARY).is_file():
        raise NotRun(f"this vLLM has no compiled {LIBRARY} (a checkout that was never built?)")
    loaded = attempt(lambda: torch.ops.load_library(str(root / LIBRARY)))
    if loaded.raised:
        raise NotRun(f"the compiled op does not load under torch {torch.__version__}: {one_line(loaded.raised)}")
    with world_of(real=(INTERFACE,), stand_ins={"vllm._flashmla_C": module()}) as world:
        return world.load(INTERFACE)


def call(op, rows, heads, topk, indices):
    """(out, lse) of one launch over a cache of zeros; every logit is 0."""
    cache = torch.zeros(BLOCKS, BLOCK, 1, ENTRY_BYTES, dtype=torch.uint8, device="cuda")
    query = torch.zeros(1, rows, heads, QUERY, dtype=torch.bfloat16, device="cuda")
    metadata, _ = op.get_mla_metadata()
    return (
        cache,
        query,
        lambda: op.flash_mla_with_kvcache(
            q=query,
            k_cache=cache,
            block_table=None,
            cache_seqlens=None,
            head_dim_v=LATENT,
            tile_scheduler_metadata=metadata,
            is_fp8_kvcache=True,
            indices=indices,
            softmax_scale=QUERY**-0.5,
        ),
    )


def peak_bytes(op, rows, heads, topk) -> int:
    """Peak allocation above what the inputs take."""
    indices = torch.arange(topk, dtype=torch.int32, device="cuda").expand(1, rows, topk).contiguous()
    _cache, _query, launch = call(op, rows, heads, topk, indices)
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


def measure(op) -> list[dict]:
    """Peak and result of every size, in MiB, and whether the peak says `always`."""
    return [
        dict(
            size=f"{rows} rows x {heads} heads, {topk} keys",
            peak_mib=round(peak / MIB, 2),
            result_mib=round(result_bytes(rows, heads) / MIB, 2),
            always=allocates_always(peak, rows, heads),
        )
        for rows, heads, topk in SIZES
        for peak in [peak_bytes(op, rows, heads, topk)]
    ]


def split_workspace(op, progress) -> tuple[str, str]:
    """Probe 5, as (verdict, evidence)."""
    progress("peak allocation", control=True)
    measured = attempt(lambda: measure(op))
    if measured.raised:
        raise NotRun(f"the compiled op raises {one_line(measured.raised)}")
    sizes = "; ".join(
        f"{m['peak_mib']} MiB peak for a {m['result_mib']} MiB result at {m['size']}" for m in measured.value
    )
    gpu = torch.cuda.get_device_name()
    if any(m["always"] for m in measured.value):
        return "defect", f"split-KV accumulators are allocated although nothing is split ({gpu}): {sizes}"
    return "ok", f"no accumulators where nothing is split ({gpu}): {sizes}"


def convention(op) -> str:
    """What the compiled op reports: log base, and the LSE of a row without keys."""
    topk = 64
    rows = torch.full((1, 2, topk), -1, dtype=torch.int32, device="cuda")
    rows[0, 0] = torch.arange(topk)
    _cache, _query, launch = call(op, 2, 64, topk, rows)
    full, empty = launch()[1][0, 0].tolist()
    base = "natural log" if math.isclose(full, math.log(topk), rel_tol=1e-3) else "base 2"
    return f"the compiled kernel reports {base}, and {empty} for a row without keys"
