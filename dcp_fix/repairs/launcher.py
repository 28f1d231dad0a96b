"""Our fused norm/RoPE kernel under the signature of vLLM's own launcher, for the releases whose kernel has a defect.

Upstream's parameters change from release to release; ours takes each release's, by name and position, and raises what
upstream raises for a bad call. 0.26 to 0.30 are known. Not here: the entries of 0.31 and newer, whose scales are powers
of two and whose kernel is right.
"""

import functools
import inspect
import logging
from collections.abc import Callable

from dcp_fix.repairs.signature import changes

LATENT, ROPE, INDEX_DIM = 512, 64, 128  # what our kernel is built for, and every DeepSeek-V3.2 and GLM-5 model has

logger = logging.getLogger("vllm.dcp_fix")  # below vLLM's own logger, whose settings it inherits


class UnsupportedRelease(RuntimeError):
    """This vLLM has the defect, and the plugin cannot repair it: the message says why and what to do."""


def launcher(upstream: Callable) -> Callable:
    """`dcp_fix.norm_rope` with the signature of `upstream`, a release's own `fused_norm_rope`.

    What our kernel is not built for (nvfp4 caches, other head sizes than those of DeepSeek-V3.2 and GLM-5) goes to
    `upstream`, with a warning. Raises UnsupportedRelease for a signature that we do not know.
    """
    if getattr(upstream, "is_dcp_fix", False):
        return upstream
    check_release(upstream)
    signature = inspect.signature(upstream)
    defaults = {name: p.default for name, p in signature.parameters.items() if p.default is not p.empty}

    @functools.wraps(upstream)
    def fused_norm_rope(*args, **kwargs):
        given = {**dict(zip(signature.parameters, args)), **kwargs}  # noqa: B905 the rest has defaults
        if given.keys() | defaults.keys() != signature.parameters.keys() or len(args) + len(kwargs) != len(given):
            signature.bind(*args, **kwargs)  # raises the TypeError that upstream would
        arguments = {**defaults, **given}
        if reason := beyond_us(arguments):
            warn_once(f"dcp_fix: {reason}: upstream's own launcher runs, with its defects")
            return upstream(*args, **kwargs)
        return launch(arguments)

    fused_norm_rope.is_dcp_fix = True  # type: ignore[attr-defined]
    fused_norm_rope.__signature__ = signature  # type: ignore[attr-defined]
    return fused_norm_rope


def check_release(upstream: Callable) -> None:
    """UnsupportedRelease for a signature or a cache layout that is not ours."""
    new, gone = changes(upstream)
    if new or gone:
        raise UnsupportedRelease(f"fused_norm_rope of this vLLM differs in {new + gone}; use a release with the fix")
    if "indexer_cache_shuffled" in inspect.signature(upstream).parameters:
        raise UnsupportedRelease("fp8_ds_mla entries of vLLM 0.31 and newer have power-of-two scales; reinstall vLLM")


def beyond_us(a: dict) -> str | None:
    """Why our kernel cannot do this call, or None."""
    if a["mla_kv_cache_dtype"].startswith("nvfp4"):
        return f"cache format {a['mla_kv_cache_dtype']}"
    sizes = {"latent": (a["kv_c"], LATENT), "rope": (a["k_pe"], ROPE)}
    if a["has_indexer"]:
        sizes["index key"] = (a["index_k"], INDEX_DIM)
    wrong = [f"{name} of {x.shape[-1]} instead of {size}" for name, (x, size) in sizes.items() if x.shape[-1] != size]
    return ", ".join(wrong) or None


@functools.cache
def warn_once(message: str) -> None:
    """A warning in vLLM's log, the first time only."""
    logger.warning(message)


def launch(a: dict):
    """Upstream's arguments, by name, to ours. Returns the normed query."""
    from dcp_fix.norm_rope import NormRopeInputs, fused_norm_rope

    cache, cache_format, scale = latent_cache(a)
    cached = cache is not None or (a["has_indexer"] and a["indexer_k_cache"] is not None)
    inputs = NormRopeInputs(
        a["positions"],
        a["q_c"],
        a["q_rms_norm_w"],
        a["kv_c"],
        a["kv_rms_norm_w"],
        a["k_pe"],
        a["k_rope_cos_sin_cache"],
        eps=a["kv_rms_eps"],
        slot_mapping=a["slot_mapping"] if cached else None,
        kv_cache=cache,
        cache_format=cache_format,
        kv_scale=scale,
        q_out=a.get("q_c_out"),
        kv_out=a.get("kv_c_out"),
        kpe_out=a.get("k_pe_out"),
        indexer=indexer_inputs(a) if a["has_indexer"] else None,
        topk_indices=a["topk_indices_buffer"],
    )
    q_out = fused_norm_rope(inputs)
    if a["q_rms_eps"] != a["kv_rms_eps"]:  # no model has two; ours takes one
        from dcp_fix.norm_rope import rms_norm

        q_out.copy_(rms_norm(a["q_c"], a["q_rms_norm_w"], a["q_rms_eps"]))
    if a["has_indexer"] and a.get("index_k_out") is not None:
        a["index_k_out"].copy_(index_rows(a))
    return q_out


def latent_cache(a: dict):
    """(cache, our name of its format, its scale or None)"""
    import torch

    cache, dtype, scale = a["mla_kv_cache"], a["mla_kv_cache_dtype"], None
    cache_format = dtype if dtype == "fp8_ds_mla" else "fp8" if dtype.startswith("fp8") else "bf16"
    if cache is None:
        return None, cache_format, None
    if cache_format == "fp8_ds_mla":
        cache = cache.view(torch.uint8)
    elif cache_format == "fp8":
        cache = cache.view(torch.float8_e4m3fn)
        scale = a["mla_k_scale"]
        scale = torch.ones(1, device=cache.device) if scale is None else scale
    return cache, cache_format, scale


def indexer_inputs(a: dict):
    """The indexer's arguments as our kernel takes them."""
    import torch

    from dcp_fix.norm_rope import IndexerInputs

    cache = a["indexer_k_cache"]
    return IndexerInputs(
        k=a["index_k"],
        weight=a["index_k_layer_norm_w"],
        bias=a["index_k_layer_norm_bias"],
        eps=a["index_k_layer_norm_eps"],
        cos_sin=a["index_k_rope_cos_sin_cache"],
        cache=None if cache is None else cache.view(torch.uint8),
        slot_mapping=a.get("indexer_slot_mapping"),
        interleaved=a["index_rope_interleave"],
    )


def index_rows(a: dict):
    """Normed and rotated index keys [T, 128] of every token. Only PCP asks for them, to gather and then cache them."""
    import torch
    import torch.nn.functional as F

    from dcp_fix.norm_rope import rotate

    weight, bias = a["index_k_layer_norm_w"].float(), a["index_k_layer_norm_bias"].float()
    k = F.layer_norm(a["index_k"].float(), (INDEX_DIM,), weight, bias, a["index_k_layer_norm_eps"])
    table = a["index_k_rope_cos_sin_cache"]
    angles = table[a["positions"].clamp(0, len(table) - 1)].float()
    rotated, rest = k.split((angles.shape[-1], INDEX_DIM - angles.shape[-1]), dim=-1)
    return torch.cat((rotate(rotated, angles, a["index_rope_interleave"]), rest), dim=-1)
