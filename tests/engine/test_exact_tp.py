"""exact_tp.py: the same logits, bit for bit, at every TP size and every DCP size that divides it."""

import doctest
from dataclasses import replace

import pytest
import torch

from dcp_fix.base.equality import same_bytes
from dcp_fix.base.errors import UserError
from dcp_fix.engine import exact_tp
from dcp_fix.engine.engine import Engine
from dcp_fix.engine.model import Model
from dcp_fix.ranks.group import LocalGroup, SingleGroup
from tests.checkpoints import random_checkpoint, random_tokens

PROMPTS = [random_tokens(count, seed=count) for count in (30, 150)]  # index_topk is 64: dense, sparse
SHAPES = [(1, 1), (2, 2), (4, 1), (4, 4), (8, 2), (8, 8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = Model.load(random_checkpoint(tmp_path_factory.mktemp("checkpoint")))
    return Model(replace(model.config, eos_token_id=-1), model.weights)


def answers(model, tp, dcp, **options):
    options = {"combine": "exact", "shards": 8, "max_length": 200, "stale": "noise"} | options
    run = lambda group: Engine(model, group, dcp_size=dcp, **options)  # noqa: E731
    return LocalGroup.run(tp, lambda group: list(map(run(group).generate, PROMPTS, [3, 3])))[0]


def alike(runs):
    first, *others = ([run.digests for run in both] for both in runs)
    return all(other == first for other in others)


def test_tp1_dcp1_has_the_bits_of_tp4_dcp4(model):
    runs = [answers(model, *shape) for shape in SHAPES]
    assert alike(runs)
    ordinary = answers(model, 1, 1, shards=0)
    for mine, other in zip(runs[0], ordinary, strict=True):
        assert mine.tokens == other.tokens
        assert (mine.logits - other.logits).abs().max() < 0.05 * other.logits.abs().max()


def test_without_shards_the_tp_size_shows(model):
    assert not alike([answers(model, *shape, shards=0) for shape in ((1, 1), (4, 4))])


def test_in_bf16_with_chunks_and_another_cache(model):
    narrow = Model(model.config, {name: weight.bfloat16() for name, weight in model.weights.items()})
    options = {"dtype": torch.bfloat16, "cache_format": "bf16", "max_batch_tokens": 90}
    assert alike([answers(narrow, *shape, **options) for shape in ((1, 1), (4, 2), (8, 8))])


def test_a_sum_over_neighbours_is_a_node_of_any_larger_one():
    parts = list(torch.randn(8, 1000, generator=torch.Generator().manual_seed(0)))
    whole = exact_tp.tree_sum(parts)
    for ranks in (1, 2, 4, 8):
        nodes = [exact_tp.tree_sum(parts[i : i + 8 // ranks]) for i in range(0, 8, 8 // ranks)]
        assert same_bytes(exact_tp.tree_sum(nodes), whole)
    assert not same_bytes(sum(parts[1:], parts[0]), whole)
    assert doctest.testmod(exact_tp).failed == 0


def test_a_sum_is_rounded_at_its_root_alone():
    assert exact_tp.tree_sum([torch.tensor(x).bfloat16() for x in (256.0, 1.0, 1.0, 0.0)]).bfloat16() == 258


@pytest.mark.parametrize(
    ("options", "message"),
    [({"shards": 6}, "6 canonical shards over 1 ranks"), ({"combine": "a2a"}, "'a2a', whose bits depend on DCP"),
     ({"shards": 32}, "TP size of 32 does not divide")],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(model, options, message):
    with pytest.raises(UserError, match=message):
        Engine(model, SingleGroup(), dcp_size=1, max_length=99, **{"combine": "exact", "shards": 8} | options)
