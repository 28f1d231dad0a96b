"""The texts that the checkpoint learned from: lessons over facts, and the drills that come before them.

    repeats    random words over and over             what followed this word before?
    strided    the same with fixed words between      ... the separators aside?
    pairs      pairs in ever new orders               which Y belongs to this X?
    lesson     facts among filler, then questions     what does this key open?

Each text comes with how much every token of it counts as a target. No text shows a held-out pair of key and place.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from dcp_fix.tiny.corpus import (
    BOS,
    FRAME,
    QUESTION_TOKENS,
    SHORTEST,
    WORD_IDS,
    context,
    draw_facts,
    encode,
    filler,
)  # fmt: skip


def lesson(rng: Random, tokens: int, count: int) -> tuple[list[int], list[float]]:
    """A training text of `tokens` tokens over `count` facts: context, then answered questions, up to eight of them.

    Three texts in ten go on with filler, so that a position tells nothing about whether an answer ends there. Returns
    the ids and how much each counts as a target: looked-up words and the end 6, the key 3, the rest of an answer 1, all
    else 0.3.
    """
    facts = draw_facts(rng, count)
    room = tokens - 1 - 2 * SHORTEST - sum(len(fact.words()) for fact in facts)
    tail, weights = [], []
    for fact in rng.sample(facts, rng.randint(1, min(count, 8, room // QUESTION_TOKENS))):
        marks = {fact.key: 3.0, fact.place: 6.0, fact.colour: 6.0, fact.room: 6.0, "<end>": 6.0}
        answer = [*fact.words(), "<end>"]
        tail += fact.question() + answer
        weights += [0.3] * len(fact.question()) + [marks.get(word, 1.0) for word in answer]
    spare = room + SHORTEST - len(tail)
    after = filler(rng, rng.randint(SHORTEST, spare)) if rng.random() < 0.3 else []
    tail += [word for line in after for word in line]
    before = tokens - len(tail)
    return encode(context(rng, facts, before) + tail), ([0.3] * before + weights + [0.3] * tokens)[:tokens]


def repeats(rng: Random, tokens: int) -> tuple[list[int], list[float]]:
    """Random words over and over, with a period that differs from text to text: what followed this word before?"""
    words = rng.sample(WORD_IDS, rng.randint(4, min(tokens // 2, 60)))
    return _cycled(words, len(words), [3.0], tokens)


def strided(rng: Random, tokens: int) -> tuple[list[int], list[float]]:
    """The same with 0 to 3 fixed words after every word: what followed this word, the separators aside?"""
    separators = rng.choices(range(len(FRAME)), k=rng.randint(0, 3))
    stride = 1 + len(separators)
    words = rng.sample(WORD_IDS, rng.randint(4, min(tokens // (2 * stride), 60)))
    return _cycled(
        [i for word in words for i in (word, *separators)], len(words) * stride, [3.0] + [0.1] * len(separators), tokens
    )


def pairs(rng: Random, tokens: int) -> tuple[list[int], list[float]]:
    """Pairs "X sep sep Y sep sep", said again in ever new orders: which Y belongs to this X?"""
    separators = rng.choices(range(len(FRAME)), k=rng.randint(0, 3))
    length = 2 * (1 + len(separators))
    words = rng.sample(WORD_IDS, 2 * rng.randint(2, max(2, min(tokens // (2 * length), 24))))
    known = [[x, *separators, y, *separators] for x, y in zip(words[0::2], words[1::2], strict=True)]
    ids = [BOS, *(i for pair in known for i in pair)]
    weights = [0.1] * len(ids)
    while len(ids) < tokens:
        ids += [i for pair in rng.sample(known, len(known)) for i in pair]
        weights += ([0.1] * (length // 2) + [3.0] + [0.1] * len(separators)) * len(known)
    return ids[:tokens], weights[:tokens]


def _cycled(ids: list[int], period: int, marks: list[float], tokens: int) -> tuple[list[int], list[float]]:
    """A begin token, then `ids` over and over; from the second time on a token counts as its place in `marks` says."""
    turns = -(-tokens // period)
    weights = [0.1] * (1 + period) + marks * (period // len(marks) * turns)
    return ([BOS] + ids * turns)[:tokens], weights[:tokens]


def texts(seed: str, kind: str, tokens: int, facts: tuple[int, int]) -> Iterator[tuple[list[int], list[float]]]:
    """An endless stream of training texts of one kind: `repeats`, `strided`, `pairs` or `facts` (with 8 % pairs among
    them).
    """
    rng = Random(f"train {seed}")
    drills = {"repeats": repeats, "strided": strided, "pairs": pairs, "facts": pairs}
    while True:
        if kind == "facts" and rng.random() > 0.08:
            yield lesson(rng, tokens, rng.randint(*facts))
        else:
            yield drills[kind](rng, tokens)
