"""Exact mode, the arithmetic: attention whose bits do not depend on the DCP size.

Begin with reference.py: positions fall into eight classes, the leaves of one tree of sums that is the same at every
size; kernel.py has leaves and merges in Triton. What else in a batch would know the DCP size is the engine's business
(engine/exact_attention.py). Not here: independence of the tensor-parallel size.
"""

from dcp_fix.exact.reference import (
    CLASSES,
    check_classes,
    combine_exact,
    leaf_partials,
    leaf_partials_reference,
    merge_tree,
    merge_tree_reference,
    node_partial,
    plan,
)

__all__ = [
    "CLASSES",
    "check_classes",
    "combine_exact",
    "leaf_partials",
    "leaf_partials_reference",
    "merge_tree",
    "merge_tree_reference",
    "node_partial",
    "plan",
]
