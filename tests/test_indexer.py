"""The indexer: scores, the total order of its top-k, and a selection that is the same for every shard count."""

import math

import pytest
import torch

from dcp_fix import ownership
from dcp_fix.base.equality import close, same_bytes
from dcp_fix.indexer import FAULT, index_scores, select, topk
from dcp_fix.ranks.group import LocalGroup, SingleGroup

INF, NAN = math.inf, math.nan


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lexicographic(scores, ids, k):
    """The first k (id, score) by score descending, id ascending, in plain Python."""
    order = sorted((-s, i) for s, i in zip(scores, ids, strict=True) if s > -INF)[:k]
    return [i for _, i in order] + [-1] * (k - len(order))


def problem(tokens, heads=4, dim=128, ties=False, seed=0):
    """q, head_weights, keys for `tokens` positions; with ties, small integers so that many scores coincide exactly."""
    q, w, k = (
        randn(tokens, heads, dim, seed=seed),
        randn(tokens, heads, seed=seed + 1),
        randn(tokens, dim, seed=seed + 2),
    )
    if ties:
        q, w, k = q.round(), w.sign(), torch.where(k.abs() > 2, k.sign(), 0.0)
    return q, w, k


def sharded(tokens, k, dcp_size, interleave, ties=False, last=None, heads=4):
    """`select` through `dcp_size` ranks, for the queries of the last positions (all by default)."""
    q, w, keys = problem(tokens, heads, ties=ties)
    positions = torch.arange(tokens)
    queries = positions[-(last or tokens) :]

    def run(group):
        mine = ownership.owner(positions, dcp_size, interleave) == group.rank
        return select(q[queries], w[queries], keys[mine], positions[mine], queries, k, group)

    return LocalGroup.run(dcp_size, run)


# --- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "heads", "keys"), [(1, 1, 1), (1, 32, 300), (5, 3, 256), (7, 6, 257), (3, 64, 0)])
def test_scores_against_the_formula(tokens, heads, keys):
    q, w, k = randn(tokens, heads, 128), randn(tokens, heads, seed=1), randn(keys, 128, seed=2)
    want = torch.einsum("th,thn->tn", w.double(), torch.einsum("thd,nd->thn", q.double(), k.double()).relu())
    got = index_scores(q, w, k)
    assert got.shape == (tokens, keys) and close(got, want.float(), ulps=64, floor=11.0 * heads)


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 33])
@pytest.mark.parametrize("heads", [1, 3, 32])
def test_a_score_has_the_same_bits_in_any_company(tokens, heads):
    """Alone, among others, in another order: what the shards of different DCP sizes ask for."""
    q, w, k = randn(tokens, heads, 128), randn(tokens, heads, seed=1), randn(700, 128, seed=2)
    whole = index_scores(q, w, k)
    order = torch.randperm(700, generator=torch.Generator().manual_seed(3))
    assert same_bytes(index_scores(q, w, k[order]), whole[:, order])
    for some in (slice(0, 1), slice(3, 700, 4), slice(255, 257), slice(699, 700), slice(1, 700, 8)):
        assert same_bytes(index_scores(q, w, k[some]), whole[:, some].contiguous())


# --- the total order --------------------------------------------------------------------------------------------------


def test_case_8_ties_go_to_the_lower_id():
    equal = torch.ones(1, 8)
    assert topk(equal, torch.arange(8), 2)[0].tolist() == [[0, 1]]
    assert topk(equal, torch.arange(7, -1, -1), 2)[0].tolist() == [[0, 1]]  # whatever the order of arrival


def test_total_order_over_signs_zeros_and_marks():
    scores = torch.tensor([[-0.0, 0.0, -1.5, INF, -INF, NAN, 1e-40, -1e-40, 3.0]])
    ids, values = topk(scores, torch.arange(9), 9)
    assert ids.tolist() == [[FAULT, 3, 8, 6, 0, 1, 7, 2, -1]]  # the NaN first
    assert values[0, 1:3].tolist() == [INF, 3.0] and values[0, 0].isnan() and values[0, 8] == -INF


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 8), (64, 7), (1000, 512)])
def test_topk_against_plain_sorting(n, k):
    scores = (randn(3, n) * 4).round() / 4  # many ties
    scores[0, ::3] = -INF
    ids = 2**31 - 2 - torch.arange(n)  # the largest ids there are, descending
    got, values = topk(scores, ids, k)
    assert got.dtype == torch.int32 and got.shape == (3, k)
    for row, chosen, value in zip(scores.tolist(), got.tolist(), values.tolist(), strict=True):
        assert chosen == lexicographic(row, ids.tolist(), k)
        assert value == sorted((s for s in row if s > -INF), reverse=True)[:k] + [-INF] * value.count(-INF)


