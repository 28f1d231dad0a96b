"""The GLM-DSA forward pass, one rank's view: sparse multi-head latent attention (MLA), dense and expert MLPs.

    x = embed(tokens)
    for each layer:  x += o_proj(attend(layer, norm(x)));  x += mlp(norm(x))
    logits = lm_head(norm(x))

The model knows nothing of ranks, caches or slots. Two callables come from outside: `attend` turns a layer's input
into the values of the heads whose weights this model holds, and `reduce` sums a sublayer's output over the ranks that
share it (the identity by default). `PlainAttention` is the cacheless `attend` that training and the oracle tests use;
`engine.py` brings the sharded one.

Formulas: DeepSeek-V3.2 technical report (MLA, lightning indexer) and the GLM-5 model card; the oracle is transformers'
`GlmMoeDsaForCausalLM`.

Not here: reading a checkpoint (checkpoint.py), or what of its config is implemented (config.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dcp_fix import norm_rope
from dcp_fix.engine.checkpoint import fuse_experts, read_weights
from dcp_fix.engine.config import Config


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """norm_rope.rms_norm, returned in x's dtype."""
    return norm_rope.rms_norm(x, weight, eps).to(x.dtype)


def rope_table(config: Config, device: torch.device | str = "cpu") -> Tensor:
    """Rotary table, fp32 [max positions, rope]: the cosines of all pairs, then their sines."""
    half = config.qk_rope_head_dim // 2
    frequency = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(config.max_position_embeddings, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], -1).float().to(device)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """norm_rope.rotate of interleaved pairs, returned in x's dtype."""
    return norm_rope.rotate(x, cos_sin, interleaved=True).to(x.dtype)


