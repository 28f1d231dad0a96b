"""`config.json` of a checkpoint of type `glm_moe_dsa`: the numbers that the forward pass reads.

Not implemented, and refused by name (config_schema.py): quantised weights, scaled or partial RoPE, expert groups,
softmax routing, biases, tied embeddings, multi-token prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from dcp_fix.base.bounded import MIB, read_json
from dcp_fix.base.errors import UserError, shown
from dcp_fix.base.schema import as_json, checked
from dcp_fix.engine.config_schema import TYPE, ConfigFile

LARGEST_FILE = MIB


class CheckpointError(UserError):
    """A checkpoint that cannot be loaded; the message names the file, what is wrong with it and the remedy."""


@dataclass(frozen=True)
class Config:
    """The numbers of `config.json` that the forward pass reads.

    Sizes in elements, `indexer_types` and `mlp_layer_types` one per layer, `eos_token_id` one id or several.
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
    eos_token_id: int | tuple[int, ...]

    @classmethod
    def from_json(cls, path: Path) -> Config:
        """Read `config.json`. Raises `CheckpointError`, a line for each field that is missing or not allowed."""
        try:
            return cls.of(read_json(path, LARGEST_FILE), shown(path))
        except FileNotFoundError as error:
            raise absent(path) from error
        except CheckpointError:
            raise
        except UserError as error:
            raise CheckpointError(str(error)) from error

    @classmethod
    def of(cls, value: object, name: str = "config.json") -> Config:
        """What the value of a config file says. Raises `CheckpointError` beginning with `name`."""
        if isinstance(value, dict) and value.get("model_type") != TYPE:  # any other field means another thing
            found = shown(as_json(value.get("model_type")), 60)
            raise CheckpointError(f"{name}: model_type is {found}; allowed: {as_json(TYPE)}, GLM-DSA")
        file = checked(ConfigFile, value, name, CheckpointError)
        values = {f.name: getattr(file, f.name) for f in fields(cls) if f.name != "rope_theta"}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls(**values, rope_theta=float(file.theta()))

    def ends(self, token: int) -> bool:
        """Whether an answer stops at this token."""
        ids = self.eos_token_id
        return token in (ids if isinstance(ids, tuple) else (ids,))

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """Softmax scale of the attention, one over the root of the head width."""
        return self.qk_head_dim**-0.5


def absent(path: Path) -> CheckpointError:
    """What to raise where a file of a checkpoint folder is not there."""
    return CheckpointError(
        f"{shown(path)}: no such file; a checkpoint folder holds config.json, model.safetensors, tokenizer.json"
    )
