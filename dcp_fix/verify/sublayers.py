"""One rank's watcher: what every sublayer of a run made of its input, and whether a second run makes the same of it.

The first run, DCP1, is recorded. In a second run each sublayer gets the recorded output of the one before, so that
every sublayer works on the very input that DCP1's had: differences cannot pile up, and the first one that is more than
rounding names the sublayer. The watcher stands between engine and group: what an all-reduce completes is compared, and
the recorded tensor is handed on; so are the logits, and with them the token.

Compared in every bit: prefix hit, lengths, slots, normed rows, cached bytes, selection, queries, gathered heads. Where
numbers are added in another order, in units in the last place (ulps) of the largest number that was added, against the
bounds of steps.py. Partials are held against fp64 attention over the keys that this rank should own, at a few rows of
every piece: the first, the last, some between, and those furthest from DCP1's.

It does not: decide which prompts run (forced.py), print, or trust the engine's own idea of who owns what.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dcp_fix import ownership
from dcp_fix.engine.engine import Engine
from dcp_fix.engine.sharded import FP8_SCALE
from dcp_fix.kv_cache import BLOCK, LATENT, index_views, read_latent
from dcp_fix.verify.steps import ALWAYS_FP32, BOUNDS, Finding, differing_rows, merge, ulps

WATCHED = ("begin", "begin_step", "norm_rope", "select", "context", "dense", "sparse")  # methods of the attention
SAMPLE = 8  # rows of a piece whose partials are computed again
WORST = 4  # and those furthest from DCP1's
LONG = 1024  # tokens of a batch, on a CPU, of which only the last piece goes through the attention again
LONGER = 4096  # and only some pieces through the selection
LAST = 1 << 20  # the number of what is looked at after all batches
FEW = 8  # one selection piece in so many, and the last


class Parted(Exception):
    """The run no longer does the same batches as the reference."""


class Watcher:
    """Watches one engine. Without `reference` it records; with one, the `seen` of a recording watcher, it compares."""

    def __init__(self, group, reference: dict | None = None, exact: bool = False) -> None:
        self.group, self.reference, self.exact = group, reference, exact
        self.seen: dict[tuple, Tensor | int] = {}
        self.findings: list[Finding] = []
        self.largest: dict[str, float] = {}
        self.pieces = [0, 0]  # computed, of how many
        self.batch, self.reduced, self.layer, self.piece, self.batches = -1, 0, 0, 0, 0
        self.watching = True
        self.computed: list[slice] | None = None  # rows of the layer's attention; None: all

    # --- between engine and group -------------------------------------------------------------------------------------

    def __getattr__(self, name):
        return getattr(self.group, name)

    def all_reduce(self, x: Tensor, out=None) -> Tensor:
        """The group's sum, compared; a sublayer's output [T, hidden], in turn of the attention and of the MLP."""
        whole = self.group.all_reduce(x, out)
        if not self.watching:
            return whole
        self.layer, mlp = divmod(self.reduced, 2)
        self.reduced += 1
        step = "mlp" if mlp else "output projection"
        return self.near(step, whole, rows=None if mlp else self.computed)

    def all_gather(self, x: Tensor, dim=0, out=None) -> Tensor:
        """The group's logits, compared."""
        whole = self.group.all_gather(x, dim, out)
        if not self.watching:
            return whole
        return self.near("logits", whole).clone()  # a decode step in fixed memory writes into what it got

    def watch(self, engine: Engine) -> Engine:
        """Look over the shoulder of the engine, which was made with this watcher as its group."""
        attention = self.attention = engine.attention
        self.dcp, self.dtype = attention.dcp, engine.model.weights["model.norm.weight"].dtype
        self.ops = attention.ops
        attention.ops = replace(self.ops, select=self.select_piece, route=self.route, partial=self.partial)
        for name in WATCHED:
            setattr(attention, name, self.after(name, getattr(attention, name)))
        if engine.step:
            engine.step.records = False
        return engine

    def leave(self, engine: Engine) -> None:
        """Look no longer: what the engine does from here on goes by unseen."""
        engine.attention.ops, self.watching = self.ops, False
        for name in WATCHED:
            delattr(engine.attention, name)

    def after(self, name: str, method):
        """The method, then the look at its result, which may put another in its place."""
        look = getattr(self, f"see_{name}")
        return lambda *given: look(method, *given)

    # --- comparing ----------------------------------------------------------------------------------------------------

    def same(self, step: str, value, told: str = "", rows=None, piece: int = 0):
        """`value` must have the recorded one's bits; of a tensor the rows `rows` of the recorded one."""
        key = (self.batch, self.layer, step, piece)
        if self.reference is None:
            self.seen[key] = value.clone() if isinstance(value, Tensor) else value
            return value
        expected = self.reference[key]
        return self.equal(step, value, expected if rows is None else expected[rows], told)

    def equal(self, step: str, value, expected, told: str = ""):
        """`value` must have the bits of `expected`, which is returned."""
        apart = differing_rows(value, expected) if isinstance(expected, Tensor) else float(value != expected)
        self.note(step, apart, 0, told or f"{apart:.0f} of {len(expected)} rows have other bits")
        return expected

    def near(self, step: str, value: Tensor, piece: int = 0, rows: list[slice] | None = None) -> Tensor:
        """`value` [T, ...] may be a few ulps from the recorded one, which is returned."""
        key = (self.batch, self.layer, step, piece)
        if self.reference is None:
            self.seen[key] = value.clone()
            return value
        expected = self.reference[key]
        for part in [slice(None)] if rows is None else rows:
            self.within(step, value[part], expected[part])
        return expected

    def within(self, step: str, value: Tensor, expected: Tensor, floor: Tensor | None = None) -> None:
        """No element may lie further apart than the step's bound; the unit is that of the row's largest number."""
        dtype = torch.float32 if step in ALWAYS_FP32 else self.dtype
        if value.shape != expected.shape:
            told = f"shape {list(value.shape)} instead of {list(expected.shape)}"
            return self.note(step, float("inf"), 0, told)
        floor = expected.abs().amax(-1, keepdim=True) if floor is None else floor
        apart = ulps(value, expected, floor, dtype)
        bound = 0 if self.exact and step == "attention" else BOUNDS[self.dtype][step]
        return self.note(step, apart, bound, f"{apart:.3g} ulps apart")

    def note(self, step: str, size: float, bound: float, told: str) -> None:
        """Remember the largest difference of a step, and one that is too large."""
        self.largest[step] = max(self.largest.get(step, 0.0), size)
        if not size <= bound:
            self.findings.append(Finding(self.batch, self.layer, step, self.group.rank, size, bound, self.what, told))

    # --- a batch ------------------------------------------------------------------------------------------------------

    def see_begin(self, begin, start: int, tokens: int, table: Tensor, decode: bool) -> None:
        """A batch: the prefix hit, the keys of each rank, the slots."""
        begin(start, tokens, table, decode)
        what = f"decode at position {start}" if decode else f"prefill of positions {start} to {start + tokens - 1}"
        self.begun(start, tokens, what)
        attention = self.attention
        expected = ownership.local_length(start + tokens, self.dcp.size, self.dcp.rank, attention.interleave)
        keys = attention.batch.keys
        counted = int(self.dcp.all_gather(torch.tensor([keys], device=table.device)).sum())
        self.equal("lengths", keys, expected, f"{keys} keys here instead of {expected}")
        self.equal("lengths", counted, start + tokens, f"{counted} keys on all ranks instead of {start + tokens}")

    def see_begin_step(self, begin_step, position: Tensor, table: Tensor) -> None:
        """A decode step in fixed memory, which takes every row of the table."""
        begin_step(position, table)
        self.begun(int(position), 1, f"decode at position {int(position)}")

    def begun(self, start: int, tokens: int, what: str) -> None:
        """What both have in common. Raises Parted where the batch is not the reference's."""
        self.batch, self.reduced, self.layer, self.what, self.start = self.batch + 1, 0, 0, what, start
        self.batches, self.tokens = self.batch + 1, tokens
        given = (start, tokens)
        self.same("prefix hit", given, f"the batch begins at {start}")
        if self.reference is not None and self.reference[self.batch, 0, "prefix hit", 0] != given:
            raise Parted
        batch, device = self.attention.batch, self.attention.batch.table.device
        self.local = self.own(torch.arange(start, start + tokens, device=device))
        for slots, table in ((batch.slots, batch.table), (batch.index_slots, batch.index_table)):
            self.equal("slots", slots, ownership.slots_of(self.local, table, BLOCK))
        owned = self.dcp.all_gather((batch.slots >= 0).int()[None]).sum(0)
        self.equal("slots", owned, torch.ones_like(owned), "some position has no owner, or several")

    def own(self, positions: Tensor) -> Tensor:
        """Local indices of positions on this rank, -1 where another owns them."""
        return ownership.localise(positions, self.dcp.size, self.dcp.rank, self.attention.interleave)

    # --- norm, RoPE, caches -------------------------------------------------------------------------------------------

    def see_norm_rope(self, norm_rope, layer, x: Tensor, dense: bool):
        """The normed query of every token, new rows of a dense prefill, and the bytes that went into the caches."""
        self.layer, self.piece, self.computed = layer.index, 0, None
        q_latent, kv_rows, key_rows = norm_rope(layer, x, dense)
        self.same("query norm", q_latent)
        if dense:
            self.same("new rows", torch.cat([kv_rows, key_rows], -1))
        mine = self.local >= 0
        self.same("latent cache", self.latent_bytes(self.local[mine]), rows=mine)
        if layer.has_indexer:
            self.same("index cache", self.index_bytes(self.local[mine]), rows=mine)
        return q_latent, kv_rows, key_rows

    def latent_bytes(self, local: Tensor) -> Tensor:
        """uint8 [n, entry]: the cache entries of local rows."""
        slots, cache = ownership.slots_of(local, self.attention.batch.table, BLOCK), self.attention.latent[self.layer]
        return cache[slots // BLOCK, slots % BLOCK].view(torch.uint8)

    def index_bytes(self, local: Tensor) -> Tensor:
        """uint8 [n, 132]: the index keys of local rows with their scales."""
        slots = ownership.slots_of(local, self.attention.batch.index_table, BLOCK)
        parts = [view[slots // BLOCK, slots % BLOCK] for view in index_views(self.attention.index[self.layer])]
        return torch.cat([parts[0].view(torch.uint8), parts[1][:, None].contiguous().view(torch.uint8)], -1)

    def finish(self, tokens: int) -> None:
        """After a request of `tokens` rows: every row of the caches, the shards together, still as DCP1 has them."""
        self.batch, self.what = LAST, "the caches after the last batch"
        mine = self.own(torch.arange(tokens, device=self.attention.batch.table.device))
        for layer, index in enumerate(self.attention.index):
            self.layer = layer
            self.same("latent cache", self.latent_bytes(mine[mine >= 0]), rows=mine >= 0)
            if index is not None:
                self.same("index cache", self.index_bytes(mine[mine >= 0]), rows=mine >= 0)

    # --- attention ----------------------------------------------------------------------------------------------------

    def see_context(self, context, layer) -> Tensor:
        """The cached rows that a dense prefill gathered."""
        return self.same("context", context(layer))

    def see_dense(self, dense, layer, *given) -> Tensor:
        """Head values of a dense prefill."""
        return self.near("dense attention", dense(layer, *given))

    def see_select(self, select, layer, x: Tensor, q_latent: Tensor) -> Tensor:
        """The selected positions of every row."""
        return self.same("selection", select(layer, x, q_latent))

    def select_piece(self, q, head_weights, k_local, key_positions, query_positions, k, group) -> Tensor:
        """Some rows' selection; of a long batch, only some pieces are computed."""
        given = (q, head_weights, k_local, key_positions, query_positions, k, group)
        if self.reference is None or not self.thin(LONGER):
            return self.ops.select(*given)
        first = int(query_positions[0]) - self.start
        number, last = first // len(q), first + len(q) >= self.tokens
        if self.skipped(bool(number % FEW) and not last):
            return self.reference[self.batch, self.layer, "selection", 0][first : first + len(q)]
        return self.ops.select(*given)

    def thin(self, long: int) -> bool:
        """Whether this batch is too long to compute, or to record, every piece of it."""
        return self.tokens > long and self.attention.scratch.device.type != "cuda"

    def skipped(self, skip: bool) -> bool:
        """Count a piece; whether it is left out."""
        self.pieces[0] += not skip
        self.pieces[1] += 1
        return bool(skip)

    def see_sparse(self, sparse, layer, q_latent: Tensor) -> Tensor:
        """The rows of the batch that go through `route`, piece by piece."""
        self.model_layer, self.next_row, self.computed = layer, 0, []
        return sparse(layer, q_latent)

    def route(self, q: Tensor, partial, manager, decode_only: bool = False) -> Tensor:
        """A piece's gather, partials and combine: whole attention of this rank's heads, fp32 [rows, h, 512]."""
        rows = slice(self.next_row, self.next_row + len(q))
        self.next_row, self.piece = rows.stop, self.piece + 1
        left_out = self.thin(LONG) and rows.stop < self.tokens
        if self.reference is None and left_out:
            return self.ops.route(q, partial, manager, decode_only)  # nobody will compare it
        if self.reference is not None and self.thin(LONG) and self.skipped(left_out):
            return q.new_zeros(*q.shape[:2], LATENT, dtype=torch.float32)
        self.computed.append(rows)
        held = []

        def watched(gathered: Tensor) -> tuple[Tensor, Tensor]:
            self.ids = self.attention.topk_indices[rows]
            held.append((gathered, *partial(gathered)))
            return held[-1][1:]

        self.same("queries", q, piece=self.piece)
        result = self.ops.route(q, watched, manager, decode_only).clone()
        if self.reference is not None:
            expected = self.reference[self.batch, self.layer, "attention", self.piece]
            self.judge(q, *held[-1], result, expected)  # type: ignore[call-arg]
        return self.near("attention", result, self.piece)

    def partial(self, q, kv, slots, scale, cache_format=None, kv_scale=None, plan=None) -> tuple[Tensor, Tensor]:
        """A rank's partial: over the slots of the selected positions that it owns, each owned once over the ranks."""
        if self.reference is not None:
            expected = ownership.slots_of(self.own(self.ids), self.attention.batch.table, BLOCK)
            self.equal("selected slots", slots, expected)
            counts = self.dcp.all_gather((slots >= 0).sum(1)[None]).sum(0)
            self.equal("selected slots", counts, (self.ids >= 0).sum(1), "the ranks' keys are not those selected")
        return self.ops.partial(q, kv, slots, scale, cache_format, kv_scale, plan)

    def judge(self, q: Tensor, gathered: Tensor, out: Tensor, lse: Tensor, result: Tensor, expected: Tensor) -> None:
        """Heads, partials and combine of a piece, at some of its rows."""
        everyones = self.dcp.all_gather(q[None]).transpose(0, 1).flatten(1, 2)  # [rows, H, 576]
        if gathered.shape != everyones.shape:
            told = f"{gathered.shape[1]} heads instead of {everyones.shape[1]}"
            return self.note("heads", float("inf"), 0, told)
        self.equal("heads", gathered, everyones)
        rows = self.sample(result, expected)
        true, true_lse, score = self.attend(everyones[rows], self.ids[rows])
        self.within("lse", lse[rows][..., None], true_lse[..., None], score[..., None])
        self.within("partial", out[rows], true)
        outs, lses = self.dcp.all_gather(out[rows].float()[None]), self.dcp.all_gather(lse[rows].float()[None])
        mine = slice(self.dcp.rank * q.shape[1], (self.dcp.rank + 1) * q.shape[1])
        merged, floor = merge(outs[:, :, mine].double(), lses[:, :, mine].double())
        return self.within("combine", result[rows], merged, floor)

    def sample(self, result: Tensor, expected: Tensor) -> Tensor:
        """Row numbers of a piece, the same on every rank: evenly spread, and those furthest from DCP1's."""
        apart = (result - expected).abs().amax((1, 2)).nan_to_num(torch.inf, torch.inf)
        apart = self.dcp.all_gather(apart[None]).amax(0)
        spread = torch.linspace(0, len(apart) - 1, min(SAMPLE, len(apart)), device=apart.device).long()
        return torch.cat([spread, apart.topk(min(WORST, len(apart))).indices]).unique()

    def attend(self, q: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """fp64 attention over the selected rows that this rank owns: out [n, H, 512], lse [n, H], largest |score|."""
        packed, counts = ownership.pack_valid(self.own(ids))
        local = packed[:, : max(1, int(counts.max()))]
        attention, slots = self.attention, ownership.slots_of(local, self.attention.batch.table, BLOCK)
        scale = None if attention.kv_scale is None else FP8_SCALE
        keys = read_latent(attention.latent[self.layer], slots, attention.cache_format, scale)  # [n, K, 576]
        keys = (keys.to(q.dtype) if q.is_cuda else keys).double()  # kernels round an entry to the query's type
        hole = (slots < 0)[:, None]
        q = q.double() * attention.config.scale
        scores = (q @ keys.transpose(1, 2)).masked_fill(hole, -torch.inf)
        sizes = (q.abs() @ keys.abs().transpose(1, 2)).masked_fill(hole, 0.0).amax(-1)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
        return weights @ keys[..., :LATENT], lse, sizes
