"""LocalGroup and SingleGroup: right sums in rank order, and no fault that hangs."""

import threading

import pytest
import torch

from dcp_fix.base.equality import same_bytes
from dcp_fix.ranks import rendezvous
from dcp_fix.ranks.group import Group, GroupError, LocalGroup, SingleGroup, ordered_sum

SIZES = [1, 2, 3, 4, 8]


def value(rank, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_collectives_against_plain_torch(size, dim):
    shape = (2 * size, 3 * size, 5 * size)
    parts = [value(rank, *shape) for rank in range(size)]
    rows = [value(rank, size, 2, 7) for rank in range(size)]

    def every(group):
        x, row = parts[group.rank], rows[group.rank]
        return (
            group.all_gather(x, dim),
            group.all_reduce(x),
            group.reduce_scatter(x, dim),
            group.all_to_all(row.transpose(1, 2)),  # strided input
        )

    for rank, got in enumerate(LocalGroup.run(size, every)):
        total = ordered_sum(parts)
        want = (
            torch.cat(parts, dim),
            total,
            total.chunk(size, dim)[rank],
            torch.stack([row[rank].T for row in rows]),
        )
        assert all(same_bytes(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_sums_run_in_rank_order_and_round_once(dtype):
    big = 2**24
    terms = [big, 1, 1, -big + 1]  # fp32 loses both ones in rank order; integers lose nothing
    got = LocalGroup.run(4, lambda group: group.all_reduce(torch.tensor([terms[group.rank]]).to(dtype)))
    if dtype == torch.int64:
        want = torch.tensor([3])
    else:
        a, b, c, d = (torch.tensor([term]).to(dtype).float() for term in terms)
        want = (((a + b) + c) + d).to(dtype)
    assert all(same_bytes(g, want) for g in got)


def test_results_are_fresh_and_out_is_filled():
    def run(group):
        x = torch.full((2, 2), float(group.rank))
        out = torch.full((4, 2), torch.nan)
        gathered = group.all_gather(x, out=out)
        x.fill_(torch.nan)  # nobody else may see this
        group.all_reduce(torch.ones(1))
        return gathered is out, gathered.tolist()

    assert LocalGroup.run(2, run) == [(True, [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]])] * 2


def test_single_group_copies():
    group, x = SingleGroup(), torch.arange(6.0).view(1, 6)
    for got in (
        group.all_gather(x),
        group.all_reduce(x),
        group.reduce_scatter(x),
        group.all_to_all(x),
    ):
        assert same_bytes(got, x) and got.data_ptr() != x.data_ptr()
    group.self_test()
    assert group.subgroup(1).size == 1


@pytest.mark.parametrize("size", [1, 2, 4])
def test_subgroups_of_consecutive_ranks(size):
    def run(group):
        sub = group.subgroup(size)
        return (
            sub.rank,
            sub.size,
            sub.all_gather(torch.tensor([group.rank])).tolist(),
            group.all_reduce(torch.ones(1)).item(),
        )

    for rank, got in enumerate(LocalGroup.run(4, run)):
        first = rank // size * size
        assert got == (rank - first, size, list(range(first, first + size)), 4.0)


def test_replicated_computes_once():
    calls = []

    def run(group):
        return group.replicated(lambda: calls.append(group.rank) or torch.ones(3))

    results = LocalGroup.run(4, run)
    assert calls == [0] and all(result is results[0] for result in results)
    assert SingleGroup().replicated(lambda: 7) == 7


def test_shared_jobs_are_dealt_out_and_kept_in_order():
    ran = [None] * 7

    def job(group, i):
        ran[i] = group.rank
        return 10 * i

    for jobs in LocalGroup.run(3, lambda group: group.share([lambda i=i: job(group, i) for i in range(7)])):
        assert jobs == [0, 10, 20, 30, 40, 50, 60]
    assert ran == [0, 1, 2, 0, 1, 2, 0]


def test_ranks_take_over_modes_and_threads_are_restored():
    torch.set_num_threads(2)
    with torch.inference_mode():
        modes = LocalGroup.run(2, lambda group: (torch.is_inference_mode_enabled(), torch.get_num_threads()))
    with torch.no_grad():
        grads = LocalGroup.run(2, lambda group: torch.is_grad_enabled())
    assert modes == [(True, 1)] * 2 and grads == [False] * 2 and torch.get_num_threads() == 2
    torch.set_num_threads(1)


# --- faults -----------------------------------------------------------------------------------------------------------


def ones(group):
    return group.all_reduce(torch.ones(2))


@pytest.mark.parametrize("when", ["before", "between", "after", "inside replicated", "inside a subgroup"])
@pytest.mark.parametrize("bad", [0, 2])
def test_a_rank_that_raises_is_named_and_the_others_are_released(when, bad, monkeypatch):
    """By the failure itself: no rank is still waiting when the run returns, though it would wait for these for long."""
    monkeypatch.setattr(rendezvous, "GRACE_S", 60.0)

    def run(group):
        fail = group.rank == bad
        if when == "before" and fail:
            raise KeyError("boom")
        ones(group)
        if when == "between" and fail:
            raise KeyError("boom")
        if when == "inside replicated":
            group.replicated(lambda: {}["boom"])
        sub = group.subgroup(2)
        if when == "inside a subgroup" and fail:
            raise KeyError("boom")
        ones(sub)
        ones(group)
        if when == "after" and fail:
            raise KeyError("boom")

    named = 0 if when == "inside replicated" else bad
    with pytest.raises(GroupError, match=rf"rank {named} of 4 failed: KeyError: 'boom'") as raised:
        LocalGroup.run(4, run)
    assert isinstance(raised.value.__cause__, KeyError)
    ranks = [thread for thread in threading.enumerate() if thread.name.startswith("rank")]
    for thread in ranks:  # one that has said that it is done may not have ended yet
        thread.join(10)
    assert not [thread for thread in ranks if thread.is_alive()]


def test_different_collectives_are_an_error_that_lists_them():
    def run(group):
        return group.all_gather(torch.ones(3)) if group.rank == 1 else ones(group)

    with pytest.raises(
        GroupError, match=r"rank 1: all_gather\(dim=0\) of float32 \[3\].*rank 2: all_reduce of float32 \[2\]"
    ):
        LocalGroup.run(3, run)


@pytest.mark.parametrize("x", [torch.ones(2, 3), torch.ones(2, dtype=torch.int64)], ids=["shape", "dtype"])
def test_different_tensors_are_an_error(x):
    with pytest.raises(GroupError, match="different shapes.*rank 1: all_reduce of (float32|int64)"):
        LocalGroup.run(2, lambda group: group.all_reduce(x if group.rank else torch.ones(2)))


def test_a_rank_that_returns_early_is_named():
    with pytest.raises(GroupError, match="rank 3 returned while others wait for it in all_reduce"):
        LocalGroup.run(4, lambda group: group.rank == 3 or ones(group))


def test_ranks_that_wait_in_different_groups_do_not_hang():
    def run(group):
        sub = group.subgroup(2)
        return ones(group if group.rank == 3 else sub)

    with pytest.raises(GroupError, match="(rank [01] returned|every rank waits for another one: rank 2: .*; rank 3: )"):
        LocalGroup.run(4, run)
    with pytest.raises(GroupError, match="every rank waits for another one: rank 0: .*; rank 1: all_reduce of float32"):
        LocalGroup.run(4, lambda group: [ones(group if group.rank % 2 else group.subgroup(2)) for _ in range(2)])


def test_a_rank_that_stays_away_is_named(monkeypatch):
    monkeypatch.setattr("dcp_fix.ranks.rendezvous.GRACE_S", 0.2)
    release = threading.Event()
    with pytest.raises(GroupError, match=r"rank 1 did not reach all_reduce of float32 \[2\] on cpu within 0.3 s"):
        LocalGroup.run(2, lambda group: release.wait(20) if group.rank else ones(group), timeout=0.3)
    release.set()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda g: g.reduce_scatter(torch.ones(3, 4)),
            r"reduce_scatter over 2 ranks cannot split dimension 0 of \[3, 4\]",
        ),
        (lambda g: g.all_to_all(torch.ones(3, 4)), r"one row for each of 2 ranks, got \[3, 4\]"),
        (lambda g: g.subgroup(3), "subgroup of 3 ranks does not divide a group of 2"),
    ],
)
def test_bad_arguments_are_refused_at_the_door(call, message):
    with pytest.raises(GroupError, match=message):
        LocalGroup.run(2, call)


