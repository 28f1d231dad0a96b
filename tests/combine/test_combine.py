"""The LSE combine: field cases 1 to 5, 12 and 16, agreement of its routes, and the manager's workspace."""

import math

import pytest
import torch

from dcp_fix import broken
from dcp_fix.base.equality import close, same_bytes
from dcp_fix.combine import (
    CombineManager,
    attend_routed,
    clean_lse,
    combine_a2a,
    combine_ag_rs,
    merge_partials,
    query_gather,
    to_natural,
)
from dcp_fix.ranks.group import LocalGroup, SingleGroup

INF, NAN = math.inf, math.nan
METHODS = {"ag_rs": combine_ag_rs, "a2a": combine_a2a}


def scalars(out, lse):
    """Partials of one token, one head, width one."""
    return torch.tensor(out).view(-1, 1, 1, 1), torch.tensor(lse).view(-1, 1, 1)


def merged(out, lse):
    out, lse = merge_partials(*scalars(out, lse))
    return out.item(), lse.item()


def by(method, out, lse):
    """out [P, T, H, D] and lse [P, T, H] through P ranks; the ranks' heads put together again."""
    ranks = LocalGroup.run(len(out), lambda group: METHODS[method](out[group.rank], lse[group.rank], group))
    return torch.cat(ranks, dim=1)


