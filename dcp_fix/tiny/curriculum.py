"""What is trained, and in which lessons: the checkpoint's geometry and the stages of its training.

It does not: train (train.py), or make a text (lessons.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from dcp_fix.tiny.words import BOS, END, WORDS

GEOMETRY = {  # what Hopper's sparse kernels accept, at the smallest width that learns the task
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": len(WORDS),
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 128,
    "head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "index_topk": 512,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "indexer_types": ["full", "shared", "full"],
    "index_topk_pattern": "FSF",
    "indexer_rope_interleave": True,
    "mlp_layer_types": ["dense", "dense", "sparse"],
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
    "max_position_embeddings": 8448,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": END,
    "initializer_range": 0.02,
    "num_nextn_predict_layers": 0,
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class Stage:
    """One lesson: texts of `kind` and `lengths` (drawn per batch), until accuracy is `gate` after at least `steps`
    steps.
    """

    kind: str
    lengths: tuple[int, ...]
    facts: tuple[int, int]
    steps: int
    gate: float
    indexer: bool = False  # teach the indexer
    sparse: bool = False  # attend to the indexer's selection only, where the text is longer than index_topk


STAGES = (
    Stage("repeats", (64,), (0, 0), 200, 0.9),
    Stage("strided", (128,), (0, 0), 200, 0.9),
    Stage("pairs", (128,), (0, 0), 200, 0.9),
    Stage("facts", (96,), (2, 3), 200, 0.9),
    Stage("facts", (128,), (2, 5), 200, 0.9),
    Stage("facts", (256,), (2, 12), 400, 0.95),
    Stage("facts", (256, 512), (2, 12), 150, 0.98),
    Stage("facts", (512,), (2, 20), 200, 0.98),
    Stage("facts", (512, 1024, 1536, 2560), (2, 20), 400, 0.98, indexer=True),
    Stage("facts", (512, 1024, 1536, 2560, 8192), (2, 20), 400, 0.98, indexer=True, sparse=True),
)
