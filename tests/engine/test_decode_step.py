"""decode_step.py: fixed memory gives the bits of the ordinary decode step. Recording it needs a GPU (tests/gpu)."""

from dataclasses import replace

import pytest
import torch

from dcp_fix import indexer
from dcp_fix.base.equality import same_bytes
from dcp_fix.base.errors import UserError
from dcp_fix.engine.decode_step import DecodeStep
from dcp_fix.engine.engine import Engine
from dcp_fix.engine.model import Model
from dcp_fix.ranks.group import LocalGroup, SingleGroup
from tests.checkpoints import random_checkpoint, random_tokens

PROMPTS = [random_tokens(37, seed=1), random_tokens(150, seed=2), random_tokens(150, seed=2) + random_tokens(9, seed=3)]
STEPS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = Model.load(random_checkpoint(tmp_path_factory.mktemp("checkpoint")))
    return Model(replace(model.config, eos_token_id=-1), model.weights)


def logits(model, tp, static, poison=False, **options):
    """Rank 0's logits for prompts below, above and with a cached prefix above index_topk, on one engine."""

    def rank(group):
        engine = Engine(model, group, max_length=448, static_decode=static, **options)
        if poison:  # 0x7F is NaN as fp8, bf16 and fp32
            for cache in (*engine.attention.latent, *engine.attention.index):
                if cache is not None:
                    cache.view(torch.uint8).fill_(0x7F)
        return torch.cat([engine.generate(prompt, STEPS).logits for prompt in PROMPTS])

    return LocalGroup.run(tp, rank)[0]


@pytest.mark.parametrize(
    "tp, dcp_size, interleave, combine",
    [(1, 1, 1, "ag_rs"), (4, 2, 16, "exact"), (4, 4, 1, "a2a")],
)
def test_fixed_memory_gives_the_same_bits_whatever_lies_beyond_the_live_rows(model, tp, dcp_size, interleave, combine):
    options = {"dcp_size": dcp_size, "interleave": interleave, "combine": combine}
    want = logits(model, tp, static=False, **options)
    assert same_bytes(logits(model, tp, static=True, poison=True, **options), want)


def test_rows_beyond_the_position_are_kept_out_by_the_mask_alone(model, monkeypatch):
    """The same assertion turns red when the rows beyond the position may be selected."""
    want = logits(model, 2, static=False, dcp_size=2)
    assert same_bytes(logits(model, 2, static=True, dcp_size=2), want)
    candidates = indexer._candidates
    last = torch.tensor([10**6])

    def unmasked(q, head_weights, k_local, key_positions, query_positions, k):
        positions = last if len(query_positions) == 1 else query_positions
        return candidates(q, head_weights, k_local, key_positions, positions, k)

    monkeypatch.setattr(indexer, "_candidates", unmasked)
    assert same_bytes(logits(model, 2, static=False, dcp_size=2), want)
    assert not same_bytes(logits(model, 2, static=True, dcp_size=2), want)


def test_addresses_never_change(model):
    engine = Engine(model, SingleGroup(), dcp_size=1, max_length=448, static_decode=True)
    buffers = lambda: [  # noqa: E731
        *(
            engine.step.token,
            engine.step.position,
            engine.step.table,
            engine.step.logits,
            engine.attention.topk_indices,
        ),
        *engine.attention.scratch.buffers.values(),
        *engine.attention.manager.workspace.values(),
    ]
    engine.generate(PROMPTS[0], 2)
    before = [buffer.data_ptr() for buffer in buffers()]
    for prompt in PROMPTS:
        engine.generate(prompt, STEPS)
    assert [buffer.data_ptr() for buffer in buffers()] == before and len(before) == 10


def test_results_are_not_views_of_the_buffer(model):
    engine = Engine(model, SingleGroup(), dcp_size=1, max_length=448, static_decode=True)
    rows = engine.generate(PROMPTS[0], STEPS).logits
    assert len({tuple(row.tolist()) for row in rows}) == STEPS


def test_progress_reaches_the_total(model):
    seen = []
    engine = Engine(model, SingleGroup(), dcp_size=1, max_length=448, static_decode=True)
    engine.generate(PROMPTS[0], STEPS, lambda *step: seen.append(step))
    assert seen[-1][0] == seen[-1][1]


def test_a_graph_of_collectives_over_the_host_is_refused():
    class Attention:
        class scratch:
            device = torch.device("cuda")

    class OverTheHost(SingleGroup):
        capturable = False

    with pytest.raises(UserError, match="cannot hold collectives over gloo"):
        DecodeStep(Attention, None, 1, OverTheHost())
