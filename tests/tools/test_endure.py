"""That `make endure` would notice: a block that is taken away and stays known, memory that grows, a near tie."""

import pytest
import torch

from dcp_fix.engine.engine import Generation
from tests.tools import endure

KEPT = []


def stale_and_kept(pool, opened, tokens, capacity):
    """A block handed on to another request stays known by what it held; and something of every request is kept."""
    KEPT.append(torch.ones(1 << 19))  # 2 MiB
    known = dict(pool.known)
    given = opened(tokens, capacity)
    pool.known |= known
    return given


class InTurn:
    """Three prompts in turn, of which the cache holds less than two."""

    def __init__(self) -> None:
        self.turn = 0

    def request(self):
        self.turn += 1
        return [2 + self.turn % 3] * endure.LONGEST, 1


def test_a_stale_block_and_a_leak_are_both_found(monkeypatch):
    monkeypatch.setattr(endure, "Requests", InTurn)
    found = endure.endure("exact", 10, stale_and_kept)
    KEPT.clear()
    assert found["differing"] and found["prefix_hits"] > 0 and not found["ok"]
    assert found["growth"] > endure.FLAT


@pytest.mark.parametrize(
    "memory, is_flat",
    [
        ([100.0] * 9, False),  # too short to say
        ([50.0, *[100.0] * 8, 101.9], True),  # what a warm-up has taken
        ([100.0] * 9 + [102.1], False),
        ([100.0] * 9 + [97.9], False),
        ([100.0, 130.0] * 50, True),  # noise, but no growth
    ],
)
def test_the_rule_for_memory(memory, is_flat):
    assert endure.flat(memory) is is_flat


def test_only_a_near_tie_excuses_another_token():
    want = torch.tensor([[3.0, 1.0], [1.0, 1.04], [2.0, 0.0]])
    answer = lambda logits: Generation(logits.argmax(-1).tolist(), logits, 0)  # noqa: E731
    near, wide = want.clone(), want.clone()
    near[1], near[2], wide[0] = torch.tensor([1.04, 1.0]), torch.tensor([0.0, 9.0]), torch.tensor([1.0, 3.0])
    assert endure.equal_by_margin(answer(want), answer(want)) == (True, False, 0.0)
    assert endure.equal_by_margin(answer(near), answer(want)) == (True, True, 0.04)
    assert endure.equal_by_margin(answer(wide), answer(want)) == (False, False, 2.0)
    assert endure.equal_exactly(answer(near), answer(want))[0] is False
    assert endure.equal_exactly(answer(want), answer(want))[0] is True
