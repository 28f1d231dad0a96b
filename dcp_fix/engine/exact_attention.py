"""Exact mode in the engine: what `combine="exact"` swaps so that logits have the same bits at every DCP size D.

exact/reference.py makes attention independent of D. What else in a batch would know D, and what is done about it:

    prefix cache     a hit covers whole blocks on every rank, 64 * D tokens. How many tokens are computed decides the
                     shape, and so the bits, of every projection. Exact mode hands out runs of C / D blocks: a hit, a
                     request and an eviction count in 64 * C tokens at every D. Up to 64 * (C - D) tokens more are
                     recomputed than the ordinary mode would. So that a hit has the bits of a fresh engine too, every
                     prefill batch ends where a hit can, and only rows that a prefill wrote are handed on: those of
                     decode steps were computed one by one, in another shape.
    pieces           rows that go through the sparse path at once; their projections are products too. They are cut
                     at ROUTE_ROWS alone; the workspace budget streams the leaves inside a piece (exact.plan, which
                     also replaces `Ops.plan`), and a piece's node, ROUTE_ROWS rows of the group's heads, is not in it.
    splits           of a class on a GPU: from tokens, local heads and classes, never from the gathered heads
    everything else  is the same work at every D: projections, dense prefill (the gathered context is the same bytes),
                     the indexer, norms and fp8 codes (row by row, whichever rows are owned), the sum over TP ranks

The KV cache stays sharded, each row on one rank. Bits may differ between TP sizes, interleaves, values of C,
devices, and numbers of threads per rank: groups and `dcp-fix verify` give every rank one.

It does not: add numbers (exact/reference.py), or change the ordinary mode, which knows nothing of this file.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dcp_fix import exact
from dcp_fix.combine import CombineManager
from dcp_fix.engine.blocks import BlockPool
from dcp_fix.engine.config import Config
from dcp_fix.engine.model import Layer
from dcp_fix.engine.sharded import DIRECT_ROWS, FP8_SCALE, ROUTE_ROWS, ShardedAttention
from dcp_fix.kv_cache import BLOCK
from dcp_fix.ownership import local_class, slots_of
from dcp_fix.ranks.group import Group
from dcp_fix.workspace import Plan

METHODS = {
    "exact": partial(exact.combine_exact, transport="a2a"),
    "exact_ag_rs": partial(exact.combine_exact, transport="ag_rs"),
}


class ExactManager(CombineManager):
    """The manager whose combine merges nodes of the canonical tree."""

    methods = METHODS


class RunPool(BlockPool):
    """A pool that hands out its blocks in runs of C / D, so that its bookkeeping is the same at every D.

    >>> pool = RunPool(num_blocks=8, block_size=2, dcp_size=2, run=4)
    >>> table, cached = pool.open(list(range(17)), capacity=20)
    >>> pool.close(table, list(range(20)))
    >>> table, pool.open(list(range(17)), capacity=17)
    ([0, 1, 2, 3, 4, 5, 6, 7], ([0, 1, 2, 3, 4, 5, 6, 7], 16))
    """

    def __init__(self, num_blocks: int, block_size: int, dcp_size: int, run: int) -> None:
        super().__init__(num_blocks // run, block_size * run, dcp_size)
        self.num_blocks, self.run = num_blocks, run

    def open(self, tokens: list[int], capacity: int) -> tuple[list[int], int]:
        """As BlockPool.open; the table lists single blocks."""
        runs, cached = super().open(tokens, capacity)
        return [first * self.run + i for first in runs for i in range(self.run)], cached

    def close(self, table: list[int], tokens: list[int]) -> None:
        """As BlockPool.close."""
        super().close([block // self.run for block in table[:: self.run]], tokens)


class ExactAttention(ShardedAttention):
    """ShardedAttention with D-independent bits. `classes` is C."""

    def __init__(self, config: Config, heads: int, dcp: Group, *, combine: str, classes: int, **options: Any) -> None:
        super().__init__(config, heads, dcp, combine=next(iter(CombineManager.methods)), **options)
        self.classes, self.unit = classes, BLOCK * classes
        positions = torch.arange(config.max_position_embeddings, device=self.cos_sin.device)
        self.leaf_of = local_class(positions, classes, dcp.size, self.interleave).to(torch.int16)
        self.manager = ExactManager(dcp, combine, DIRECT_ROWS)

    @staticmethod
    def pool(max_length: int, dcp_size: int, classes: int) -> RunPool:  # type: ignore[override]
        """Blocks of a cache for `max_length` tokens. Raises UserError for a DCP size that does not divide C."""
        exact.check_classes(classes, dcp_size)
        run = classes // dcp_size
        return RunPool(-(-max_length // (BLOCK * classes)) * run, BLOCK, dcp_size, run)

    def plan(self, tokens: int) -> Plan:
        """The plan of exact/reference.py, the same at every D."""
        return exact.plan(tokens, self.heads, self.config.index_topk, self.classes, self.num_sms, self.workspace_budget)

    def pieces(self, tokens: int) -> list[slice]:
        """Rows that go through the sparse path at once."""
        return [slice(first, min(first + ROUTE_ROWS, tokens)) for first in range(0, tokens, ROUTE_ROWS)]

    def attend(self, layer: Layer, ids: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Maps queries [rows, H, 576] to this rank's node over the cache rows of positions `ids` [rows, K]."""
        slots = slots_of(self.localise(ids), self.batch.table, BLOCK)
        cache, plan, classes = self.latent[layer.index], self.batch.plan, self.classes // self.dcp.size
        kv_scale, heads = None if self.kv_scale is None else FP8_SCALE, layer.heads
        return lambda q: exact.node_partial(
            q, cache, slots, ids, self.leaf_of, classes, heads, self.config.scale, self.cache_format, kv_scale, plan
        )