class Layer:
    """One decoder layer's weights and the projections around its attention. `h`: heads whose weights are held here."""

    def __init__(self, config: Config, weights: dict[str, Tensor], index: int) -> None:
        prefix = f"model.layers.{index}."
        self.config, self.index = config, index
        self.w = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        self.has_indexer = config.indexer_types[index] == "full"
        self.is_moe = config.mlp_layer_types[index] == "sparse"
        kv_b = self.w["self_attn.kv_b_proj.weight"]
        per_head = kv_b.view(-1, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)
        self.w_uk, self.w_uv = per_head.split(
            [config.qk_nope_head_dim, config.v_head_dim], 1
        )  # [h, nope, 512], [h, v, 512]

    @property
    def heads(self) -> int:
        """Attention heads held here."""
        return self.w_uk.shape[0]

    def project(self, name: str, x: Tensor) -> Tensor:
        """x @ W.T for the attention weight of that name, x [..., in], in the weight's type."""
        weight = self.w[f"self_attn.{name}.weight"]
        return F.linear(x.to(weight.dtype), weight)

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Before the fused norm/RoPE: query latent [..., q_lora], KV latent [..., 512], unrotated key [..., 64]."""
        kv, k_pe = self.project("kv_a_proj_with_mqa", x).split(
            [self.config.kv_lora_rank, self.config.qk_rope_head_dim], -1
        )
        return self.project("q_a_proj", x), kv, k_pe

    def queries(self, q_latent: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """From the normed query latent: q_nope [..., h, nope] and rotated q_pe [..., h, rope]."""
        q = self.project("q_b_proj", q_latent).unflatten(-1, (-1, self.config.qk_head_dim))
        q_nope, q_pe = q.split([self.config.qk_nope_head_dim, self.config.qk_rope_head_dim], -1)
        return q_nope, rotate(q_pe, cos_sin[..., None, :])

    def absorb(self, q_nope: Tensor, q_pe: Tensor) -> Tensor:
        """The query against the latent itself: [..., h, 512 + rope]."""
        return torch.cat([torch.einsum("...hn,hnl->...hl", q_nope, self.w_uk), q_pe], -1)

    def unabsorb(self, out: Tensor) -> Tensor:
        """Attention over latents [..., h, 512] to head values [..., h, v]."""
        return torch.einsum("...hl,hvl->...hv", out.to(self.w_uv.dtype), self.w_uv)

    def expand(self, latent: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """Normed latent [..., 512], rotated key [..., rope] to keys [..., h, nope + rope] and values [..., h, v]."""
        k_nope = torch.einsum("...l,hnl->...hn", latent, self.w_uk)
        value = torch.einsum("...l,hvl->...hv", latent, self.w_uv)
        return torch.cat([k_nope, k_pe[..., None, :].expand(*k_nope.shape[:-1], -1)], -1), value

    def index_queries(self, q_latent: Tensor, x: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Indexer queries [..., Hi, 128], rotated first 64, and head weights [..., Hi] with both scales folded in."""
        c = self.config
        q = self.project("indexer.wq_b", q_latent).unflatten(-1, (c.index_n_heads, c.index_head_dim))
        rope, rest = q.split([c.qk_rope_head_dim, c.index_head_dim - c.qk_rope_head_dim], -1)
        weights = self.project("indexer.weights_proj", x).float() * (c.index_n_heads * c.index_head_dim) ** -0.5
        return torch.cat([rotate(rope, cos_sin[..., None, :]), rest], -1), weights

    def index_keys(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """Indexer keys [..., 128]: LayerNorm, then RoPE on the first 64, as the fused kernel does it."""
        c = self.config
        weight, bias = self.w["self_attn.indexer.k_norm.weight"], self.w["self_attn.indexer.k_norm.bias"]
        k = F.layer_norm(
            self.project("indexer.wk", x).float(), (c.index_head_dim,), weight.float(), bias.float(), INDEX_NORM_EPS
        )
        rope, rest = k.to(x.dtype).split([c.qk_rope_head_dim, c.index_head_dim - c.qk_rope_head_dim], -1)
        return torch.cat([rotate(rope, cos_sin), rest], -1)

    def mlp(self, x: Tensor) -> Tensor:
        """SwiGLU MLP; the experts are one wide MLP whose blocks the router scales, most by zero."""
        gate_up = F.linear(x, self.w["mlp.gate_proj.weight"]), F.linear(x, self.w["mlp.up_proj.weight"])
        inner = F.silu(gate_up[0]) * gate_up[1]
        if self.is_moe:
            inner = (
                inner.unflatten(-1, (self.config.n_routed_experts + 1, -1)) * self.route(x)[..., None].to(x.dtype)
            ).flatten(-2)
        return F.linear(inner, self.w["mlp.down_proj.weight"])

    def route(self, x: Tensor) -> Tensor:
        """Expert weights [..., E + 1], fp32: sigmoid scores of the top ones, normalised, scaled; the shared one's 1."""
        scores = F.linear(x.float(), self.w["mlp.gate.weight"].float()).sigmoid()
        biased = scores + self.w["mlp.gate.e_score_correction_bias"].float()
        chosen = biased.topk(self.config.num_experts_per_tok, -1).indices
        picked = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        weights = picked / (picked.sum(-1, keepdim=True) + 1e-20) * self.config.routed_scaling_factor
        return torch.cat([weights, torch.ones_like(weights[..., :1])], -1)


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """The type of the weight `name` in a model of type `dtype`: fp32 where that is part of the model, as transformers
    keeps it too. Biases of the router lie around 7, where bf16 has steps of 1/32, and choose other experts in it.
    """
    always = name.endswith((".mlp.gate.weight", ".mlp.gate.e_score_correction_bias"))
    in_fp16 = dtype == torch.float16 and name.endswith(".indexer.weights_proj.weight")
    return torch.float32 if always or in_fp16 else dtype


INDEX_NORM_EPS = 1e-6
Attend = Callable[[Layer, Tensor], Tensor]  # (layer, normed input [..., T, hidden]) -> head values [..., T, h, v]


class Model:
    """A GLM-DSA model: `config`, `weights` by checkpoint name (experts fused, see `fuse_experts`), `layers`."""

    def __init__(self, config: Config, weights: dict[str, Tensor]) -> None:
        self.config, self.weights = config, weights
        self.layers = [Layer(config, weights, i) for i in range(config.num_hidden_layers)]

    @classmethod
    def load(cls, folder: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Model:
        """Load a checkpoint folder; weights in `dtype` on `device`. Raises `CheckpointError`."""
        folder = Path(folder)
        config = Config.from_json(folder / "config.json")
        weights = read_weights(folder / "model.safetensors", config)
        weights = fuse_experts(weights, config)
        return cls(config, {name: value.to(device, dtype_of(name, dtype)) for name, value in weights.items()})

    def forward(self, tokens: Tensor, attend: Attend, reduce: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        """Token ids [..., T] to normed hidden states [..., T, hidden]."""
        eps = self.config.rms_norm_eps
        x = F.embedding(tokens, self.weights["model.embed_tokens.weight"])
        for layer in self.layers:
            values = attend(layer, rms_norm(x, layer.w["input_layernorm.weight"], eps))
            x = x + reduce(layer.project("o_proj", values.flatten(-2)))
            x = x + reduce(layer.mlp(rms_norm(x, layer.w["post_attention_layernorm.weight"], eps)))
        return rms_norm(x, self.weights["model.norm.weight"], eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., hidden] to logits [..., vocabulary rows held here]."""
        return F.linear(hidden, self.weights["lm_head.weight"])


class PlainAttention:
    """Causal attention over the whole sequence, no cache: what `attend` means mathematically. Differentiable.

    Sequences longer than `index_topk` are masked to the indexer's selection; a "shared" layer reuses the previous
    full layer's.
    """

    def __init__(self, config: Config, length: int, device: torch.device | str = "cpu") -> None:
        if length > config.max_position_embeddings:
            raise ValueError(
                f"sequence of {length} tokens; the checkpoint knows {config.max_position_embeddings} positions"
            )
        self.config, self.cos_sin = config, rope_table(config, device)[:length]
        self.mask: Tensor | None = None  # [..., T, T], True where attended

    def __call__(self, layer: Layer, x: Tensor) -> Tensor:
        """Normed input [..., T, hidden] to head values [..., T, h, v]."""
        q, k, v, q_latent = self.project(layer, x)
        if layer.has_indexer and x.shape[-2] > self.config.index_topk:
            self.mask = self.select(layer, x.detach(), q_latent.detach())
        mask = None if self.mask is None else self.mask[..., None, :, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.config.scale)
        return out.transpose(-3, -2)

    def project(self, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values [..., h, T, width] of every head, and the normed query latent [..., T, q_lora]."""
        q_latent, kv, k_pe = layer.latents(x)
        # The config's eps, as in vLLM, whose answers count. transformers gives these two norms its default of 1e-6.
        q_latent = rms_norm(q_latent, layer.w["self_attn.q_a_layernorm.weight"], self.config.rms_norm_eps)
        latent = rms_norm(kv, layer.w["self_attn.kv_a_layernorm.weight"], self.config.rms_norm_eps)
        q = torch.cat(layer.queries(q_latent, self.cos_sin), -1)
        k, v = layer.expand(latent, rotate(k_pe, self.cos_sin))
        return q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2), q_latent

    @torch.no_grad()
    def select(self, layer: Layer, x: Tensor, q_latent: Tensor) -> Tensor:
        """The indexer's choice as a mask [..., T, T]: the `index_topk` best keys that each query may see."""
        scores = index_scores(layer, x, q_latent, self.cos_sin)
        future = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).triu(1)
        best = scores.masked_fill(future, -torch.inf).topk(self.config.index_topk, -1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & ~future


def index_scores(layer: Layer, x: Tensor, q_latent: Tensor, cos_sin: Tensor) -> Tensor:
    """Lightning-indexer scores [..., T, T] in fp32: sum over index heads of weight * relu(q . k), no causal mask."""
    q, weights = layer.index_queries(q_latent, x, cos_sin)
    k = layer.index_keys(x, cos_sin)
    scores = torch.zeros(*x.shape[:-1], x.shape[-2], dtype=torch.float32, device=x.device)
    for head in range(layer.config.index_n_heads):  # one head at a time: all at once would hold heads x T x T floats
        scores = scores + weights[..., head, None] * (q[..., head, :] @ k.transpose(-1, -2)).float().relu()
    return scores
