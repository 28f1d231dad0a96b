"""Exact mode across tensor-parallel sizes as well: TP1/DCP1 has the bits of TP4/DCP4 and TP8/DCP8.

exact/ fixes the order of every sum over keys. What is left to depend on the TP size is the shape of the products that
tensor parallelism cuts, and the sum over ranks that completes o_proj and the MLP. The remedy is the same: cut the model
into S canonical shards (shard.py, as for TP = S) whatever the TP size is. A rank of TP holds S / TP neighbouring shards
and runs them one after the other, each in the shapes of its own:

    by head, column, vocabulary row    each shard's result, side by side: q_b, kv_b, gate, up, lm_head, attention
    sums                               one binary tree over neighbours: ((0 1) (2 3)) ((4 5) (6 7)), in fp32, rounded to
                                       the model's type at the root; a rank owns one node, the levels above are summed
                                       from what an all-gather brings

S is a power of two and a multiple of the TP size. A rank with S / TP shards calls S / TP times as many, smaller,
products, and the all-gather moves more bytes than an all-reduce: this buys a proof, not speed.

It does not: change DCP's part (exact/), or hold on a GPU: there the splits of a class are planned from a rank's
heads, and a kernel computes the heads of several shards at once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dcp_fix import attention
from dcp_fix.base.errors import UserError
from dcp_fix.engine.exact_attention import METHODS, ExactAttention
from dcp_fix.engine.model import Layer, Model
from dcp_fix.engine.shard import shard
from dcp_fix.kv_cache import LATENT, ROPE
from dcp_fix.ranks.group import Group


def tree_sum(parts: list[Tensor]) -> Tensor:
    """Neighbours first, in fp32: ((0 1) (2 3)) ... of a power of two.

    >>> tree_sum([torch.tensor(2.0**24), torch.tensor(1.0), torch.tensor(-(2.0**24)), torch.tensor(0.0)]).item()
    0.0
    """
    parts = [part.float() for part in parts]
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


class Shards:
    """One layer of the model as neighbouring canonical shards; has what model.Layer has."""

    def __init__(self, shards: list[Layer]) -> None:
        first = shards[0]
        self.shards, self.config, self.index, self.w = shards, first.config, first.index, first.w
        self.has_indexer, self.latents, self.index_queries = first.has_indexer, first.latents, first.index_queries
        self.heads = sum(one.heads for one in shards)

    def project(self, name: str, x: Tensor) -> Tensor:
        """As Layer.project; of o_proj this rank's node of the sum."""
        if name != "o_proj":
            return self.shards[0].project(name, x)
        return tree_sum([one.project(name, part) for one, part in zip(self.shards, self.cut(x, -1), strict=True)])

    def mlp(self, x: Tensor) -> Tensor:
        """This rank's node of the sum."""
        return tree_sum([one.mlp(x) for one in self.shards])

    def queries(self, q_latent: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """As Layer.queries, every shard's heads."""
        parts = zip(*(one.queries(q_latent, cos_sin) for one in self.shards), strict=True)
        return tuple(torch.cat(part, -2) for part in parts)

    def absorb(self, q_nope: Tensor, q_pe: Tensor) -> Tensor:
        """As Layer.absorb."""
        parts = zip(self.shards, self.cut(q_nope, -2), self.cut(q_pe, -2), strict=True)
        return torch.cat([one.absorb(nope, pe) for one, nope, pe in parts], -2)

    def unabsorb(self, out: Tensor) -> Tensor:
        """As Layer.unabsorb."""
        return torch.cat([one.unabsorb(part) for one, part in zip(self.shards, self.cut(out, -2), strict=True)], -2)

    def cut(self, x: Tensor, dim: int) -> list[Tensor]:
        """Each shard's part, contiguous as it would be alone."""
        return [part.contiguous() for part in x.chunk(len(self.shards), dim)]


class ShardsModel(Model):
    """A rank's canonical shards as one model."""

    def __init__(self, models: list[Model]) -> None:
        self.models, self.config, self.weights = models, models[0].config, models[0].weights
        self.layers = [Shards(list(layers)) for layers in zip(*(one.layers for one in models), strict=True)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., hidden] to logits [..., vocabulary rows held here]."""
        return torch.cat([one.logits(hidden) for one in self.models], -1)


class ShardsAttention(ExactAttention):
    """ExactAttention over the heads of one canonical shard at a time."""

    def group_heads(self, layer: Shards) -> int:
        """Heads of one shard."""
        return layer.shards[0].heads

    def dense(self, layer: Shards, q_latent: Tensor, latent: Tensor, key: Tensor) -> Tensor:
        """Own heads over the cached context and every new row, shard by shard. -> [T, h, v]."""
        context = self.context(layer).to(latent.dtype).split([LATENT, ROPE], -1)
        rows, keys = torch.cat([context[0], latent]), torch.cat([context[1], key])
        cos_sin = self.cos_sin[self.batch.positions]
        values = []
        for one in layer.shards:
            q = torch.cat(one.queries(q_latent, cos_sin), -1)  # [T, h, nope + rope]
            values.append(attention.dense_prefill(q, *one.expand(rows, keys), self.config.scale))
        return torch.cat(values, 1)


def cut(model: Model, group: Group, shards: int, combine: str) -> ShardsModel:
    """The canonical shards that this rank holds. Raises UserError unless a rank owns one whole node of the tree."""
    if combine not in METHODS:
        raise UserError(f"canonical shards with the combine {combine!r}, whose bits depend on DCP; choose exact")
    if model.weights["lm_head.weight"].is_cuda:
        raise UserError("canonical shards give equal bits on a CPU only; leave them out on a GPU")
    if shards & (shards - 1) or shards % group.size:
        raise UserError(f"{shards} canonical shards over {group.size} ranks; choose a power of two that they divide")
    each = shards // group.size
    return ShardsModel([shard(model, group.rank * each + i, shards) for i in range(each)])


def reduction(group: Group, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Completes a sum from every rank's node."""
    return lambda node: tree_sum(list(group.all_gather(node[None]))).to(dtype)
