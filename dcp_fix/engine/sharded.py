"""Sparse MLA attention of one rank: its share of heads and of KV rows, and the exchange that makes it whole.

`ShardedAttention` is the `attend` that `Model.forward` asks for. Per layer, for the T new tokens of one request:

    norm_rope  every query row; the cache entry only of positions that this rank owns
    dense      a prefill over at most index_topk keys: own heads over every new row as norm_rope left it, no combine;
               rows that are cached already are gathered from their owners
    select     else, and in every decode step: the indexer scores its own shard, the merge makes the global top-k
    sparse     then gather the group's heads, attend to the own rows among the selected, combine

The group is a DCP group of D ranks, which hold each KV row once between them. D = 1 runs through the same lines. The
steps that had a defect, or may have one planted, are swapped through `Ops`; nothing here knows which version runs.

The two caches have blocks of their own, as allocators of their own would give them: block b of a request's latents goes
with block num_blocks - 1 - b of its index keys. Taking one cache's slots for the other would show.

Units: T new tokens, h heads of this rank, D ranks, K = index_topk, C cached tokens before the batch.

It does not: decide which tokens form a batch, own the block table (engine.py), or know what kind of `Group` it has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dcp_fix import attention, indexer, workspace
from dcp_fix.combine import CombineManager, attend_routed
from dcp_fix.engine.blocks import BlockPool, open_request
from dcp_fix.engine.config import Config
from dcp_fix.engine.model import INDEX_NORM_EPS, Layer, rope_table
from dcp_fix.engine.scratch import Scratch
from dcp_fix.kv_cache import BLOCK, LATENT, ROPE, new_index_cache, new_latent_cache, read_index, read_latent
from dcp_fix.norm_rope import IndexerInputs, NormRopeInputs, fused_norm_rope
from dcp_fix.ownership import (
    chunk_local_lengths,
    global_position,
    local_index,
    local_length,
    localise,
    owner,
    row_slots,
    slots_of,
)
from dcp_fix.ranks.group import Group

SELECT_ROWS = {"cpu": 256, "cuda": 8192}  # query rows that the indexer takes at once: few jobs to share or few launches
ROUTE_ROWS = 1024  # query rows exchanged at once: bounds what four ranks in one process gather
CONTEXT_ROWS = 4096  # local rows of cached context that a dense prefill gathers at once
DIRECT_ROWS = 8  # decode rows that the combine keeps buffers for
FP8_SCALE = 1.0  # of the per-tensor fp8 cache; normed latents lie well inside +-448


@dataclass(frozen=True)
class Ops:
    """The steps that can be swapped: the first three had a defect (broken.py), in all of them one can be planted
    (planted.py). What stands in has the signature of the function named here.
    """

    norm_rope: Callable = fused_norm_rope
    route: Callable = attend_routed
    plan: Callable = workspace.plan
    select: Callable = indexer.select
    partial: Callable = attention.sparse_partial
    local_length: Callable = local_length
    localise: Callable = localise  # of the selected positions
    context_slots: Callable = row_slots
    open: Callable = open_request


@dataclass(frozen=True)
class Batch:
    """T consecutive new tokens of one request on this rank."""

    start: int | None  # C: tokens of the request that are cached already; None where only the device knows
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T], -1 where another rank owns the position
    index_slots: Tensor  # int64 [T], the same in the indexer's cache
    table: Tensor  # int64 [B], this rank's blocks of the whole request
    index_table: Tensor  # int64 [B], the same in the indexer's cache
    keys: int  # local rows, of which the indexer takes those that a token may see
    decode: bool
    plan: workspace.Plan | None  # of the sparse path; None for a dense prefill


class ShardedAttention:
    """One rank's caches, buffers and attention. Call `begin` for a batch, then once per layer in order."""

    unit = 0  # tokens: no prefill batch may go beyond a multiple of it; 0 = the engine cuts as it likes

    def __init__(
        self, config: Config, heads: int, dcp: Group, *, num_blocks: int, interleave: int, cache_format: str,
        combine: str, ops: Ops, scratch: Scratch, workspace_budget: int, max_batch_tokens: int, share: Callable,
    ) -> None:  # fmt: skip
        self.config, self.heads, self.dcp, self.interleave, self.ops = config, heads, dcp, interleave, ops
        self.num_blocks, self.context_rows = num_blocks, CONTEXT_ROWS
        self.scratch, self.workspace_budget, self.share = scratch, workspace_budget, share
        device = scratch.device
        self.manager = CombineManager(dcp, combine, DIRECT_ROWS)
        self.cache_format = cache_format
        self.kv_scale = torch.full((1,), FP8_SCALE, device=device) if cache_format == "fp8" else None
        self.cos_sin = rope_table(config, device)
        self.latent = [new_latent_cache(num_blocks, cache_format, device=device) for _ in config.indexer_types]
        self.index = [
            new_index_cache(num_blocks, device=device) if kind == "full" else None for kind in config.indexer_types
        ]
        self.topk_indices = torch.full((max_batch_tokens, config.index_topk), -1, dtype=torch.int32, device=device)
        self.num_sms = workspace.num_sms(device)
        self.batch: Batch | None = None
        self.advance: Callable[[int], None] = lambda rows: None

    @staticmethod
    def pool(max_length: int, dcp_size: int) -> BlockPool:
        """Blocks of a cache for `max_length` tokens."""
        return BlockPool(-(-max_length // (BLOCK * dcp_size)), BLOCK, dcp_size)

    # --- a batch ------------------------------------------------------------------------------------------------------

    def begin(self, start: int, tokens: int, table: Tensor, decode: bool) -> None:
        """The next batch: `tokens` new after `start` cached ones. Raises WorkspaceError if no plan fits the budget."""
        plan = self.plan(tokens) if decode or start + tokens > self.config.index_topk else None
        positions = torch.arange(start, start + tokens, device=table.device)
        keys = self.ops.local_length(start + tokens, self.dcp.size, self.dcp.rank, self.interleave)
        self.batch = self.placed(start, positions, table, keys, decode, plan)

    def begin_step(self, position: Tensor, table: Tensor) -> None:
        """A decode step at `position` [1], which nothing on the host may read: a CUDA graph replays it for others.

        So the indexer takes every row of `table`, and those that lie beyond the position are masked.
        """
        self.batch = self.placed(None, position, table, len(table) * BLOCK, True, self.plan(1))

    def placed(
        self, start: int | None, positions: Tensor, table: Tensor, keys: int, decode: bool, plan: workspace.Plan | None
    ) -> Batch:
        """The batch with the slots of its positions in both caches."""
        local, index_table = self.localise(positions), self.num_blocks - 1 - table
        slots, index_slots = slots_of(local, table, BLOCK), slots_of(local, index_table, BLOCK)
        return Batch(start, positions, slots, index_slots, table, index_table, keys, decode, plan)

    def plan(self, tokens: int) -> workspace.Plan:
        """The split-KV workspace plan of a sparse batch, for the gathered heads as the kernel pads them."""
        heads = -(-self.heads * self.dcp.size // workspace.HEAD_BLOCK) * workspace.HEAD_BLOCK
        # Only a kernel decodes the cache first, and a cache per layer: one layer's at a time.
        fp8 = self.cache_format != "bf16" and self.scratch.device.type == "cuda"
        capacity = len(self.latent[0]) * BLOCK if fp8 else 0
        budget, ranks = self.workspace_budget, self.dcp.size
        return self.ops.plan(tokens, heads, self.config.index_topk, self.num_sms, budget, capacity, ranks)

    def localise(self, positions: Tensor) -> Tensor:
        """Global positions, -1 = hole, to local indices on this rank, -1 where another rank owns them."""
        return localise(positions, self.dcp.size, self.dcp.rank, self.interleave)

    # --- a layer ------------------------------------------------------------------------------------------------------

    def __call__(self, layer: Layer, x: Tensor) -> Tensor:
        """Normed input [T, hidden] to this rank's head values [T, h, v]."""
        dense = self.batch.plan is None
        q_latent, kv_rows, key_rows = self.norm_rope(layer, x, dense)
        if dense:
            values = self.dense(layer, q_latent, kv_rows, key_rows)
            self.advance(len(x))
            return values
        if layer.has_indexer:
            self.topk_indices[: len(x)] = self.select(layer, x, q_latent)
        return self.sparse(layer, q_latent)

    def norm_rope(self, layer: Layer, x: Tensor, dense: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Caches the rows owned here; returns normed queries [T, Lq] and, if dense, latents [T, 512], keys [T, 64]."""
        batch, w, rows = self.batch, layer.w, len(x)
        q, kv, k_pe = layer.latents(x)
        q_out = self.scratch.take("q", rows)
        kv_out, kpe_out = (self.scratch.take("kv", rows), self.scratch.take("k_pe", rows)) if dense else (None, None)
        inputs = NormRopeInputs(
            batch.positions, q, w["self_attn.q_a_layernorm.weight"], kv, w["self_attn.kv_a_layernorm.weight"], k_pe,
            self.cos_sin, self.config.rms_norm_eps, slot_mapping=batch.slots, kv_cache=self.latent[layer.index],
            cache_format=self.cache_format, kv_scale=self.kv_scale, q_out=q_out, kv_out=kv_out, kpe_out=kpe_out,
            indexer=self.indexer_inputs(layer, x), topk_indices=self.topk_indices,
        )  # fmt: skip
        self.ops.norm_rope(inputs)
        return q_out, kv_out, kpe_out

    def indexer_inputs(self, layer: Layer, x: Tensor) -> IndexerInputs | None:
        """What the fused kernel needs to cache index keys; None in a layer that reuses the previous selection."""
        if not layer.has_indexer:
            return None
        weight, bias = layer.w["self_attn.indexer.k_norm.weight"], layer.w["self_attn.indexer.k_norm.bias"]
        k = layer.project("indexer.wk", x)
        cache, slots = self.index[layer.index], self.batch.index_slots
        return IndexerInputs(k, weight, bias, INDEX_NORM_EPS, self.cos_sin, cache, slots)

    # --- which keys ---------------------------------------------------------------------------------------------------

    def select(self, layer: Layer, x: Tensor, q_latent: Tensor) -> Tensor:
        """The keys that each row attends to: global positions int32 [T, K] ascending, -1 after the last."""
        slots = row_slots(0, self.batch.keys, self.batch.index_table, BLOCK)
        keys = read_index(self.index[layer.index], slots)  # [N, 128]
        here = torch.arange(len(keys), device=keys.device)
        here = global_position(here, self.dcp.size, self.dcp.rank, self.interleave)  # [N]

        def job(rows: slice) -> Tensor:
            positions = self.batch.positions[rows]
            q, weights = layer.index_queries(q_latent[rows], x[rows], self.cos_sin[positions])
            return self.ops.select(q, weights, keys, here, positions, self.config.index_topk, self.dcp)

        step = SELECT_ROWS[x.device.type]
        pieces = [slice(first, first + step) for first in range(0, len(x), step)]
        return torch.cat(self.share([partial(job, rows) for rows in pieces]))

    # --- the two paths ------------------------------------------------------------------------------------------------

    def sparse(self, layer: Layer, q_latent: Tensor) -> Tensor:
        """Every head of the group over the selected rows that lie here, combined over the group. -> [T, h, v]."""
        values = []
        for rows in self.pieces(len(q_latent)):
            q = layer.absorb(*layer.queries(q_latent[rows], self.cos_sin[self.batch.positions[rows]]))  # [rows, h, 576]
            attend = self.attend(layer, self.topk_indices[rows])
            out = self.ops.route(q, attend, self.manager, self.batch.decode)  # [rows, h, 512]
            faulty = self.topk_indices[rows, :1, None] == indexer.FAULT  # [rows, 1, 1]
            values.append(layer.unabsorb(out).masked_fill_(faulty, torch.nan))
            self.advance(rows.stop - rows.start)
        return torch.cat(values)

    def pieces(self, tokens: int) -> list[slice]:
        """Rows that go through the sparse path at once: the plan's chunks, cut to ROUTE_ROWS."""
        chunks = self.batch.plan.chunks()
        firsts = [(first, chunk.stop) for chunk in chunks for first in range(chunk.start, chunk.stop, ROUTE_ROWS)]
        return [slice(first, min(first + ROUTE_ROWS, stop)) for first, stop in firsts]

    def attend(self, layer: Layer, ids: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Maps queries [rows, H, 576] to (out, lse) over those of the positions `ids` [rows, K] that lie here."""
        local = self.ops.localise(ids, self.dcp.size, self.dcp.rank, self.interleave)
        cache, slots = self.latent[layer.index], slots_of(local, self.batch.table, BLOCK)
        scale, plan = self.config.scale, self.batch.plan
        kv_scale = None if self.kv_scale is None else FP8_SCALE  # as a number: reading the tensor would stall a stream
        return lambda q: self.ops.partial(q, cache, slots, scale, self.cache_format, kv_scale, plan)

    def dense(self, layer: Layer, q_latent: Tensor, latent: Tensor, key: Tensor) -> Tensor:
        """Own heads over the cached context and every new row. -> [T, h, v]."""
        q = torch.cat(layer.queries(q_latent, self.cos_sin[self.batch.positions]), -1)  # [T, h, nope + rope]
        context = self.context(layer).to(latent.dtype).split([LATENT, ROPE], -1)
        k, v = layer.expand(torch.cat([context[0], latent]), torch.cat([context[1], key]))
        return attention.dense_prefill(q, k, v, self.config.scale)

    def context(self, layer: Layer) -> Tensor:
        """The cached rows of positions 0 .. C - 1, gathered from their owners chunk by chunk: fp32 [C, 576]."""
        size, interleave = self.dcp.size, self.interleave
        chunks, first, step = [], 0, self.context_rows
        for chunk, lengths in enumerate(chunk_local_lengths(self.batch.start, size, interleave, step)):
            mine = lengths[self.dcp.rank]
            slots = self.ops.context_slots(chunk * step, mine, self.batch.table, BLOCK)
            rows = read_latent(self.latent[layer.index], slots, self.cache_format, self.kv_scale)
            padded = torch.nn.functional.pad(rows, (0, 0, 0, max(lengths) - mine))  # equal shapes for the gather
            gathered = self.dcp.all_gather(padded[None])  # [D, rows, 576]
            positions = torch.arange(first, first + sum(lengths), device=rows.device)
            place = local_index(positions, size, interleave) - chunk * step
            chunks.append(gathered[owner(positions, size, interleave), place])
            first += sum(lengths)
        empty = torch.empty(0, LATENT + ROPE, device=self.cos_sin.device)
        return torch.cat([empty, *chunks])
