"""Fused norm and RoPE: what happens to a token's query and key latents before sparse MLA attention.

Per token t, with `slot = slot_mapping[t]` (negative: another rank of the DCP group owns the row, or it is padding):

    job      effect                                                                          when slot < 0?
    top-k    topk_indices[t, :] = -1                          (layers with an indexer)       always runs
    query    q_out[t] = rms_norm(q[t]) * q_weight                                            always runs
    latent   latent = rms_norm(kv[t]) * kv_weight;  key = rotate(k_pe[t], position)
             (a) kv_out[t] = latent, kpe_out[t] = key         (where the caller asks)        always runs
             (b) entry (latent, key) to the latent cache at `slot`                           never
    index    k = layer_norm(index_k[t]), its first R values rotated, to the indexer cache
             at the *indexer's* slot                                                         never, by that slot

A negative slot guards one effect, the cache write, and nothing else: each effect has its own guard. vLLM 0.28 let it
guard the whole token, so that query rows of non-owners were never written (issue 50095, PR 50005), and 0.29 the whole
latent job, so that dense prefill read key rows that nobody had written (issue 54907, PR 54908). broken.py keeps both.

Formulas, all in fp32, rounded once to the type of the output:
    rms_norm(x)   = x / sqrt(mean(x^2) + eps)
    layer_norm(x) = (x - mean) / sqrt(var + eps) * weight + bias
    rotate        : pair (a, b) -> (a cos - b sin, b cos + a sin). Interleaved pairs are (x[2i], x[2i+1]): the latent
                    key always, the indexer of GLM. Split-half pairs are (x[i], x[i + R/2]): the indexer of DeepSeek
Source: DeepSeek-V3.2 report; behaviour of vLLM's `fused_norm_rope`, which this does not copy.

A position outside the cos/sin table is legal where it cannot matter: padded rows carry anything, 10**6 for instance.
Rows that need no key never read the table. Rows with a negative slot whose dense key is asked for read it clamped
to its ends, so every requested row is written and nothing outside is read. A row that owns a slot must have a position
in the table; on a CPU that is checked, on a GPU a check would stall the stream, so there it is clamped like the rest.

Here: the reference, which is also what CPUs run. The Triton kernel has a file of its own, launcher.py, so that
this one imports without triton and TRITON_INTERPRET, read when a kernel is decorated, can be set until first use.
Not here: the projections around it, the query's RoPE, scattering into more than one latent cache, nvfp4 entries.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dcp_fix.kv_cache import INDEX_DIM, write_index, write_latent
from dcp_fix.norm_rope.inputs import IndexerInputs, check_inputs, index_slots


def fused_norm_rope(
    positions: Tensor,  # [T]
    q: Tensor,  # [T, Lq]
    q_weight: Tensor,  # [Lq]
    kv: Tensor,  # [T, 512]
    kv_weight: Tensor,  # [512]
    k_pe: Tensor,  # [T, 64]
    cos_sin: Tensor,  # [max_pos, 64] fp32: 32 cosines, then 32 sines
    *,
    eps: float,
    slot_mapping: Tensor | None = None,  # [T]; None in a profiling run: nothing is cached
    kv_cache: Tensor | None = None,  # see kv_cache.new_latent_cache
    cache_format: str = "fp8_ds_mla",
    kv_scale: Tensor | None = None,  # [1] fp32, for cache_format "fp8"
    q_out: Tensor | None = None,  # [T, Lq], allocated when None
    kv_out: Tensor | None = None,  # [T, 512], written only when given
    kpe_out: Tensor | None = None,  # [T, 64], written only when given
    indexer: IndexerInputs | None = None,  # None in layers that share the previous indexer's selection
    topk_indices: Tensor | None = None,  # int32 [>= T, topk], reset only when `indexer` is given
) -> Tensor:
    """Runs the four jobs of the module docstring and returns `q_out`: the kernel on a GPU, the reference elsewhere.

    Raises ValueError at the door for a wrong shape, type or stride, and, on a CPU, for a slot or position out of range.
    """
    if q.is_cuda:
        from dcp_fix.norm_rope.launcher import fused_norm_rope_triton as implementation
    else:
        implementation = fused_norm_rope_reference
    return implementation(
        positions, q, q_weight, kv, kv_weight, k_pe, cos_sin, eps=eps, slot_mapping=slot_mapping, kv_cache=kv_cache,
        cache_format=cache_format, kv_scale=kv_scale, q_out=q_out, kv_out=kv_out, kpe_out=kpe_out, indexer=indexer,
        topk_indices=topk_indices,
    )  # fmt: skip


def fused_norm_rope_reference(
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
    """`fused_norm_rope` in plain torch, on any device."""
    check_inputs(
        positions, q, q_weight, kv, kv_weight, k_pe, cos_sin, slot_mapping, kv_cache, cache_format, kv_scale, q_out,
        kv_out, kpe_out, indexer, topk_indices,
    )  # fmt: skip
    q_out = torch.empty_like(q) if q_out is None else q_out
    q_out.copy_(rms_norm(q, q_weight, eps))  # fix of defect 1: no slot in sight (issue 50095)

    caches = kv_cache is not None and slot_mapping is not None
    dense = kv_out is not None or kpe_out is not None
    if caches or dense:
        # Fix of defect 3: a negative slot skips the row's cache write, not its dense outputs (issue 54907).
        rows = slice(None) if dense else slot_mapping >= 0
        latent = rms_norm(kv[rows], kv_weight, eps)
        key = rotate(k_pe[rows], _angles(cos_sin, positions[rows]), interleaved=True)
        if kv_out is not None:
            kv_out.copy_(latent)
        if kpe_out is not None:
            kpe_out.copy_(key)
        if caches:
            write_latent(kv_cache, latent, key, slot_mapping[rows], cache_format, kv_scale)

    if indexer is not None:
        _index_key(positions, indexer, slot_mapping)
        if topk_indices is not None:
            topk_indices[: len(q)] = -1
    return q_out


def _index_key(positions: Tensor, indexer: IndexerInputs, slot_mapping: Tensor | None) -> None:
    """The index job: writes the rows that the indexer's own slot mapping owns, and computes no others."""
    slots = index_slots(indexer, slot_mapping)
    if slots is None:
        return
    rows = slots >= 0
    k = F.layer_norm(indexer.k[rows].float(), (INDEX_DIM,), indexer.weight.float(), indexer.bias.float(), indexer.eps)
    angles = _angles(indexer.cos_sin, positions[rows])
    rotated, rest = k.split((angles.shape[-1], INDEX_DIM - angles.shape[-1]), dim=-1)
    k = torch.cat((rotate(rotated, angles, indexer.interleaved), rest), dim=-1)
    write_index(indexer.cache, k, slots[rows])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.float()


def rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotates x [..., R] by `angles` [..., R] = cosines then sines, in fp32.

    >>> quarter_turn = torch.tensor([0.0, 0.0, 1.0, 1.0])
    >>> rotate(torch.tensor([1.0, 2.0, 3.0, 4.0]), quarter_turn, interleaved=True).tolist()
    [-2.0, 1.0, -4.0, 3.0]
    >>> rotate(torch.tensor([1.0, 2.0, 3.0, 4.0]), quarter_turn, interleaved=False).tolist()
    [-3.0, -4.0, 1.0, 2.0]
    """
    x = x.float()
    cos, sin = angles.chunk(2, dim=-1)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    return torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)


def _angles(cos_sin: Tensor, positions: Tensor) -> Tensor:
    return cos_sin[positions.clamp(0, len(cos_sin) - 1)].float()
