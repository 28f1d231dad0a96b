"""A checkpoint folder in Hugging Face format, type `glm_moe_dsa`: config.json and model.safetensors.

Tensors carry the names that transformers and vLLM load. The model holds the experts of a layer fused (`fuse_experts`):
all side by side, as one wide MLP.

Not here: quantised weights, YaRN, expert groups (`n_group > 1`), multi-token prediction. A checkpoint that needs them
is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from dcp_fix.errors import UserError


class CheckpointError(UserError):
    """A checkpoint that cannot be loaded; the message names the file, what is wrong with it and the remedy."""


@dataclass(frozen=True)
class Config:
    """The numbers of `config.json` that the forward pass reads.

    Sizes in elements, `indexer_types` and `mlp_layer_types` one per layer.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    index_topk: int
    index_head_dim: int
    index_n_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    indexer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    rope_theta: float
    bos_token_id: int
    eos_token_id: int

    @classmethod
    def from_json(cls, path: Path) -> Config:
        """Read `config.json`. Raises `CheckpointError` when it is missing, not JSON, of another model type or lacks a
        number.
        """
        try:
            raw = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise absent(path) from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: not JSON ({error}); restore the file") from error
        if not isinstance(raw, dict) or raw.get("model_type") != "glm_moe_dsa":
            raise CheckpointError(f"{path}: model_type is not 'glm_moe_dsa'; only GLM-DSA checkpoints run here")
        rope = raw.get("rope_parameters") or {}
        if (
            rope.get("rope_type", "default") != "default"
            or raw.get("n_group", 1) != 1
            or raw.get("quantization_config")
        ):
            raise CheckpointError(
                f"{path}: needs scaled RoPE, expert groups or quantised weights, which this model does not implement"
            )
        if raw.get("n_shared_experts") != 1:
            raise CheckpointError(f"{path}: n_shared_experts is {raw.get('n_shared_experts')}; only one is implemented")
        raw["rope_theta"] = rope.get("rope_theta")
        missing = [f.name for f in fields(cls) if raw.get(f.name) is None]
        if missing:
            raise CheckpointError(f"{path}: lacks {', '.join(missing)}")
        values = {f.name: raw[f.name] for f in fields(cls)}
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """Softmax scale of the attention, one over the root of the head width."""
        return self.qk_head_dim**-0.5


def check_folder(folder: Path) -> Config:
    """The config of a checkpoint folder that has weights, too. Raises `CheckpointError`."""
    config, weights = Config.from_json(folder / "config.json"), folder / "model.safetensors"
    if not weights.is_file():
        raise absent(weights)
    return config


def absent(path: Path) -> CheckpointError:
    """What to raise where a file of a checkpoint folder is not there."""
    return CheckpointError(
        f"{path}: no such file; a checkpoint folder holds config.json, model.safetensors, tokenizer.json"
    )


def read_weights(path: Path, config: Config) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, checked against `weight_shapes`. Raises `CheckpointError`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(path)
    except FileNotFoundError as error:
        raise absent(path) from error
    except SafetensorError as error:
        raise CheckpointError(f"{path}: damaged or truncated ({error}); restore the file") from error
    for name, shape in weight_shapes(config).items():
        if name not in weights:
            raise CheckpointError(f"{path}: lacks {name}; the file does not belong to this config.json")
        if tuple(weights[name].shape) != shape:
            raise CheckpointError(f"{path}: {name} is {tuple(weights[name].shape)}, config.json asks for {shape}")
        if not weights[name].isfinite().all():
            raise CheckpointError(f"{path}: {name} holds NaN or infinity; restore the file")
    return weights


def weight_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this config holds."""
    c, hidden = config, config.hidden_size
    shapes = {
        "model.embed_tokens.weight": (c.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (c.vocab_size, hidden),
    }
    for i in range(c.num_hidden_layers):
        layer = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        layer |= {f"self_attn.{name}": shape for name, shape in attention_shapes(c, i).items()}
        layer |= {f"mlp.{name}": shape for name, shape in mlp_shapes(c, i).items()}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def attention_shapes(c: Config, index: int) -> dict[str, tuple[int, ...]]:
    """The tensors under `self_attn` of one layer."""
    heads, hidden = c.num_attention_heads, c.hidden_size
    shapes = {
        "q_a_proj.weight": (c.q_lora_rank, hidden),
        "q_a_layernorm.weight": (c.q_lora_rank,),
        "q_b_proj.weight": (heads * c.qk_head_dim, c.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (c.kv_lora_rank + c.qk_rope_head_dim, hidden),
        "kv_a_layernorm.weight": (c.kv_lora_rank,),
        "kv_b_proj.weight": (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "o_proj.weight": (hidden, heads * c.v_head_dim),
    }
    if c.indexer_types[index] == "full":
        shapes |= {
            "indexer.wq_b.weight": (c.index_n_heads * c.index_head_dim, c.q_lora_rank),
            "indexer.wk.weight": (c.index_head_dim, hidden),
            "indexer.k_norm.weight": (c.index_head_dim,),
            "indexer.k_norm.bias": (c.index_head_dim,),
            "indexer.weights_proj.weight": (c.index_n_heads, hidden),
        }
    return shapes


def mlp_shapes(c: Config, index: int) -> dict[str, tuple[int, ...]]:
    """The tensors under `mlp` of one layer."""

    def swiglu(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
        up, down = (inner, c.hidden_size), (c.hidden_size, inner)
        return {f"{prefix}gate_proj.weight": up, f"{prefix}up_proj.weight": up, f"{prefix}down_proj.weight": down}

    if c.mlp_layer_types[index] == "dense":
        return swiglu("", c.intermediate_size)
    shapes = {"gate.weight": (c.n_routed_experts, c.hidden_size), "gate.e_score_correction_bias": (c.n_routed_experts,)}
    for expert in range(c.n_routed_experts):
        shapes |= swiglu(f"experts.{expert}.", c.moe_intermediate_size)
    return shapes | swiglu("shared_experts.", c.moe_intermediate_size)


def expert_names(c: Config) -> list[str]:
    """The blocks of the fused expert MLP in order: the routed experts, then the shared one."""
    return [f"experts.{e}" for e in range(c.n_routed_experts)] + ["shared_experts"]


def fuse_experts(weights: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Checkpoint names to model names: the experts of an MoE layer become one `mlp.{gate,up,down}_proj`, blocks as in
    `expert_names`.
    """
    fused = {
        name: value for name, value in weights.items() if ".experts." not in name and ".shared_experts." not in name
    }
    for i, kind in enumerate(config.mlp_layer_types):
        for part, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)) if kind == "sparse" else ():
            blocks = [weights[f"model.layers.{i}.mlp.{name}.{part}.weight"] for name in expert_names(config)]
            fused[f"model.layers.{i}.mlp.{part}.weight"] = torch.cat(blocks, dim)
    return fused


def split_experts(weights: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Model names to checkpoint names: the inverse of `fuse_experts`."""
    split = dict(weights)
    for i, kind in enumerate(config.mlp_layer_types):
        for part, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)) if kind == "sparse" else ():
            blocks = split.pop(f"model.layers.{i}.mlp.{part}.weight").split(config.moe_intermediate_size, dim)
            split |= {
                f"model.layers.{i}.mlp.{n}.{part}.weight": b.contiguous()
                for n, b in zip(expert_names(config), blocks, strict=True)
            }
    return split
