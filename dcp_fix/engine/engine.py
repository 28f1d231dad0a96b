"""Greedy generation on one rank: chunked prefill, prefix cache, decode. Applies tensor and decode context parallelism.

Every rank of a group constructs one `Engine` and makes the same calls; all get the same answer. With TP ranks and DCP
size D the group is cut into TP / D subgroups of consecutive ranks: a rank holds 1 / TP of the heads, MLP columns and
vocabulary, and 1 / D of the KV rows, so that each subgroup holds every row once. D = 1 is a subgroup of one.

    LocalGroup.run(4, lambda group: Engine(folder, group, dcp_size=4).generate(prompt, 24))[0].tokens

A prompt is prefilled in chunks of `max_batch_tokens`, after whatever leading blocks an earlier request left in the
cache, and decoded one token at a time until the end token. One request at a time.

It does not: sample, batch requests, tokenize, or know which kind of group it runs in.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dcp_fix.base.equality import digest
from dcp_fix.base.errors import UserError
from dcp_fix.engine.blocks import CacheFull
from dcp_fix.engine.config import Config
from dcp_fix.engine.decode_step import DecodeStep
from dcp_fix.engine.exact_attention import METHODS as EXACT
from dcp_fix.engine.exact_attention import ExactAttention
from dcp_fix.engine.model import Model
from dcp_fix.engine.scratch import Scratch
from dcp_fix.engine.shard import check_dcp, shard
from dcp_fix.engine.sharded import Ops, ShardedAttention
from dcp_fix.exact import CLASSES
from dcp_fix.kv_cache import BLOCK, INDEX_DIM, LATENT, ROPE, check_format
from dcp_fix.ranks.group import Group

GIB = 1 << 30


@dataclass(frozen=True)
class Generation:
    """A greedy answer: `tokens`, the end token included, `logits` fp32 [steps, vocab], `cached` prompt tokens."""

    tokens: list[int]
    logits: Tensor
    cached: int

    @property
    def margins(self) -> list[float]:
        """Per step, how far the chosen token's logit lies above the next best."""
        best = self.logits.topk(2, -1).values
        return (best[:, 0] - best[:, 1]).tolist()

    @property
    def digests(self) -> list[str]:
        """Per step, SHA256 of the logits' bytes."""
        return [digest(row) for row in self.logits]


