"""The workspace plan: upstream's bytes to the digit, budgets that hold, and the plan that allocates always."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_fix import broken, workspace
from dcp_fix.workspace import MIB, WorkspaceError, allocate, partial_bytes, plan

GIB = 1024 * MIB
H200 = 132


def test_upstream_figures():
    """What FlashMLA's sparse decode took on an H200: accumulators always, and none where nothing is split."""
    always = broken.plan_always_allocate(8192, 64, 2048, H200)
    assert always.accumulator_bytes == 2052 * MIB and plan(8192, 64, 2048, H200).accumulator_bytes == 0
    small = broken.plan_always_allocate(132, 64, 64, H200)
    assert round(small.accumulator_bytes / MIB, 2) == 33.06 and plan(132, 64, 64, H200).accumulator_bytes == 0


@pytest.mark.parametrize("tokens", [8192, 32768])
def test_long_prompt_meets_the_budget_that_always_allocate_exceeds(tokens):
    fixed = plan(tokens, 64, 2048, H200, GIB)
    assert fixed.bytes <= GIB and fixed.accumulators == 0
    with pytest.raises(
        WorkspaceError, match=f"{tokens} tokens of 64 heads need .* MiB of workspace, the budget is 1024 MiB"
    ):
        broken.plan_always_allocate(tokens, 64, 2048, H200, GIB)
    assert allocate(fixed, "meta") is None


def test_signatures_match():
    assert inspect.signature(broken.plan_always_allocate).parameters.keys() == inspect.signature(plan).parameters.keys()


@pytest.mark.parametrize(
    ("tokens", "heads", "topk", "splits"),
    [
        (1, 64, 2048, 32),
        (1, 128, 2048, 32),
        (1, 16, 512, 8),
        (4, 64, 2048, 32),
        (66, 64, 2048, 2),
        (67, 64, 2048, 1),
        (1, 64, 1, 1),
    ],
)
def test_splits_fill_the_multiprocessors(tokens, heads, topk, splits):
    got = plan(tokens, heads, topk, H200)
    assert got.splits == splits and got.accumulators == (splits if splits > 1 else 0)
    out, lse = allocate(got, "meta") or (torch.empty(0), torch.empty(0))
    assert 4 * (out.numel() + lse.numel()) == got.accumulator_bytes


def test_splits_are_as_many_as_there_are_blocks_of_keys():
    """100 keys are two blocks of 64; one program more would find no key."""
    assert [workspace.wanted_splits(1, 64, topk, H200) for topk in (64, 65, 100, 128, 129)] == [1, 2, 2, 2, 3]


def test_heads_count_in_whole_programs():
    """65 heads are two programs of 64, so 66 tokens leave nothing to split for."""
    assert [workspace.wanted_splits(66, heads, 2048, H200) for heads in (1, 64, 65, 96, 128)] == [2, 2, 1, 1, 1]


def test_a_tight_budget_costs_splits_first_and_chunks_then():
    token = partial_bytes(64)
    assert plan(2, 64, 2048, H200, 100 * token).splits == 32
    assert plan(2, 64, 2048, H200, 12 * token).splits == 5
    assert plan(2, 64, 2048, H200, 5 * token) == workspace.Plan(2, 64, 2048, 1, 2, 0)
    assert plan(2, 64, 2048, H200, 1 * token).chunks() == [slice(0, 1), slice(1, 2)]
    assert [c.stop - c.start for c in plan(100, 64, 2048, H200, 40 * token).chunks()] == [34, 34, 32]


def test_one_token_that_does_not_fit_names_the_remedy():
    with pytest.raises(
        WorkspaceError, match="one token of 64 heads needs 131328 bytes of workspace, the budget is 131327: raise"
    ):
        plan(8192, 64, 2048, H200, 131327)
    assert plan(8192, 64, 2048, H200, 131328).token_chunk == 1


@pytest.mark.parametrize("bad", [dict(tokens=0), dict(heads=0), dict(topk=0), dict(num_sms=0)])
def test_bad_sizes_are_refused(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}=0"):
        plan(**(dict(tokens=1, heads=1, topk=1, num_sms=1) | bad))


@given(st.integers(1, 40000), st.integers(1, 130), st.integers(1, 4096), st.integers(1, 200), st.integers(1, 1 << 31))
def test_every_plan_keeps_its_budget_and_covers_every_token_once(tokens, heads, topk, num_sms, budget):
    try:
        got = plan(tokens, heads, topk, num_sms, budget)
    except WorkspaceError:
        assert budget < partial_bytes(heads)
        return
    assert got.bytes <= budget
    assert [t for chunk in got.chunks() for t in range(chunk.start, chunk.stop)] == list(range(tokens))
    assert got.splits >= 1 and (got.accumulators == 0) == (got.splits == 1)
    assert all(chunk.stop - chunk.start <= got.token_chunk for chunk in got.chunks())


def test_a_cache_is_decoded_where_many_tokens_read_it_and_the_result_is_larger():
    planned = lambda tokens, capacity, budget=None: plan(tokens, 64, 2048, 132, budget, capacity)  # noqa: E731
    assert planned(8192, 65536).decoded == 65536 and planned(8192, 0).decoded == 0
    assert planned(8192, 65536).bytes == planned(8192, 0).bytes + 65536 * 1152
    assert planned(64, 65536).decoded == 0  # split, and each row read twice
    assert planned(200, 65536).decoded == 0  # each row read 6 times
    assert planned(8192, 1 << 20).decoded == 0  # read 16 times, but larger than the result
    whole = planned(8192, 65536).bytes
    assert planned(8192, 65536, whole).decoded == 65536 and planned(8192, 65536, whole - 1).decoded == 0
