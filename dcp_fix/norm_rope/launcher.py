"""Fused norm and RoPE, the Triton launcher: signature, result and errors of reference.py, one launch of
kernel.py.

Byte layouts: `latent_views` and `index_views` of kv_cache.py cut the caches into typed fields, and the kernel sees only
those. TRITON_INTERPRET=1 must be set before this module is imported.
Not here: the jobs themselves.
"""

import torch
import triton
from torch import Tensor

from dcp_fix.kv_cache import index_views, latent_views
from dcp_fix.norm_rope.inputs import IndexerInputs, check_inputs, index_slots
from dcp_fix.norm_rope.kernel import fused_norm_rope_kernel

MANY_TOKENS = 512  # from here on a program of the latent and index jobs takes several rows
KEPT_LAUNCHES = 256  # signatures of arguments that are remembered


def fused_norm_rope_triton(
    positions: Tensor,
    q: Tensor,
    q_weight: Tensor,
    kv: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    cos_sin: Tensor,
    *,
    eps: float,
    slot_mapping: Tensor | None = None,
    kv_cache: Tensor | None = None,
    cache_format: str = "fp8_ds_mla",
    kv_scale: Tensor | None = None,
    q_out: Tensor | None = None,
    kv_out: Tensor | None = None,
    kpe_out: Tensor | None = None,
    indexer: IndexerInputs | None = None,
    topk_indices: Tensor | None = None,
) -> Tensor:
    """`fused_norm_rope` as one launch; arguments, result and errors as there. Never waits for the device."""
    given = (
        positions, q, q_weight, kv, kv_weight, k_pe, cos_sin, slot_mapping, kv_cache, kv_scale, q_out, kv_out, kpe_out,
        *indexer_tensors(indexer), topk_indices,
    )  # fmt: skip
    rows = 4 if len(q) >= MANY_TOKENS else 1
    key = (*map(signature, given), eps, cache_format, indexer and (indexer.eps, indexer.interleaved), rows)
    launch = LAUNCHES.get(key)
    if launch is None or not q.is_cuda:  # what a GPU's tensors hold is not looked at: their signatures decide
        check_inputs(
            positions, q, q_weight, kv, kv_weight, k_pe, cos_sin, slot_mapping, kv_cache, cache_format, kv_scale, q_out,
            kv_out, kpe_out, indexer, topk_indices,
        )  # fmt: skip
    q_out = torch.empty_like(q) if q_out is None else q_out
    if len(q) == 0:
        return q_out
    tensors = {
        "positions": positions, "q": q, "q_weight": q_weight, "q_out": q_out, "kv": kv, "kv_weight": kv_weight,
        "k_pe": k_pe, "cos_sin": cos_sin, "kv_out": kv_out, "kpe_out": kpe_out,
    }  # fmt: skip
    if kv_cache is not None and slot_mapping is not None:  # a profiling run has no slots
        latent, rope, scales = latent_views(kv_cache, cache_format)
        tensors |= {"slot_mapping": slot_mapping, "cache_latent": latent, "cache_rope": rope, "tile_scales": scales}
        tensors["kv_scale"] = kv_scale
    if (slots := index_slots(indexer, slot_mapping)) is not None:
        keys, scales = index_views(indexer.cache)
        tensors |= {
            "index_slots": slots, "index_k": indexer.k, "index_weight": indexer.weight, "index_bias": indexer.bias,
            "index_cos_sin": indexer.cos_sin, "index_keys": keys, "index_scales": scales,
        }  # fmt: skip
    if indexer is not None:
        tensors["topk_indices"] = topk_indices
    if launch is None:
        if len(LAUNCHES) >= KEPT_LAUNCHES:
            LAUNCHES.clear()
        launch = LAUNCHES[key] = Launch(numbers(tensors, eps, indexer, kv_cache, rows), rows)
    launch.run(tensors)
    return q_out


class Launch:
    """A launch whose tensors alone change: the grid, the numbers and, once compiled, the kernel itself.

    Binding its sixty arguments anew each time takes Triton longer than one token takes the kernel.
    """

    def __init__(self, numbers: dict, rows: int) -> None:
        self.kernel, self.numbers, self.compiled = fused_norm_rope_kernel, numbers, None
        jobs = rows + 2 if "INDEX_HALF" in numbers else rows + 1
        self.grid = (jobs, triton.cdiv(numbers["tokens"], rows), 1)

    def run(self, tensors: dict) -> None:
        """Launch with these tensors, which have the signatures of the first call's."""
        if self.compiled is not None and self.kernel is fused_norm_rope_kernel:
            arguments = self.numbers | tensors
            self.compiled[self.grid](*map(arguments.get, self.kernel.arg_names))
            return
        self.kernel = fused_norm_rope_kernel
        self.compiled = self.kernel[self.grid](  # None under the interpreter
            **tensors, **self.numbers, num_warps=4 if self.numbers["ROWS"] > 1 else 2, enable_fp_fusion=False
        )


LAUNCHES: dict[tuple, Launch] = {}


def signature(x):
    """What the check and the compiled kernel depend on, of a tensor; anything else is its own."""
    return (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16) if isinstance(x, Tensor) else x


def indexer_tensors(indexer: IndexerInputs | None) -> tuple:
    """What `signature` is to see of the indexer."""
    if indexer is None:
        return ()
    return indexer.k, indexer.weight, indexer.bias, indexer.cos_sin, indexer.cache, indexer.slot_mapping


def numbers(tensors: dict, eps: float, indexer: IndexerInputs | None, kv_cache: Tensor | None, rows: int) -> dict:
    """Everything else that the kernel takes: sizes, strides and what is known when compiling."""
    stride = lambda name, dim=0: None if (x := tensors.get(name)) is None else x.stride(dim)  # noqa: E731
    (tokens, width), table = tensors["q"].shape, tensors["cos_sin"]
    given = {
        "eps": eps, "tokens": tokens, "table_rows": len(table), "ROWS": rows,
        "Q_DIM": width, "Q_BLOCK": triton.next_power_of_2(width),
    }  # fmt: skip
    given |= {f"{name}_stride": stride(name) for name in ("q", "q_out", "kv", "k_pe", "cos_sin", "kv_out", "kpe_out")}
    if "slot_mapping" in tensors:
        given |= {
            "BLOCK_SIZE": kv_cache.shape[1],
            "latent_block": stride("cache_latent"), "latent_entry": stride("cache_latent", 1),
            "rope_block": stride("cache_rope"), "rope_entry": stride("cache_rope", 1),
            "scales_block": stride("tile_scales"), "scales_entry": stride("tile_scales", 1),
        }  # fmt: skip
    if "index_slots" in tensors:
        table = indexer.cos_sin
        given |= {
            "index_eps": indexer.eps, "index_k_stride": stride("index_k"),
            "index_cos_sin_stride": stride("index_cos_sin"), "index_table_rows": len(table),
            "index_keys_block": stride("index_keys"),
            "index_scales_block": stride("index_scales"), "INDEX_BLOCK_SIZE": indexer.cache.shape[1],
            "INDEX_HALF": table.shape[1] // 2, "INDEX_INTERLEAVED": indexer.interleaved,
        }  # fmt: skip
    if (topk := tensors.get("topk_indices")) is not None:
        width = topk.shape[1]
        given |= {"topk_stride": topk.stride(0), "TOPK": width, "TOPK_BLOCK": triton.next_power_of_2(width)}
    return given
