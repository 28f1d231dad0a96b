"""What training minimises: the next token, and for each indexer the distance from the attention it should predict.

The indexer's loss is the Kullback-Leibler divergence between the attention of the layers that it serves (averaged over
heads, for a sample of queries) and the softmax of its scores. Its inputs and targets are detached, so the two losses
train disjoint weights, as in the DeepSeek-V3.2 technical report.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dcp_fix.engine.config import Config
from dcp_fix.engine.model import Layer, Model, PlainAttention
from dcp_fix.tiny.curriculum import Stage

INDEXER_ROWS = 64  # queries per text whose attention teaches the indexer


class ObservedAttention(PlainAttention):
    """`PlainAttention` that also gathers, for sampled queries, what the indexer should have scored."""

    def __init__(self, config: Config, rows: Tensor, length: int, sparse: bool) -> None:
        super().__init__(config, length, rows.device)
        self.rows, self.sparse = rows, sparse  # rows [B, R], sampled query positions
        self.scores: list[Tensor] = []  # per full layer, log-softmax of the indexer [B, R, T]
        self.targets: list[Tensor] = []  # per full layer, attention of the layers that share it [B, R, T], summed

    def __call__(self, layer: Layer, x: Tensor) -> Tensor:
        """As in `PlainAttention`; observes on the way."""
        q, k, v, q_latent = self.project(layer, x)
        future = torch.arange(x.shape[-2], device=x.device) > self.rows[..., None]  # [B, R, T]
        if layer.has_indexer:
            self.scores.append(self.indexer_rows(layer, x.detach(), q_latent.detach(), future))
            self.targets.append(torch.zeros_like(self.scores[-1]))
            if self.sparse and x.shape[-2] > self.config.index_topk:
                self.mask = self.select(layer, x.detach(), q_latent.detach())
        self.targets[-1] += self.attention_rows(q, k, future)
        mask = None if self.mask is None else self.mask[:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.config.scale)
        return out.transpose(-3, -2)

    @torch.no_grad()
    def attention_rows(self, q: Tensor, k: Tensor, future: Tensor) -> Tensor:
        """Attention of the sampled queries, averaged over heads [B, R, T]."""
        index = self.rows[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[-1])
        scores = (q.gather(2, index) @ k.transpose(-1, -2)).float() * self.config.scale
        return scores.masked_fill_(future[:, None], -torch.inf).softmax(-1).mean(1)

    def indexer_rows(self, layer: Layer, x: Tensor, q_latent: Tensor, future: Tensor) -> Tensor:
        """Log-softmax of the indexer's scores for the sampled queries [B, R, T]."""
        batch = torch.arange(x.shape[0], device=x.device)[:, None]
        q, weights = layer.index_queries(q_latent[batch, self.rows], x[batch, self.rows], self.cos_sin[self.rows])
        k = layer.index_keys(x, self.cos_sin)
        each = torch.einsum("brhd,btd->brht", q, k).relu()
        scores = torch.einsum("brht,brh->brt", each.float(), weights)
        return scores.masked_fill(future, -torch.inf).log_softmax(-1)

    def indexer_loss(self) -> Tensor:
        """Mean Kullback-Leibler divergence of the indexers from the attention that they should predict."""
        losses = []
        for scores, target in zip(self.scores, self.targets, strict=True):
            p = target / target.sum(-1, keepdim=True)
            losses.append(torch.where(p > 0, p * (p.clamp_min(1e-30).log() - scores), 0.0).sum(-1).mean())
        return torch.stack(losses).mean()


def losses(model: Model, ids: Tensor, weights: Tensor, stage: Stage) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted cross-entropy, indexer loss (0 where the stage does not teach it), and accuracy on the tokens that
    count most.
    """
    inputs, targets, marks = ids[:, :-1], ids[:, 1:], weights[:, 1:]
    length, observed = inputs.shape[1], None
    if stage.indexer:
        rows = torch.multinomial(marks + 0.05, min(INDEXER_ROWS, length))
        observed = ObservedAttention(model.config, rows, length, stage.sparse)
    attend = observed or PlainAttention(model.config, length, ids.device)
    logits = model.logits(model.forward(inputs, attend)).float()
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(marks)
    hardest = marks == marks.max()
    accuracy = (logits.argmax(-1) == targets)[hardest].float().mean()
    indexer = observed.indexer_loss() if observed else torch.zeros((), device=ids.device)
    return (each * marks).sum() / marks.sum(), indexer, accuracy
