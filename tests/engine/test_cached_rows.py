"""What a request finds in the cache: rows that were written and nothing else, wherever its blocks lie."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from dcp_fix.base.equality import same_bytes
from dcp_fix.engine import sharded
from dcp_fix.engine.blocks import BlockPool
from dcp_fix.engine.engine import Engine
from dcp_fix.engine.model import Model
from dcp_fix.engine.scratch import Scratch
from dcp_fix.engine.sharded import Ops, ShardedAttention
from dcp_fix.kv_cache import BLOCK
from dcp_fix.ranks.group import LocalGroup, SingleGroup
from dcp_fix.workspace import H200_SMS
from tests.checkpoints import random_checkpoint, random_tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = Model.load(random_checkpoint(tmp_path_factory.mktemp("checkpoint")))
    return Model(replace(model.config, eos_token_id=-1), model.weights)


def test_the_last_token_of_an_answer_has_no_row_yet(model):
    """60 tokens and 4 answers fill a block by count, but the fourth answer was never an input: its row is unwritten."""
    engine = Engine(model, SingleGroup(), dcp_size=1, max_length=256)
    prompt = random_tokens(BLOCK - 4, seed=1)
    first = engine.generate(prompt, 4)
    follow = prompt + first.tokens + random_tokens(10, seed=2)
    got = engine.generate(follow, 4)
    fresh = Engine(model, SingleGroup(), dcp_size=1, max_length=256).generate(follow, 4)
    assert got.cached == 0 and same_bytes(got.logits, fresh.logits) and got.tokens == fresh.tokens


def test_a_block_is_shared_once_its_last_row_is_written(model):
    engine = Engine(model, SingleGroup(), dcp_size=1, max_length=256)
    prompt = random_tokens(BLOCK - 4, seed=1)
    first = engine.generate(prompt, 5)
    assert engine.generate(prompt + first.tokens + random_tokens(10, seed=2), 1).cached == BLOCK


@pytest.mark.parametrize("topk", [64, 192])
def test_in_exact_mode_a_hit_has_the_bits_of_a_fresh_engine(model, topk):
    """Dense prefill over cached context and sparse prefill; and rows that decode steps wrote are not handed on."""
    model = Model(replace(model.config, index_topk=topk), model.weights)
    shared, answered = random_tokens(141, seed=3), random_tokens(126, seed=5)
    prompts = [shared + random_tokens(count, seed=count) for count in (1, 38, 119)]

    def rank(group, size):
        make = partial(Engine, model, group, dcp_size=size, combine="exact", classes=2, max_length=512)
        engine = make()
        first = engine.generate(answered, 4)
        follow = answered + first.tokens + random_tokens(9, seed=6)
        engine.generate(shared, 1)
        return [(engine.generate(prompt, 2), make().generate(prompt, 2)) for prompt in [follow, *prompts]]

    by_size = [LocalGroup.run(2, rank, size)[0] for size in (1, 2)]
    for pairs in by_size:
        assert [got.cached for got, _ in pairs] == [0, 128, 128, 128]
        assert all(same_bytes(got.logits, want.logits) for got, want in pairs)
    assert all(same_bytes(one.logits, two.logits) for (one, _), (two, _) in zip(*by_size, strict=True))


@pytest.mark.parametrize("dcp_size, interleave", [(1, 1), (2, 1), (4, 16)])
def test_cached_context_is_gathered_chunk_by_chunk(model, monkeypatch, dcp_size, interleave):
    """Three and more chunks, the last one short: each position's row must come from its own chunk."""
    longer = Model(replace(model.config, index_topk=448), model.weights)
    shared = random_tokens(300, seed=3)
    prompt = shared + random_tokens(77, seed=4)

    def rank(group):
        engine = Engine(longer, group, dcp_size=dcp_size, interleave=interleave, max_length=512)
        engine.generate(shared, 1)
        return engine.generate(prompt, 3)

    whole = LocalGroup.run(4, rank)[0]
    monkeypatch.setattr(sharded, "CONTEXT_ROWS", 16)
    chunked = LocalGroup.run(4, rank)[0]
    assert whole.cached == chunked.cached == 256
    assert same_bytes(whole.logits, chunked.logits)


def test_the_workspace_is_planned_for_the_heads_that_are_gathered(model):
    """48 heads a rank, two ranks: 96 gathered, 128 as the kernel pads them. The local ones would be 64."""

    class Pair(SingleGroup):
        size = 2

    scratch = Scratch({"q": 1}, 1, "zeros", torch.device("cpu"), torch.float32)
    attention = ShardedAttention(
        model.config, 48, Pair(), num_blocks=1, interleave=1, cache_format="bf16", combine="ag_rs", ops=Ops(),
        scratch=scratch, workspace_budget=1 << 30, max_batch_tokens=1, share=None,
    )  # fmt: skip
    assert attention.plan(3).heads == 128
    seen = []
    attention.ops = Ops(plan=lambda *sizes: seen.append(sizes))
    attention.plan(3)
    assert [sizes[:5] for sizes in seen] == [(3, 128, model.config.index_topk, H200_SMS, 1 << 30)]


def test_the_end_of_a_prefix_is_given_up_first():
    """Three blocks of four tokens are known and one is taken away: the other two are still a prefix of eight."""
    pool = BlockPool(num_blocks=3, block_size=4, dcp_size=1)
    tokens = list(range(12))
    pool.close(pool.open(tokens, 12)[0], tokens)
    table, hit = pool.open([90, 91, 92], 4)
    assert (table, hit) == ([2], 0)
    pool.close(table, [90, 91, 92])
    assert pool.open(tokens, 12) == ([0, 1, 2], 8)
