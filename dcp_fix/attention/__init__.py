"""Attention of one rank: the sparse MLA partial (out, lse) over selected cache rows, and the dense prefill.

Begin with reference.py, in plain torch; kernel.py is the sparse partial in Triton. backends.py chooses between it and
flashmla.py, where a user names one; spill.py is for a width that was fixed before the keys were counted.
Not here: which keys are selected (indexer.py), and how partials become whole (combine/).
"""

from dcp_fix.attention.reference import (
    dense_prefill,
    dense_prefill_reference,
    sparse_partial,
    sparse_partial_reference,
)

__all__ = ["dense_prefill", "dense_prefill_reference", "sparse_partial", "sparse_partial_reference"]
