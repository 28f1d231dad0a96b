"""Fused norm and RoPE: what happens to a token's query and key latents before sparse MLA attention.

Defects 1 and 3 lived here: one guard on the slot stood before effects that every rank needs.
Begin with reference.py, in plain torch; kernel.py is the same as one Triton kernel and launcher.py its launch;
inputs.py is the door that both share. Not here: attention itself, and the bytes of the caches (kv_cache.py).
"""

from dcp_fix.norm_rope.inputs import IndexerInputs, NormRopeInputs
from dcp_fix.norm_rope.reference import fused_norm_rope, fused_norm_rope_reference, rms_norm, rotate

__all__ = ["IndexerInputs", "NormRopeInputs", "fused_norm_rope", "fused_norm_rope_reference", "rms_norm", "rotate"]
