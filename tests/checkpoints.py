"""Random-weight GLM-DSA checkpoints in Hugging Face format, small enough to make and run in a second."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from dcp_fix.engine.checkpoint import weight_shapes
from dcp_fix.engine.config import Config

CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 96,
    "head_dim": 64,
    "v_head_dim": 40,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "index_topk": 64,
    "index_head_dim": 128,
    "index_n_heads": 6,
    "indexer_types": ["full", "shared", "full"],
    "indexer_rope_interleave": True,
    "mlp_layer_types": ["dense", "dense", "sparse"],
    "first_k_dense_replace": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 0,
}


def random_checkpoint(folder: Path, seed: int = 0, **changes) -> Path:
    """Write config.json (CONFIG with `changes`) and model.safetensors into `folder`; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    generator = torch.Generator().manual_seed(seed)
    shapes = weight_shapes(Config.from_json(folder / "config.json"))
    weights = {name: random_weight(name, shape, generator) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Norms near one, biases small, an output layer wide enough that no logits tie, else unit gain."""
    noise = torch.randn(shape, generator=generator)
    if "norm" in name and name.endswith("weight"):
        noise = 1 + 0.1 * noise
    elif "bias" in name:
        noise = 0.1 * noise
    else:
        noise = noise * (4 if name == "lm_head.weight" else 1.5) / shape[-1] ** 0.5
    return noise.to(torch.bfloat16)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    """Token ids of a prompt of `count` tokens, the end token (1) left out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, CONFIG["vocab_size"], (count,), generator=generator).tolist()
