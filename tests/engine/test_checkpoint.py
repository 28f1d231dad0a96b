"""checkpoint.py: experts fused and split again, and the errors of a checkpoint that cannot be loaded."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from dcp_fix.base.errors import UserError
from dcp_fix.engine.checkpoint import check_folder, fuse_experts, read_weights, split_experts
from dcp_fix.engine.config import CheckpointError, Config
from dcp_fix.engine.model import Model
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


FOUR_LAYERS = {"indexer_types": ["full"] * 4, "mlp_layer_types": ["dense"] * 4, "first_k_dense_replace": 4}


@pytest.mark.parametrize(
    "changes, message",
    [({"hidden_size": 128}, "config.json asks for"), ({"num_hidden_layers": 4} | FOUR_LAYERS, "lacks model.layers")],
)
def test_weights_that_do_not_fit_the_config(fresh, changes, message):
    rewrite(fresh, **changes)
    with pytest.raises(CheckpointError, match=message):
        Model.load(fresh)


def test_weights_of_a_few_experts_under_a_config_of_millions_are_refused_at_once(fresh):
    """The names that a config asks for are made one at a time, or these would be twelve million."""
    layers = {"num_hidden_layers": 1024, "indexer_types": ["full"] * 1024, "mlp_layer_types": ["sparse"] * 1024}
    rewrite(fresh, **layers, n_routed_experts=4096, first_k_dense_replace=0)
    with pytest.raises(CheckpointError, match="asks for|lacks"):
        Model.load(fresh)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("model.layers.1.self_attn.q_a_proj.bias", torch.ones(48), "q_a_proj.bias, which nothing here reads"),
        ("model.layers.3.eh_proj.weight", torch.ones(2), "model.layers.3.eh_proj.weight, which nothing"),  # of MTP
        ("model.layers.99.input_layernorm.weight", torch.ones(64), "model.layers.99.input_layernorm.weight, which"),
        ("lm_head.weight_scale", torch.ones(1), "lm_head.weight_scale, which nothing here reads"),
        (
            "lm_head.weight",
            torch.ones(97, 64, dtype=torch.int8),
            "lm_head.weight is of type I8; allowed: BF16, F16, F32",
        ),
        ("lm_head.weight", torch.ones(97, 64).to(torch.float8_e4m3fn), "lm_head.weight is of type F8_E4M3; allowed"),
        ("a\x1b[31mred", torch.ones(1), r"a\\x1b\[31mred, which nothing"),
    ],
)
def test_tensors_that_would_count_for_nothing_are_refused(fresh, name, value, message):
    path = fresh / "model.safetensors"
    save_file(load_file(path) | {name: value}, path)
    with pytest.raises(CheckpointError, match=message):
        Model.load(fresh)


def test_several_tensors_that_nothing_reads_are_counted(fresh):
    path = fresh / "model.safetensors"
    save_file(load_file(path) | {f"extra.{n}": torch.ones(1) for n in range(3)}, path)
    with pytest.raises(CheckpointError, match="holds extra.0 and 2 other tensors, which"):
        Model.load(fresh)


def no_regular_files(path):
    """What may stand at `path` instead of a file: (what, how to put it there)."""
    return {
        "a folder": path.mkdir,
        "a FIFO": lambda: os.mkfifo(path),
        "a device": lambda: path.symlink_to("/dev/zero"),
        "cannot be read": lambda: path.symlink_to(path.name),
    }


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["a folder", "a FIFO", "a device", "cannot be read"])
def test_what_is_no_regular_file_is_not_read(fresh, name, kind):
    (fresh / name).unlink()
    no_regular_files(fresh / name)[kind]()
    for load in (Model.load, check_folder):
        with pytest.raises(CheckpointError, match=rf"{name}: .*{kind}"):
            load(fresh)


def test_a_link_to_a_file_is_followed(fresh):
    for name in ("config.json", "model.safetensors"):
        (fresh / name).rename(fresh / f"{name}.elsewhere")
        (fresh / name).symlink_to(f"{name}.elsewhere")
    assert Model.load(fresh).config == check_folder(fresh)


@pytest.mark.parametrize("folder", ["x" * 5000, "with\0null", "config.json/", "\udcff"])
def test_a_path_that_names_no_folder_is_one_line(fresh, folder):
    with pytest.raises(CheckpointError) as caught:
        Model.load(fresh / folder)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_config_that_is_not_json(fresh, text):
    (fresh / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError):
        Model.load(fresh)


def test_a_checkpoint_error_is_the_users_to_mend():
    assert issubclass(CheckpointError, UserError)
