"""Fused norm and RoPE, the Triton launcher: signature, result and errors of norm_rope.py, one launch of
norm_rope_kernel.py.

Byte layouts: `latent_views` and `index_views` of kv_cache.py cut the caches into typed fields, and the kernel sees only
those. TRITON_INTERPRET=1 must be set before this module is imported.
Not here: the jobs themselves.
"""

import torch
import triton
from torch import Tensor

from dcp_fix.kv_cache import index_views, latent_views
from dcp_fix.norm_rope_inputs import IndexerInputs, check_inputs, index_slots
from dcp_fix.norm_rope_kernel import fused_norm_rope_kernel

MANY_TOKENS = 512  # from here on a program of the latent and index jobs takes several rows


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
    check_inputs(
        positions, q, q_weight, kv, kv_weight, k_pe, cos_sin, slot_mapping, kv_cache, cache_format, kv_scale, q_out,
        kv_out, kpe_out, indexer, topk_indices,
    )  # fmt: skip
    q_out = torch.empty_like(q) if q_out is None else q_out
    if len(q) == 0:
        return q_out
    optional = {}
    if kv_cache is not None and slot_mapping is not None:  # a profiling run has no slots
        optional |= _latent_arguments(slot_mapping, kv_cache, cache_format, kv_scale)
    if index_slots(indexer, slot_mapping) is not None:
        optional |= _index_arguments(indexer, index_slots(indexer, slot_mapping))
    if indexer is not None and topk_indices is not None:
        optional |= _topk_arguments(topk_indices)
    tokens, rows = len(q), 4 if len(q) >= MANY_TOKENS else 1
    jobs = rows + 1 if "index_slots" not in optional else rows + 2
    fused_norm_rope_kernel[(jobs, triton.cdiv(tokens, rows))](
        positions=positions, eps=eps, tokens=tokens, q=q, q_stride=q.stride(0), q_weight=q_weight, q_out=q_out,
        q_out_stride=q_out.stride(0), kv=kv, kv_stride=kv.stride(0), kv_weight=kv_weight, k_pe=k_pe,
        k_pe_stride=k_pe.stride(0), cos_sin=cos_sin, cos_sin_stride=cos_sin.stride(0), table_rows=len(cos_sin),
        Q_DIM=q.shape[1], Q_BLOCK=triton.next_power_of_2(q.shape[1]), ROWS=rows,
        kv_out=kv_out, kv_out_stride=_stride(kv_out), kpe_out=kpe_out, kpe_out_stride=_stride(kpe_out),
        **optional, num_warps=2, enable_fp_fusion=False,  # of 1, 2, 4 and 8 warps, 2 are fastest on an H200
    )  # fmt: skip
    return q_out


def _latent_arguments(slot_mapping: Tensor, kv_cache: Tensor, cache_format: str, kv_scale: Tensor | None) -> dict:
    latent, rope, scales = latent_views(kv_cache, cache_format)
    return {
        "slot_mapping": slot_mapping, "BLOCK_SIZE": kv_cache.shape[1], "kv_scale": kv_scale,
        "cache_latent": latent, "latent_block": _stride(latent), "latent_entry": _stride(latent, 1),
        "cache_rope": rope, "rope_block": _stride(rope), "rope_entry": _stride(rope, 1),
        "tile_scales": scales, "scales_block": _stride(scales), "scales_entry": _stride(scales, 1),
    }  # fmt: skip


def _index_arguments(indexer: IndexerInputs, slots: Tensor) -> dict:
    keys, scales = index_views(indexer.cache)
    table = indexer.cos_sin
    return {
        "index_slots": slots, "INDEX_BLOCK_SIZE": indexer.cache.shape[1],
        "index_k": indexer.k, "index_k_stride": _stride(indexer.k),
        "index_weight": indexer.weight, "index_bias": indexer.bias, "index_eps": indexer.eps,
        "index_cos_sin": table, "index_cos_sin_stride": _stride(table), "index_table_rows": len(table),
        "INDEX_HALF": table.shape[1] // 2, "INDEX_INTERLEAVED": indexer.interleaved,
        "index_keys": keys, "index_keys_block": _stride(keys),
        "index_scales": scales, "index_scales_block": _stride(scales),
    }  # fmt: skip


def _topk_arguments(topk_indices: Tensor) -> dict:
    topk = topk_indices.shape[1]
    block = triton.next_power_of_2(topk)
    return {"topk_indices": topk_indices, "topk_stride": _stride(topk_indices), "TOPK": topk, "TOPK_BLOCK": block}


def _stride(x: Tensor | None, dim: int = 0) -> int | None:
    return None if x is None else x.stride(dim)
