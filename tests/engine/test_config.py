"""config.json: what is read, and that nothing is run as something that it is not."""

import json

import pytest
from hypothesis import example, given

from dcp_fix.engine.config import CheckpointError, Config
from dcp_fix.engine.config_schema import ConfigFile
from tests.checkpoints import CONFIG
from tests.json_values import VALUES, damaged


def refusal(changes, without=()):
    """The lines that CONFIG with `changes` is refused with."""
    with pytest.raises(CheckpointError) as caught:
        Config.of({name: value for name, value in (CONFIG | changes).items() if name not in without}, "c.json")
    return str(caught.value).split("\n")


# --- read -------------------------------------------------------------------------------------------------------------


def test_an_answer_stops_at_any_of_several_end_tokens():
    config = Config.of(CONFIG | {"eos_token_id": [1, 7, 96]})
    assert [token for token in range(97) if config.ends(token)] == [1, 7, 96]
    assert [token for token in range(97) if Config.of(CONFIG).ends(token)] == [1]


def test_a_null_begin_token_is_fine():
    assert Config.of(CONFIG | {"bos_token_id": None}) == Config.of(CONFIG)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_parameters": None},
        {"rope_theta": 500000, "rope_scaling": None, "rope_parameters": {}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": {"type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1.0}},
    ],
)
def test_the_rotary_base_is_read_wherever_it_stands(changes):
    assert Config.of(CONFIG | changes).rope_theta == 5e5


def test_what_transformers_writes_is_read(tmp_path):
    from transformers import GlmMoeDsaConfig

    GlmMoeDsaConfig(**CONFIG).save_pretrained(tmp_path)
    (tmp_path / "all.json").write_text(json.dumps(GlmMoeDsaConfig(**CONFIG).to_dict()))
    for name in ("config.json", "all.json"):
        assert Config.from_json(tmp_path / name) == Config.of(CONFIG)


