"""model.py against transformers' GlmMoeDsaForCausalLM."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from dcp_fix.engine.checkpoint import weight_shapes
from dcp_fix.engine.model import Model, PlainAttention
from tests.checkpoints import CONFIG, random_checkpoint, random_tokens

DENSE, SPARSE = 37, 150  # prompt lengths on both sides of index_topk = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def model(folder):
    return Model.load(folder)


@pytest.fixture(scope="module")
def oracle(folder):
    from transformers import GlmMoeDsaForCausalLM

    return GlmMoeDsaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(model, tokens):
    return model.logits(model.forward(torch.tensor(tokens), PlainAttention(model.config, len(tokens))))  # [T, V]


@pytest.mark.parametrize("length", [1, DENSE, SPARSE])
@torch.no_grad()
def test_logits_equal_transformers(model, oracle, length):
    tokens = random_tokens(length, seed=length)
    theirs = oracle(torch.tensor([tokens])).logits[0]
    assert (logits_of(model, tokens) - theirs).abs().max() < 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("length", [DENSE, SPARSE])
@torch.no_grad()
def test_greedy_tokens_equal_transformers(model, oracle, length):
    ours = theirs = random_tokens(length, seed=100 + length)
    for _ in range(8):
        ours = [*ours, int(logits_of(model, ours)[-1].argmax())]
        theirs = [*theirs, int(oracle(torch.tensor([theirs]), use_cache=False).logits[0, -1].argmax())]
    assert ours == theirs


def test_a_selection_matters_beyond_index_topk(model):
    """The oracle would prove nothing about the indexer if masking to its choice changed nothing."""
    tokens = random_tokens(SPARSE, seed=3)
    full = PlainAttention(model.config, SPARSE)
    full.select = lambda layer, x, q_latent: torch.ones(SPARSE, SPARSE, dtype=torch.bool).tril()
    with torch.no_grad():
        everything = model.logits(model.forward(torch.tensor(tokens), full))
    rows = (everything - logits_of(model, tokens)).abs().amax(-1)
    assert rows[:64].max() < 1e-4 and rows[-1] > 1e-2


def test_a_sequence_beyond_the_positions(model):
    with pytest.raises(ValueError, match="513 tokens"):
        PlainAttention(model.config, 513)


def test_weight_shapes_name_what_transformers_names(oracle, model):
    assert set(weight_shapes(model.config)) == set(fused_back(oracle.state_dict()))


# --- types that are part of the model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    """64 experts, whose biases lie close together around 7, and a router in fp32."""
    folder = random_checkpoint(tmp_path_factory.mktemp("routed"), n_routed_experts=64, num_experts_per_tok=8)
    path, random = folder / "model.safetensors", torch.Generator().manual_seed(0)
    weights, gate = load_file(path), "model.layers.2.mlp.gate."
    weights[gate + "weight"] = torch.randn(64, 64, generator=random) / 32
    weights[gate + "e_score_correction_bias"] = torch.empty(64).uniform_(6.817, 7.063, generator=random)
    save_file(weights, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_tokens_are_routed_and_weights_kept_as_transformers_does(routed, dtype):
    from transformers import GlmMoeDsaForCausalLM

    theirs, ours = GlmMoeDsaForCausalLM.from_pretrained(routed, dtype=dtype).eval(), Model.load(routed, dtype=dtype)
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    _, weights, chosen = theirs.model.layers[2].mlp.gate(x)
    want = torch.zeros(500, 64).scatter(1, chosen, weights.float())
    got = ours.layers[2].route(x)[:, :64]
    assert (got > 0).equal(want > 0) and torch.allclose(got, want, rtol=1e-5)
    state = theirs.state_dict()
    types = {name: (weight.dtype, state[name].dtype) for name, weight in ours.weights.items() if name in state}
    assert len(types) > 40 and {name: both for name, both in types.items() if len(set(both)) > 1} == {}
    last = ours.forward(torch.tensor([5, 6, 7]), PlainAttention(ours.config, 3))
    assert last.dtype == dtype and last.isfinite().all()


def fused_back(state):
    """transformers keeps the experts of a layer in two tensors; the file format has three per expert."""
    names = {name for name in state if ".experts." not in name}
    for layer, kind in enumerate(CONFIG["mlp_layer_types"]):
        for expert in range(CONFIG["n_routed_experts"]) if kind == "sparse" else ():
            names |= {
                f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")
            }
    return names
