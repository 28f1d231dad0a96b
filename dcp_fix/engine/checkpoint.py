"""The weights of a checkpoint folder in Hugging Face format, type `glm_moe_dsa`: model.safetensors beside config.json.

Tensors carry the names that transformers and vLLM load. The model holds the experts of a layer fused (`fuse_experts`):
all side by side, as one wide MLP. The file must hold the tensors that its config asks for and no other: one that
nothing reads (a bias, a scale, a layer for multi-token prediction) would count for nothing without a word.

What is not implemented, and therefore refused, stands in config.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from dcp_fix.base.bounded import check_regular
from dcp_fix.base.errors import UserError, shown
from dcp_fix.engine.config import CheckpointError, Config, absent

DTYPES = ("BF16", "F16", "F32")  # as safetensors calls them
Shape = tuple[int, ...]


def check_folder(folder: Path) -> Config:
    """The config of a checkpoint folder that has weights, too. Raises `CheckpointError`."""
    config = Config.from_json(folder / "config.json")
    check_weights_file(folder / "model.safetensors")
    return config


def check_weights_file(path: Path) -> None:
    """Raise `CheckpointError` unless the path names a regular file: reading a FIFO or a device would not end."""
    try:
        check_regular(path)
    except FileNotFoundError as error:
        raise absent(path) from error
    except UserError as error:
        raise CheckpointError(str(error)) from error


def read_weights(path: Path, config: Config) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, once its header is what `config` asks for. Raises `CheckpointError`."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    check_weights_file(path)
    try:
        with safe_open(path, "pt") as file:
            held = {name: file.get_slice(name) for name in file.keys()}
            check_header(path, {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in held.items()}, config)
        weights = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{shown(path)}: damaged or truncated ({shown(error)}); restore the file") from error
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise CheckpointError(f"{shown(path)}: {name} holds NaN or infinity; restore the file")
    return weights


def check_header(path: Path, held: dict[str, tuple[Shape, str]], config: Config) -> None:
    """Raise `CheckpointError` unless a file of these shapes and types holds what the config asks for, and no more.

    Names are made one at a time: a config may ask for millions, a file that lacks them is small.
    """
    unread = dict(held)
    for name, shape in named_shapes(config):
        if name not in held:
            raise CheckpointError(f"{shown(path)}: lacks {name}; the file does not belong to this config.json")
        found, dtype = unread.pop(name)
        if found != shape:
            raise CheckpointError(f"{shown(path)}: {name} is {found}, config.json asks for {shape}")
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{shown(path)}: {name} is of type {shown(dtype)}; allowed: {', '.join(DTYPES)}, no quantised weights"
            )
    if unread:
        more = f" and {len(unread) - 1} other tensors" if len(unread) > 1 else ""
        raise CheckpointError(
            f"{shown(path)}: holds {shown(min(unread))}{more}, which nothing here reads; allowed: what config.json has"
        )


def weight_shapes(config: Config) -> dict[str, Shape]:
    """Name and shape of every tensor that a checkpoint of this config holds."""
    return dict(named_shapes(config))


def named_shapes(config: Config) -> Iterator[tuple[str, Shape]]:
    """The same, one after another."""
    c, hidden = config, config.hidden_size
    yield "model.embed_tokens.weight", (c.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (c.vocab_size, hidden)
    for i in range(c.num_hidden_layers):
        layer: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        layer |= {f"self_attn.{name}": shape for name, shape in attention_shapes(c, i).items()}
        layer |= {f"mlp.{name}": shape for name, shape in mlp_shapes(c, i).items()}
        for name, shape in layer.items():
            yield f"model.layers.{i}.{name}", shape


def attention_shapes(c: Config, index: int) -> dict[str, Shape]:
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


def mlp_shapes(c: Config, index: int) -> dict[str, Shape]:
    """The tensors under `mlp` of one layer."""

    def swiglu(prefix: str, inner: int) -> dict[str, Shape]:
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