class Engine:
    """One rank's model shard, caches and generation loop.

    `max_length` tokens (prompt and answer) fit into the cache. `ops` swaps in historical steps, `stale` says what
    unwritten scratch memory holds (scratch.py), `workspace_budget` is in bytes. `static_decode`: decode steps run in
    fixed memory, on a GPU as one CUDA graph (decode_step.py). `combine`: "ag_rs", "a2a", or "exact" for the same logits
    in every bit whatever `dcp_size` is, for sizes that divide `classes` (exact_attention.py).

    Raises UserError for sizes that do not divide, a length that the checkpoint does not know, widths that the cache
    does not have, an unknown device or cache format.
    """

    def __init__(
        self, model: Model | Path | str, group: Group, *, dcp_size: int, interleave: int = 1,
        cache_format: str = "fp8_ds_mla", combine: str = "ag_rs", ops: Ops | None = None, stale: str = "previous",
        workspace_budget: int = GIB, max_batch_tokens: int = 8192, max_length: int = 8192,
        device: torch.device | str = "cpu", dtype: torch.dtype | None = None, static_decode: bool = False,
        classes: int = CLASSES,
    ) -> None:  # fmt: skip
        device = resolve_device(device)
        dtype = dtype or default_dtype(device)
        model = model if isinstance(model, Model) else Model.load(model, device, dtype)
        config = model.config
        check_widths(config)
        check_dcp(group.size, dcp_size)
        check_format(cache_format)
        check_sizes(interleave, max_batch_tokens, max_length, config.max_position_embeddings)
        self.model = shard(model, group.rank, group.size)
        self.config, self.group, self.device = config, group, device
        self.max_batch_tokens, self.max_length = max_batch_tokens, max_length
        dcp = group.subgroup(dcp_size)
        attention, own = (ExactAttention, {"classes": classes}) if combine in EXACT else (ShardedAttention, {})
        self.pool = attention.pool(max_length, dcp_size, **own)
        rows = min(max_batch_tokens, max_length)
        widths = {"q": config.q_lora_rank, "kv": LATENT, "k_pe": ROPE}
        self.attention = attention(
            config, self.model.layers[0].heads, dcp, num_blocks=self.pool.num_blocks, interleave=interleave,
            cache_format=cache_format, combine=combine, ops=ops or Ops(),
            scratch=Scratch(widths, rows, stale, device, dtype),
            workspace_budget=workspace_budget, max_batch_tokens=rows, share=sharing(group, dcp), **own,
        )  # fmt: skip
        self.step = DecodeStep(self.attention, self.logits, self.pool.num_blocks, group) if static_decode else None

    @torch.inference_mode()
    def generate(
        self, prompt_ids: list[int], max_new_tokens: int, on_progress: Callable[[int, int], None] | None = None
    ) -> Generation:
        """The greedy continuation of a prompt, at most `max_new_tokens` long.

        `on_progress(done, total)` counts rows times layers. Raises CacheFull for a prompt that does not fit, before
        anything is written, and WorkspaceError if the workspace plan exceeds the budget.
        """
        self.check_prompt(prompt_ids, max_new_tokens)
        table, cached = self.attention.ops.open(self.pool, prompt_ids, len(prompt_ids) + max_new_tokens - 1)
        self.report(on_progress, len(prompt_ids) - cached + max_new_tokens - 1)
        block_table = torch.tensor(table, device=self.device)
        tokens, logits, start = list(prompt_ids), [], cached
        try:
            while start < len(prompt_ids):
                end = self.batch_end(start, len(prompt_ids))
                row = self.forward(tokens[start:end], start, block_table, decode=False)
                start = end
            while True:
                logits.append(row)
                tokens.append(int(row.argmax()))
                if self.config.ends(tokens[-1]) or len(logits) == max_new_tokens:
                    break
                row = self.decode(tokens[-1], start, block_table)
                start += 1
        finally:
            if self.attention.unit:
                start = min(start, len(prompt_ids))  # a fresh engine would not compute the rest one by one
            self.pool.close(table, tokens[:start])  # rows that are in the cache, whole or up to where a batch failed
        return Generation(tokens[len(prompt_ids) :], torch.stack(logits).float().cpu(), cached)

    def batch_end(self, start: int, length: int) -> int:
        """Where a prefill batch ends that begins at `start` of `length` tokens: in exact mode wherever a hit can."""
        unit = self.attention.unit
        room = min(self.max_batch_tokens, unit - start % unit) if unit else self.max_batch_tokens
        return min(start + room, length)

    def forward(self, tokens: list[int], start: int, block_table: Tensor, decode: bool) -> Tensor:
        """One batch through the model: the logits [vocab] after its last token."""
        self.attention.begin(start, len(tokens), block_table, decode)
        return self.logits(torch.tensor(tokens, device=self.device))

    def decode(self, token: int, position: int, block_table: Tensor) -> Tensor:
        """The logits [vocab] after one more token."""
        if self.step is None:
            return self.forward([token], position, block_table, decode=True)
        return self.step(token, position, block_table)

    def logits(self, ids: Tensor) -> Tensor:
        """The logits [vocab] after the last of `ids` [T], the batch that the attention has begun."""
        hidden = self.model.forward(ids, self.attention, self.group.all_reduce)
        return self.group.all_gather(self.model.logits(hidden[-1]))[: self.config.vocab_size]

    @torch.inference_mode()
    def leave_rows(self, prompt_ids: list[int]) -> None:
        """Let another, healthy request run first and leave its rows in the scratch buffers.

        It runs with the corrected steps: memory that an allocator hands out was last used by something that filled it.
        """
        ops, self.attention.ops = self.attention.ops, Ops()
        self.generate(prompt_ids, 1)
        self.attention.ops = ops
        self.attention.scratch.remember(min(len(prompt_ids), self.max_batch_tokens))

    def check_prompt(self, prompt_ids: list[int], max_new_tokens: int) -> None:
        """Raise UserError for an empty request or an unknown token id, CacheFull for one beyond `max_length`."""
        if not prompt_ids or max_new_tokens < 1:
            raise UserError(
                f"a prompt of {len(prompt_ids)} tokens and {max_new_tokens} new ones; both must be at least 1"
            )
        rows = len(prompt_ids) + max_new_tokens - 1
        if rows > self.max_length:
            raise CacheFull(
                f"a request of {rows} tokens and a cache made for {self.max_length}; shorten it or raise max_length"
            )
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self.config.vocab_size:
            raise UserError(
                f"token ids {min(prompt_ids)} .. {max(prompt_ids)}; the model has 0 .. {self.config.vocab_size - 1}"
            )

    def report(self, on_progress: Callable[[int, int], None] | None, rows: int) -> None:
        """Let the attention count finished rows into `on_progress`."""
        done, total = 0, rows * self.config.num_hidden_layers

        def advance(finished: int) -> None:
            nonlocal done
            done += finished
            on_progress(done, total)

        self.attention.advance = advance if on_progress else lambda finished: None


def sharing(group: Group, dcp: Group) -> Callable[[list[Callable]], list]:
    """How to run jobs that give the same on every rank with the same KV rows: at D = 1, every rank of the group."""
    return group.share if dcp.size == 1 else lambda jobs: [job() for job in jobs]


def resolve_device(name: torch.device | str) -> torch.device:
    """A device that is here. Raises UserError for an unknown name and for CUDA without a GPU."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {str(name)!r} is unknown; choose cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {str(name)!r} is not supported; choose cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device {str(name)!r}: {torch.cuda.device_count()} CUDA devices here; choose cpu or another index"
        )
    return device


def default_dtype(device: torch.device) -> torch.dtype:
    """fp32 on a CPU; bf16, as the checkpoint is stored, on a GPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def check_widths(config: Config) -> None:
    """Raise UserError for a model whose keys do not have the widths of the caches."""
    caches = {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE, "index_head_dim": INDEX_DIM}
    for name, width in caches.items():
        if getattr(config, name) != width:
            raise UserError(f"{name} is {getattr(config, name)}; allowed: {width}, the width of the cache's entries")


def check_sizes(interleave: int, max_batch_tokens: int, max_length: int, positions: int) -> None:
    """Raise UserError for sizes that the cache cannot be cut into or that the checkpoint does not know."""
    if interleave < 1 or BLOCK % interleave:
        raise UserError(
            f"an interleave of {interleave} does not divide the cache block of {BLOCK} tokens; choose a divisor"
        )
    if max_batch_tokens < 1:
        raise UserError(f"max_batch_tokens is {max_batch_tokens}; at least one token must fit into a batch")
    if not 1 <= max_length <= positions:
        raise UserError(f"a length of {max_length} tokens; the checkpoint knows 1 .. {positions} positions")