def partials(ranks, tokens, heads, width, holes=0.3, seed=0):
    """Random partials where some shards are empty and carry what a kernel leaves: NaN outputs, +inf or -inf."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(ranks, tokens, heads, width, generator=generator)
    lse = 3 * torch.randn(ranks, tokens, heads, generator=generator)
    empty = torch.rand(ranks, tokens, heads, generator=generator) < holes
    empty[:, 0] = True  # row 0: no key anywhere
    marks = torch.tensor([INF, -INF])[torch.randint(2, empty.shape, generator=generator)]
    return out.masked_fill(empty[..., None], NAN), torch.where(empty, marks, lse), empty


def softmax_oracle(out, lse, empty):
    """The same merge in fp64, written as a softmax over the shards that have keys."""
    weight = lse.double().masked_fill(empty, -INF).softmax(0).nan_to_num(0.0)
    return (weight[..., None] * out.double().masked_fill(empty[..., None], 0.0)).sum(0)


# --- cases.md ---------------------------------------------------------------------------------------------------------


def test_case_1_lse_base():
    out, natural = [0.0, 10.0], torch.tensor([2.0, 8.0]).log()
    base_2 = natural / math.log(2)
    assert merged(out, natural.tolist()) == pytest.approx((8.0, 2.302585), abs=1e-6)
    assert merged(out, to_natural(base_2, "2").tolist()) == pytest.approx((8.0, 2.302585), abs=1e-6)
    assert merged(out, to_natural(natural, "2").tolist())[0] == pytest.approx(7.2330, abs=1e-4)
    assert merged(out, to_natural(base_2, "e").tolist())[0] == pytest.approx(8.8080, abs=1e-4)
    twice = to_natural(to_natural(base_2, "2"), "2")
    assert merged(out, twice.tolist())[0] == pytest.approx(7.2330, abs=1e-4)
    with pytest.raises(ValueError, match="base '10' is not one of 'e', '2'"):
        to_natural(natural, "10")


@pytest.mark.parametrize("empty", [1, 3, 7])
def test_case_2_empty_shards_weigh_nothing(empty):
    assert merged([3.0] + [0.0] * empty, [math.log(2)] + [-INF] * empty) == pytest.approx((3.0, math.log(2)))
    wrong = {1: 2.0, 3: 1.2, 7: 0.667}[empty]  # an empty shard whose lse is 0
    assert merged([3.0] + [0.0] * empty, [math.log(2)] + [0.0] * empty)[0] == pytest.approx(wrong, abs=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_case_3_every_shard_empty(method):
    out = torch.tensor([NAN, 3.0]).view(1, 2, 1, 1).expand(2, 2, 2, 1)  # row 0 has no key, row 1 has
    lse = torch.tensor([-INF, math.log(2)]).view(1, 2, 1).expand(2, 2, 2)
    got, got_lse = merge_partials(out, lse)
    assert got[0].eq(0).all() and (got_lse[0] == -INF).all()
    assert torch.allclose(got[1], torch.tensor(3.0)) and torch.allclose(got_lse[1], torch.tensor(math.log(4)))
    assert same_bytes(by(method, out, lse), got)


def test_case_4_plus_infinity_means_no_key():
    assert merged([NAN, 3.0], [INF, math.log(2)]) == pytest.approx((3.0, math.log(2)))
    assert merged([NAN, NAN], [INF, INF]) == (0.0, -INF)
    assert clean_lse(torch.tensor([INF, -INF, 2.0])).tolist() == [-INF, -INF, 2.0]


@pytest.mark.parametrize("method", METHODS)
def test_a_nan_is_no_mark_and_reaches_every_rank(method):
    """Beside an empty shard, which stays neutral: what carries NaN held keys, and one of them, or its query, is bad."""
    out, lse, _ = partials(4, tokens=3, heads=8, width=5, holes=0.0)
    lse[0, 1], out[0, 1] = INF, NAN
    want = by(method, out, lse)
    lse[1, 2, 3], out[1, 2, 3] = NAN, NAN
    got = by(method, out, lse)
    assert got[2, 3].isnan().all() and merge_partials(out, lse)[1][2, 3].isnan()
    got[2, 3] = want[2, 3]
    assert same_bytes(got, want) and not want.isnan().any()


@pytest.mark.parametrize("undefined", [NAN, INF, -INF])
def test_case_5_zero_weight_selects(undefined):
    assert merged([undefined, 3.0], [-INF, math.log(2)]) == pytest.approx((3.0, math.log(2)))
    assert merged([undefined, 3.0], [-200.0, 2.0])[0] == 3.0  # exp(-202) is 0 in fp32
    assert math.isnan(merged([NAN, 3.0], [0.0, 0.0])[0])  # a NaN that has weight is not hidden


@pytest.mark.parametrize("method", METHODS)
def test_case_12_strided_lse_and_padded_heads(method):
    out, lse, empty = partials(2, tokens=2, heads=6, width=5, seed=1)
    strided = lse.transpose(1, 2).contiguous().transpose(1, 2)  # held as (H, T)
    padded = torch.full((2, 2, 6, 9), NAN)
    padded[..., :5] = out
    want = by(method, out, lse)
    assert same_bytes(by(method, padded[..., :5], strided), want)
    assert torch.allclose(want.double(), softmax_oracle(out, lse, empty), rtol=1e-5, atol=1e-6)


def uniform_attention(group, route):
    """Case 16: four keys with equal scores, values 0, 10, 20, 30 dealt to two ranks, one head on each rank."""
    mine = torch.tensor([0.0, 10.0, 20.0, 30.0])[group.rank :: 2]

    def partial(q):
        tokens, heads, _ = q.shape
        return mine.mean().expand(tokens, heads, 1), torch.tensor(math.log(2)).expand(tokens, heads)

    return route(torch.ones(1, 1, 1), partial, CombineManager(group)).item()


def test_case_16_routing():
    assert LocalGroup.run(2, uniform_attention, attend_routed) == [15.0, 15.0]
    assert LocalGroup.run(2, uniform_attention, broken.attend_unrouted) == [10.0, 20.0]
    assert uniform_attention(SingleGroup(), attend_routed) == uniform_attention(SingleGroup(), broken.attend_unrouted)


# --- the routes agree -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "tokens", "heads", "width"), [(1, 3, 2, 4), (2, 5, 6, 3), (4, 7, 4, 33), (8, 3, 16, 5)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routes_give_the_same_bytes(ranks, tokens, heads, width, dtype):
    out, lse, empty = partials(ranks, tokens, heads, width, seed=ranks)
    out = out.to(dtype)
    want, _ = merge_partials(out, lse)
    assert close(want, softmax_oracle(out, lse, empty).float(), ulps=16, floor=1.0)
    for method in METHODS:
        assert same_bytes(by(method, out, lse), want)


def test_merge_is_a_whole_attention():
    """Shards of one softmax, merged, are that softmax; the merge of merges too."""
    scores, values = torch.randn(2, 3, 12).double(), torch.randn(12, 5).double()
    shards = [range(0, 5), range(5, 6), range(6, 12)]
    out = torch.stack([scores[..., s].softmax(-1) @ values[s] for s in map(list, shards)]).float()
    lse = torch.stack([scores[..., s].logsumexp(-1) for s in map(list, shards)]).float()
    got, got_lse = merge_partials(out, lse)
    assert close(got, (scores.softmax(-1) @ values).float(), ulps=8, floor=1.0)
    assert close(got_lse, scores.logsumexp(-1).float(), ulps=4)
    first = merge_partials(out[:2], lse[:2])
    again, _ = merge_partials(torch.stack([first[0], out[2]]), torch.stack([first[1], lse[2]]))
    assert close(again, got, ulps=8, floor=1.0)


def test_query_gather_puts_heads_in_rank_order():
    q = torch.arange(2 * 8 * 3.0).view(2, 8, 3)
    for got in LocalGroup.run(4, lambda group: query_gather(q[:, 2 * group.rank : 2 * group.rank + 2], group)):
        assert same_bytes(got, q)


# --- the manager ------------------------------------------------------------------------------------------------------


def managed(group, method, rows, decode_only, max_rows=4, calls=1):
    out, lse, _ = partials(group.size, rows, 8, 5, seed=rows)
    manager = CombineManager(group, method, max_rows)
    for _ in range(calls):
        q = manager.query_gather(torch.full((rows, 8 // group.size, 7), float(group.rank)), decode_only)
        result = manager.combine(out[group.rank], lse[group.rank], decode_only)
    return q.clone(), result.clone(), manager


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("rows", "decode_only"), [(1, True), (4, True), (5, True), (9, True), (3, False), (9, False)])
def test_oversized_and_mixed_batches_take_the_plain_collective(method, rows, decode_only):
    out, lse, _ = partials(4, rows, 8, 5, seed=rows)
    want, _ = merge_partials(out, lse)
    results = LocalGroup.run(4, managed, method, rows, decode_only)
    assert same_bytes(torch.cat([result for _, result, _ in results], dim=1), want)  # every row, none cut off
    for q, _, manager in results:
        assert q.shape == (rows, 8, 7) and q[0, :, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert manager.path(rows, decode_only) == ("direct" if decode_only and rows <= 4 else "plain")
        assert bool(manager.workspace) == (decode_only and rows <= 4)


@pytest.mark.parametrize("method", METHODS)
def test_direct_workspace_keeps_its_addresses(method):
    def addresses(group):
        manager, seen = CombineManager(group, method, max_rows=4), set()
        for rows in (4, 1, 3):
            out, lse, _ = partials(group.size, rows, 8, 5)
            q = manager.query_gather(out[0][:, : 8 // group.size], decode_only=True)
            seen.add((q.data_ptr(), manager.combine(out[0], lse[0], decode_only=True).data_ptr()))
        return len(seen)

    assert LocalGroup.run(2, addresses) == [1, 1]


@pytest.mark.parametrize("method", METHODS)
def test_one_manager_serves_layers_with_other_heads(method):
    """8 heads, then 16, then 8 again: buffers are kept by shape."""
    given = [partials(2, 3, heads, 5)[:2] for heads in (8, 16, 8)]

    def answers(group):
        manager = CombineManager(group, method, max_rows=4)
        return [manager.combine(out[group.rank], lse[group.rank], decode_only=True).clone() for out, lse in given]

    ranks = LocalGroup.run(2, answers)
    for number, (out, lse) in enumerate(given):
        assert same_bytes(torch.cat([one[number] for one in ranks], dim=1), merge_partials(out, lse)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_base_2_lse_is_widened_before_it_is_multiplied(dtype):
    """Multiplied as they are, 10.0 and 10.0625 give 5.0781 in bf16 and 5.1172 in fp16: each holds both."""
    lse = to_natural(torch.tensor([10.0, 10.0625], dtype=dtype), "2")
    assert merged([0.0, 10.0], lse.tolist())[0] == pytest.approx(5.1083, abs=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CombineManager(SingleGroup(), method="ring"), "method 'ring' is not one of ag_rs, a2a"),
        (
            lambda: CombineManager(SingleGroup()).combine(torch.ones(2, 3, 4), torch.ones(3, 2)),
            r"out \[2, 3, 4\] and lse \[3, 2\]",
        ),
    ],
)
def test_bad_arguments_are_refused_at_the_door(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(RuntimeError, match="H divisible by 2 ranks, got out"):
        LocalGroup.run(2, lambda group: CombineManager(group).combine(torch.ones(1, 3, 4), torch.ones(1, 3)))