# --- select -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_select_against_the_definition(ties):
    tokens, k = 90, 16
    q, w, keys = problem(tokens, ties=ties)
    scores = index_scores(q, w, keys)
    got = sharded(tokens, k, 1, 1, ties)[0]
    for p in range(tokens):
        ids = [i for i in lexicographic(scores[p, : p + 1].tolist(), range(p + 1), k) if i >= 0]
        assert got[p].tolist() == sorted(ids) + [-1] * (k - len(ids))


@pytest.mark.parametrize("interleave", [1, 4, 64])
@pytest.mark.parametrize("dcp_size", [2, 4, 8])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_select_is_the_same_for_every_shard_count(dcp_size, interleave, ties):
    want = sharded(tokens=701, k=64, dcp_size=1, interleave=1, ties=ties)[0]
    for got in sharded(701, 64, dcp_size, interleave, ties):
        assert same_bytes(got, want)


@pytest.mark.parametrize("last", [1, 3])
@pytest.mark.parametrize("dcp_size", [2, 4, 8])
def test_decode_steps_with_real_head_counts(dcp_size, last):
    want = sharded(tokens=1037, k=512, dcp_size=1, interleave=1, last=last, heads=32)[0]
    for got in sharded(1037, 512, dcp_size, 1, last=last, heads=32):
        assert same_bytes(got, want)


@pytest.mark.parametrize("dcp_size", [1, 4])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_fewer_keys_than_ranks_or_than_k(tokens, dcp_size):
    want = torch.tensor([list(range(p + 1)) + [-1] * (7 - p) for p in range(tokens)], dtype=torch.int32)
    assert all(same_bytes(got, want) for got in sharded(tokens, 8, dcp_size, 1))
    one = torch.zeros(tokens, 1, dtype=torch.int32)  # k = 1 with one key
    assert same_bytes(sharded(tokens, 1, dcp_size, 1)[0][:1], one[:1])


@pytest.mark.parametrize("dcp_size", [1, 2, 8])
def test_a_score_of_nan_is_a_fault_of_every_query_that_sees_its_key(dcp_size):
    """Key 20 is NaN: queries before it do not see it, and those that may take all of 16 keys need no score."""
    q, w, keys = problem(40)
    keys[20], positions = NAN, torch.arange(40)

    def run(group):
        mine = ownership.owner(positions, dcp_size) == group.rank
        return select(q, w, keys[mine], positions[mine], positions, 16, group)

    for got in LocalGroup.run(dcp_size, run):
        assert (got == FAULT).all(1).nonzero().flatten().tolist() == list(range(20, 40))
        assert (got[:20] >= -1).all()


def test_no_query_sees_a_later_key():
    """Keys after the query score highest: chunked prefill leaves them in the cache of a rank that runs ahead."""
    q, w, keys = torch.ones(1, 1, 4), torch.ones(1, 1), torch.arange(20.0)[:, None].expand(20, 4)
    got = select(q, w, keys, torch.arange(20), torch.tensor([9]), 3, SingleGroup())
    assert got.tolist() == [[7, 8, 9]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(head_weights=torch.ones(2, 3)), r"got \[2, 4, 8\], \[2, 3\], \[5, 8\], \[2\]"),
        (dict(key_positions=torch.arange(4)), "5 keys with 4 positions"),
        (dict(key_positions=torch.tensor([0, 1, 3, 2, 4])), "key_positions must ascend"),
    ],
)
def test_bad_arguments_are_refused_at_the_door(change, message):
    good = dict(
        q=torch.ones(2, 4, 8),
        head_weights=torch.ones(2, 4),
        k_local=torch.ones(5, 8),
        key_positions=torch.arange(5),
        query_positions=torch.tensor([3, 4]),
        k=2,
        group=SingleGroup(),
    )
    with pytest.raises(ValueError, match=message):
        select(**(good | change))
