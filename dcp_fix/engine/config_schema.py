"""The table of allowed values of `config.json`, type `glm_moe_dsa`.

Three kinds of fields: numbers that the forward pass reads; fields of which the model here implements one value, so that
another one is refused and never run as something that it is not; fields that do not reach the forward pass. A field
that is in none of them is refused too: nobody here knows whether it would.

It does not: read a file, or hand on what it read (config.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from dcp_fix.base.errors import shown
from dcp_fix.base.schema import Schema, allowed, as_json

TYPE = "glm_moe_dsa"
IGNORED = frozenset(
    "pad_token_id head_dim dtype torch_dtype transformers_version initializer_range use_cache output_router_logits "
    "router_aux_loss_coef output_attentions output_hidden_states return_dict chunk_size_feed_forward "
    "is_encoder_decoder id2label label2id problem_type ep_size pretraining_tp _name_or_path".split()
)  # head_dim: transformers puts qk_rope_head_dim in its place; the types the tensors say themselves
PATTERN = {"F": "full", "S": "shared"}  # the letters of index_topk_pattern


def size(most: int) -> Any:
    """A required whole number from 1 on."""
    return allowed(f"a whole number, 1 .. {most}", ge=1, le=most)


def only(value: Any) -> Any:
    """A field that may be left out, and of which one value is implemented."""
    return allowed(f"{as_json(value)}, nothing else is implemented", default=value)


def exactly(value: bool) -> AfterValidator:
    """Of the two booleans, the implemented one."""

    def check(found: bool) -> bool:
        if found is not value:
            raise PydanticCustomError("exactly", "not implemented")
        return found

    return AfterValidator(check)


One: TypeAlias = Annotated[int, Field(ge=1, le=1)]  # Literal[1] would take True and 1.0
Zero: TypeAlias = Annotated[int, Field(ge=0, le=0)]
Yes: TypeAlias = Annotated[bool, exactly(True)]
No: TypeAlias = Annotated[bool, exactly(False)]
TokenId = Annotated[int, Field(ge=0)]
Theta = Annotated[float, Field(ge=1, le=1e15)]
THETA = "a number, 1 .. 1e15"


class Rope(Schema):
    """`rope_parameters`, or `rope_scaling` as older files call it."""

    rope_type: Literal["default"] = only("default")
    type: Literal["default"] = only("default")  # the older name
    rope_theta: Theta | None = allowed(THETA, default=None)
    partial_rotary_factor: float = allowed("1, nothing else is implemented", default=1, ge=1, le=1)


class ConfigFile(Schema):
    """What `config.json` may hold."""

    # --- read ---
    vocab_size: int = size(1 << 20)
    hidden_size: int = size(1 << 16)
    num_hidden_layers: int = size(1 << 10)
    num_attention_heads: int = size(1 << 10)
    q_lora_rank: int = size(1 << 16)
    kv_lora_rank: int = size(1 << 16)
    qk_nope_head_dim: int = size(1 << 12)
    qk_rope_head_dim: int = allowed("an even number, 2 .. 4096", ge=2, le=1 << 12, multiple_of=2)
    v_head_dim: int = size(1 << 12)
    intermediate_size: int = size(1 << 20)
    moe_intermediate_size: int = size(1 << 20)
    n_routed_experts: int = size(1 << 12)
    num_experts_per_tok: int = size(1 << 12)
    routed_scaling_factor: float = allowed("a number above 0, up to 1e6", gt=0, le=1e6)
    index_topk: int = size(1 << 20)
    index_head_dim: int = size(1 << 12)
    index_n_heads: int = size(1 << 10)
    max_position_embeddings: int = size(1 << 21)
    rms_norm_eps: float = allowed("a number above 0, up to 1", gt=0, le=1)
    indexer_types: list[Literal["full", "shared"]] = allowed('"full" or "shared" for each layer', max_length=1 << 10)
    mlp_layer_types: list[Literal["dense", "sparse"]] = allowed(
        '"dense" or "sparse" for each layer', max_length=1 << 10
    )
    eos_token_id: TokenId | Annotated[list[TokenId], Field(min_length=1, max_length=64)] = allowed(
        "a token id, or a list of 1 .. 64 of them"
    )
    rope_theta: Theta | None = allowed(THETA, default=None)  # at top level or in rope_parameters
    rope_parameters: Rope | None = allowed('an object of rope_type "default" and rope_theta', default=None)
    rope_scaling: Rope | None = allowed('null, or an object of rope_type "default"', default=None)

    # --- of which one value is implemented ---
    model_type: Literal["glm_moe_dsa"] = only(TYPE)
    architectures: list[Literal["GlmMoeDsaForCausalLM"]] = only(["GlmMoeDsaForCausalLM"])
    n_shared_experts: One = allowed("1, nothing else is implemented")
    n_group: One = only(1)
    topk_group: One = only(1)
    norm_topk_prob: Yes = only(True)
    scoring_func: Literal["sigmoid"] = only("sigmoid")
    topk_method: Literal["noaux_tc"] = only("noaux_tc")
    moe_layer_freq: One = only(1)
    hidden_act: Literal["silu"] = only("silu")
    attention_bias: No = only(False)
    mlp_bias: No = only(False)
    attention_dropout: float = allowed("0, nothing else is implemented", default=0, ge=0, le=0)
    tie_word_embeddings: No = only(False)
    rope_interleave: Yes = only(True)
    indexer_rope_interleave: Yes = only(True)
    partial_rotary_factor: float = allowed("1, nothing else is implemented", default=1, ge=1, le=1)
    num_nextn_predict_layers: Zero = only(0)
    quantization_config: None = only(None)
    compression_config: None = only(None)
    sliding_window: None = only(None)
    layer_types: list[Literal["indexed_attention"]] | None = only(None)

    # --- that follow from others, and must agree with them ---
    num_key_value_heads: int | None = allowed("num_attention_heads", default=None)
    qk_head_dim: int | None = allowed("qk_nope_head_dim + qk_rope_head_dim", default=None)
    num_local_experts: int | None = allowed("n_routed_experts", default=None)
    num_experts: int | None = allowed("n_routed_experts", default=None)
    first_k_dense_replace: int | None = allowed("the dense layers before the first sparse one", default=None)
    index_topk_pattern: str | list[str] | None = allowed('indexer_types, F for "full" and S for "shared"', default=None)
    index_topk_freq: int | None = allowed("a whole number, 1 .. 1024", default=None, ge=1, le=1 << 10)
    index_skip_topk_offset: int | None = allowed("a whole number, 0 .. 1024", default=None, ge=0, le=1 << 10)

    # --- that do not reach the forward pass ---
    bos_token_id: TokenId | None = allowed("a token id, or null", default=None)

    @model_validator(mode="before")
    @classmethod
    def without_ignored(cls, value: Any) -> Any:
        """The file without those that may hold anything."""
        return {k: v for k, v in value.items() if k not in IGNORED} if isinstance(value, dict) else value

    def theta(self) -> float | None:
        """The base of the rotary angles, wherever the file has it."""
        nested = self.rope_parameters.rope_theta if self.rope_parameters else None
        return self.rope_theta if nested is None else nested

    @model_validator(mode="after")
    def agrees(self) -> ConfigFile:
        """What fields say of each other."""
        if words := list(self.disagreements()):
            raise ValueError("\n".join(words))
        return self

    def disagreements(self) -> Iterator[str]:
        """Sentences, each naming the fields, their values and what is allowed."""
        layers = self.num_hidden_layers
        for name in ("indexer_types", "mlp_layer_types"):
            if len(getattr(self, name)) != layers:
                yield f"{name} has {len(getattr(self, name))} items; allowed: num_hidden_layers, {layers}"
        if self.indexer_types[:1] == ["shared"]:
            yield 'indexer_types begins with "shared"; allowed: "full", since no layer before it selects'
        if self.num_experts_per_tok > self.n_routed_experts:
            yield f"num_experts_per_tok is {self.num_experts_per_tok}; allowed: up to {self.n_routed_experts} experts"
        if self.index_head_dim < self.qk_rope_head_dim:
            yield f"index_head_dim is {self.index_head_dim}; allowed: from {self.qk_rope_head_dim} on"
        yield from self.token_disagreements()
        yield from self.rope_disagreements()
        dense = (self.mlp_layer_types + ["sparse"]).index("sparse")
        for name, value in (
            ("num_key_value_heads", self.num_attention_heads),
            ("qk_head_dim", self.qk_nope_head_dim + self.qk_rope_head_dim),
            ("num_local_experts", self.n_routed_experts),
            ("num_experts", self.n_routed_experts),
            ("first_k_dense_replace", dense),
        ):
            if getattr(self, name) not in (None, value):
                words = type(self).model_fields[name].description
                yield f"{name} is {getattr(self, name)}; allowed: {words}, {value}"
        yield from self.indexer_disagreements()

    def token_disagreements(self) -> Iterator[str]:
        """Token ids that the vocabulary does not have."""
        ends = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        for name, ids in (("eos_token_id", ends), ("bos_token_id", [self.bos_token_id or 0])):
            if max(ids) >= self.vocab_size:
                yield f"{name} is {max(ids)}; allowed: below vocab_size, {self.vocab_size}"

    def rope_disagreements(self) -> Iterator[str]:
        """The base of the rotary angles: given once, or twice alike."""
        if self.theta() is None:
            yield f"lacks rope_theta, at top level or in rope_parameters; allowed: {THETA}"
        for place in (self.rope_theta, self.rope_scaling and self.rope_scaling.rope_theta):
            if place not in (None, self.theta()):
                yield f"rope_theta is {place} and, in rope_parameters, {self.theta()}; allowed: one value"

    def indexer_disagreements(self) -> Iterator[str]:
        """Other ways to say which layers have an indexer."""
        if (pattern := self.index_topk_pattern) is not None:
            if [PATTERN.get(letter, letter) for letter in pattern] != self.indexer_types:
                yield f"index_topk_pattern is {shown(as_json(pattern), 60)}; allowed: what indexer_types says"
        elif self.index_topk_freq is not None:
            freq, offset = (
                self.index_topk_freq,
                2 if self.index_skip_topk_offset is None else self.index_skip_topk_offset,
            )
            shared = [max(i - offset + 1, 0) % freq > 0 for i in range(self.num_hidden_layers)]
            if ["shared" if s else "full" for s in shared] != self.indexer_types:
                yield f"index_topk_freq is {freq} with offset {offset}; allowed: what indexer_types says"