# --- refused: file, field, value, what is allowed ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, line",
    [
        (
            {"rope_parameters": {"type": "yarn", "rope_theta": 1e4}},
            'rope_parameters.type is "yarn"; allowed: "default"',
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, 'rope_scaling.rope_type is "yarn"; allowed: "default"'),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor is not known here"),
        ({"rope_theta": 5.0}, "rope_theta is 5.0 and, in rope_parameters, 10000.0; allowed: one value"),
        ({"rope_parameters": None}, "lacks rope_theta, at top level or in rope_parameters"),
        ({"rope_interleave": False}, "rope_interleave is false; allowed: true"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; allowed: 1"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"; allowed: "silu"'),
        ({"norm_topk_prob": False}, "norm_topk_prob is false; allowed: true"),
        ({"scoring_func": "softmax"}, 'scoring_func is "softmax"; allowed: "sigmoid"'),
        ({"attention_bias": True}, "attention_bias is true; allowed: false"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true; allowed: false"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1; allowed: 0"),
        ({"n_group": 2}, "n_group is 2; allowed: 1"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2; allowed: 1"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            'quantization_config is {"quant_method": "fp8"}; allowed: null',
        ),
        ({"a_new_field": 1}, "a_new_field is not known here"),
        ({"model_type": "llama"}, 'model_type is "llama"; allowed: "glm_moe_dsa"'),
        ({"hidden_size": "64"}, 'hidden_size is "64"; allowed: a whole number, 1 .. 65536'),
        ({"hidden_size": 64.0}, "hidden_size is 64.0; allowed: a whole number"),
        ({"hidden_size": True}, "hidden_size is true; allowed: a whole number"),
        ({"hidden_size": -1}, "hidden_size is -1; allowed: a whole number, 1 .."),
        ({"n_routed_experts": 10**9}, "n_routed_experts is 1000000000; allowed: a whole number, 1 .. 4096"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5; allowed: up to 4 experts"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1; allowed: a number above 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1; allowed: true"),
        ({"n_group": True}, "n_group is true; allowed: 1"),
        ({"indexer_types": ["full"] * 2}, "indexer_types has 2 items; allowed: num_hidden_layers, 3"),
        (
            {"mlp_layer_types": ["dense", "dense", "sparse", "dense"]},
            "mlp_layer_types has 4 items; allowed: num_hidden_layers, 3",
        ),
        ({"indexer_types": ["full", "half", "full"]}, 'indexer_types.1 is "half"; allowed: "full" or "shared"'),
        ({"indexer_types": ["shared", "full", "full"]}, 'indexer_types begins with "shared"; allowed: "full"'),
        ({"index_topk_pattern": "FFF"}, 'index_topk_pattern is "FFF"; allowed: what indexer_types says'),
        ({"index_topk_freq": 3}, "index_topk_freq is 3 with offset 2; allowed: what indexer_types says"),
        ({"first_k_dense_replace": 1}, "first_k_dense_replace is 1; allowed: the dense layers before the first sparse"),
        ({"qk_head_dim": 64}, "qk_head_dim is 64; allowed: qk_nope_head_dim + qk_rope_head_dim, 96"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1; allowed: num_attention_heads, 8"),
        ({"eos_token_id": None}, "eos_token_id is null; allowed: a token id, or a list"),
        ({"eos_token_id": []}, "eos_token_id is []; allowed: a token id, or a list"),
        ({"eos_token_id": [1, "x"]}, 'eos_token_id.1 is "x"; allowed: a token id, or a list'),
        ({"eos_token_id": [1, 97]}, "eos_token_id is 97; allowed: below vocab_size, 97"),
        ({"rope_theta": float("inf")}, "rope_theta is Infinity; allowed: a number"),
        ({"hidden_act": "a\x1b[31m"}, 'hidden_act is "a\\u001b[31m"; allowed: "silu"'),
    ],
)
def test_a_field_that_is_not_allowed_is_named_with_its_value(changes, line):
    (said,) = refusal(changes)
    assert said.startswith(f"c.json: {line}"), said


def test_every_error_has_a_line_of_its_own():
    lines = refusal({"hidden_size": 0, "vocab_size": "many"}, without=["index_topk"])
    assert [line.split("; ")[0] for line in lines] == [
        'c.json: vocab_size is "many"', "c.json: hidden_size is 0", "c.json: lacks index_topk",
    ]  # fmt: skip


@pytest.mark.parametrize("name", [n for n, field in ConfigFile.model_fields.items() if field.is_required()])
def test_a_field_that_is_left_out_is_named(name):
    (line,) = refusal({}, without=[name])
    assert line.startswith(f"c.json: lacks {name}; allowed: ")


@pytest.mark.parametrize("value", [[], "text", None, 3, {}])
def test_a_file_of_something_else_is_refused(value):
    with pytest.raises(CheckpointError, match="c.json: (the file is|model_type is null)"):
        Config.of(value, "c.json")


# --- whatever it holds ------------------------------------------------------------------------------------------------


@given(damaged(CONFIG))
@example(CONFIG | {"eos_token_id": [1, 2]})
def test_any_config_is_read_as_it_is_or_refused_by_name(value):
    try:
        config = Config.of(value, "c.json")
    except CheckpointError as error:
        lines = str(error).split("\n")
        assert all(line.startswith("c.json: ") and line.isprintable() and len(line) < 400 for line in lines), lines
        return
    for name, number in vars(config).items():
        found = value.get(name)
        if name == "rope_theta":
            found = (value.get("rope_parameters") or {}).get("rope_theta", found)
        assert number == (tuple(found) if isinstance(found, list) else found)
        assert not isinstance(number, bool)
    assert all(value.get(name, one) == one for name, one in IMPLEMENTED.items())


IMPLEMENTED = {name: CONFIG[name] for name in ("hidden_act", "norm_topk_prob", "scoring_func", "n_group")}


@given(VALUES)
def test_any_json_file_is_read_or_refused(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match="any.json: "):
        Config.from_json(path)
