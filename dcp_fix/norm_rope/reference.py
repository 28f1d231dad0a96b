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
from dcp_fix.norm_rope.inputs import NormRopeInputs


def fused_norm_rope(inputs: NormRopeInputs) -> Tensor:
    """Runs the four jobs of the module docstring and returns `q_out`: the kernel on a GPU, the reference elsewhere.

    Raises ValueError at the door for a wrong shape, type or stride, and, on a CPU, for a slot or position out of range.
    """
    if inputs.q.is_cuda:
        from dcp_fix.norm_rope.launcher import fused_norm_rope_triton

        return fused_norm_rope_triton(inputs)
    return fused_norm_rope_reference(inputs)


def fused_norm_rope_reference(inputs: NormRopeInputs) -> Tensor:
    """`fused_norm_rope` in plain torch, on any device."""
    inputs.check()
    x = inputs.with_q_out()
    x.q_out.copy_(rms_norm(x.q, x.q_weight, x.eps))  # fix of defect 1: no slot in sight (issue 50095)
    _latents(x)
    if x.indexer is not None:
        _index_keys(x)
        if x.topk_indices is not None:
            x.topk_indices[: len(x.q)] = -1
    return x.q_out


def _latents(x: NormRopeInputs) -> None:
    """The latent job: dense rows where they are asked for, cache entries where there is a slot."""
    caches = x.kv_cache is not None and x.slot_mapping is not None
    dense = x.kv_out is not None or x.kpe_out is not None
    if not caches and not dense:
        return
    # Fix of defect 3: a negative slot skips the row's cache write, not its dense outputs (issue 54907).
    rows = slice(None) if dense else x.slot_mapping >= 0
    latent = rms_norm(x.kv[rows], x.kv_weight, x.eps)
    key = rotate(x.k_pe[rows], _angles(x.cos_sin, x.positions[rows]), interleaved=True)
    if x.kv_out is not None:
        x.kv_out.copy_(latent)
    if x.kpe_out is not None:
        x.kpe_out.copy_(key)
    if caches:
        write_latent(x.kv_cache, latent, key, x.slot_mapping[rows], x.cache_format, x.kv_scale)


def _index_keys(x: NormRopeInputs) -> None:
    """The index job: writes the rows that the indexer's own slot mapping owns, and computes no others."""
    indexer, slots = x.indexer, x.index_slots
    if slots is None:
        return
    rows = slots >= 0
    k = F.layer_norm(indexer.k[rows].float(), (INDEX_DIM,), indexer.weight.float(), indexer.bias.float(), indexer.eps)
    angles = _angles(indexer.cos_sin, x.positions[rows])
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
