"""checkpoint.py: experts fused and split again, and the errors of a checkpoint that cannot be loaded."""

import json

import pytest
import torch

from dcp_fix.engine.checkpoint import CheckpointError, Config, fuse_experts, read_weights, split_experts
from dcp_fix.engine.model import Model
from dcp_fix.errors import UserError
from tests.checkpoints import CONFIG, random_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def test_experts_split_back_into_what_was_fused(folder):
    config = Config.from_json(folder / "config.json")
    weights = read_weights(folder / "model.safetensors", config)
    again = split_experts(fuse_experts(weights, config), config)
    assert again.keys() == weights.keys() and all(torch.equal(again[name], w) for name, w in weights.items())


# --- checkpoints that cannot be loaded --------------------------------------------------------------------------------


def rewrite(folder, **changes):
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


@pytest.fixture
def fresh(tmp_path):
    return random_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(fresh, name):
    (fresh / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name}: no such file"):
        Model.load(fresh)


@pytest.mark.parametrize("keep", [0, 7, 1000, -1])
def test_truncated_weights(fresh, keep):
    path = fresh / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        Model.load(fresh)


def test_weights_with_nan(fresh):
    path = fresh / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-2:] = b"\xc0\x7f"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        Model.load(fresh)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "llama"}, "model_type"),
        ({"n_group": 2}, "expert groups"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "scaled RoPE"),
        ({"index_topk": None}, "lacks index_topk"),
        ({"hidden_size": 128}, "config.json asks for"),
        (
            {"num_hidden_layers": 4, "indexer_types": ["full"] * 4, "mlp_layer_types": ["dense"] * 4},
            "lacks model.layers",
        ),
    ],
)
def test_a_config_that_does_not_fit(fresh, changes, message):
    rewrite(fresh, **changes)
    with pytest.raises(CheckpointError, match=message):
        Model.load(fresh)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_config_that_is_not_json(fresh, text):
    (fresh / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError):
        Model.load(fresh)


def test_a_checkpoint_error_is_the_users_to_mend():
    assert issubclass(CheckpointError, UserError)