def test_an_empty_group_is_refused():
    with pytest.raises(GroupError, match="at least one rank, got size 0"):
        LocalGroup.run(0, ones)


# --- case 17: a communicator that quietly does nothing ----------------------------------------------------------------


@pytest.mark.parametrize("op", ["all_gather", "all_reduce", "reduce_scatter", "all_to_all"])
def test_self_test_refuses_a_collective_that_does_nothing(op, monkeypatch):
    right = getattr(Group, op)

    def unwritten(self, *args, **kwargs):
        return torch.full_like(right(self, *args, **kwargs), torch.nan)

    monkeypatch.setattr(LocalGroup, op, unwritten)
    with pytest.raises(GroupError, match=rf"rank \d of 2: {op} of known numbers gave .* refusing to go on"):
        LocalGroup.run(2, ones)


@pytest.mark.parametrize(
    "order", [lambda p: sum(reversed(p)), lambda p: (p[0] + p[1]) + (p[2] + p[3])], ids=["reverse", "tree"]
)
def test_self_test_refuses_another_order_of_summation(order, monkeypatch):
    monkeypatch.setattr(LocalGroup, "all_reduce", lambda self, x: self._exchange("all_reduce", x, order))
    with pytest.raises(GroupError, match="all_reduce of known numbers"):
        LocalGroup.run(4, ones)
