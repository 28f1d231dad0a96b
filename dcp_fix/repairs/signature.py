"""The parameters of vLLM's `fused_norm_rope`, over all releases that we have read: what we know, and what is new."""

import inspect

REQUIRED = (
    "positions q_c q_rms_norm_w q_rms_eps kv_c kv_rms_norm_w kv_rms_eps k_pe k_rope_cos_sin_cache index_k "
    "index_k_layer_norm_w index_k_layer_norm_bias index_k_layer_norm_eps index_k_rope_cos_sin_cache "
    "topk_indices_buffer slot_mapping indexer_k_cache mla_kv_cache mla_kv_cache_dtype mla_k_scale has_indexer "
    "index_rope_interleave"
).split()
OPTIONAL = (
    "q_c_out kv_c_out k_pe_out index_k_out indexer_slot_mapping indexer_cache_shuffled skip_scale"  # by release
).split()


def changes(function) -> tuple[list[str], list[str]]:
    """(parameters that we do not know, required ones that are gone); both empty for a signature that we know."""
    names = list(inspect.signature(function).parameters)
    new = [name for name in names if name not in REQUIRED and name not in OPTIONAL]
    return new, [name for name in REQUIRED if name not in names]
