"""The exercises' checks are two-sided: this package's own functions pass, each usual mistake fails with a report."""

import pytest
import torch

from dcp_fix import combine, ownership
from dcp_fix.learn import exercises, reports


def local_lengths(length, tokens, size, rank, interleave):
    return [ownership.local_length(n, size, rank, interleave) for n in range(length - tokens + 1, length + 1)]


def kernel(token, q, kv, slot_mapping, norm, q_out, kv_out, cache):
    q_out[token], kv_out[token] = norm(q[token]), norm(kv[token])
    if slot_mapping[token] >= 0:
        cache[slot_mapping[token]] = kv_out[token]


def pack(row):
    packed, counts = ownership.pack_valid(torch.tensor([row]))
    return packed[0].tolist(), int(counts[0])


def accumulator_bytes(tokens, heads, splits):
    return splits * tokens * heads * 513 * 4 if splits > 1 else 0


def chunk(heads, budget):
    return budget // (heads * 513 * 4)


SUMS, VALUES = [2.0, 8.0], [0.0, 10.0]
OBSERVED = {"A": 7.2330, "B": 8.0, "C": 8.8080}
BASES = {"A": exercises.NATURAL_AS_2, "B": exercises.RIGHT, "C": exercises.BASE_2_AS_NATURAL}


def test_the_right_answers_pass(capsys):
    exercises.check_ownership(ownership.owner, ownership.local_index)
    exercises.check_local_lengths(local_lengths)
    exercises.check_guards(kernel)
    exercises.check_holes(pack)
    exercises.check_merge(combine.merge_partials)
    exercises.check_empty_shards(combine.merge_partials)
    exercises.check_bases(BASES, SUMS, VALUES, OBSERVED)
    exercises.check_workspace(accumulator_bytes, chunk)
    assert capsys.readouterr().out.count(" cases pass\n") == 8


def skip_all(token, q, kv, slot_mapping, norm, q_out, kv_out, cache):
    if slot_mapping[token] >= 0:
        kernel(token, q, kv, slot_mapping, norm, q_out, kv_out, cache)


def skip_dense(token, q, kv, slot_mapping, norm, q_out, kv_out, cache):
    q_out[token] = norm(q[token])
    if slot_mapping[token] >= 0:
        kv_out[token] = cache[slot_mapping[token]] = norm(kv[token])


def write_always(token, q, kv, slot_mapping, norm, q_out, kv_out, cache):
    q_out[token], kv_out[token] = norm(q[token]), norm(kv[token])
    cache[slot_mapping[token]] = kv_out[token]


def plain_merge(out, lse):
    """The formula as one first writes it down."""
    top = lse.amax(0)
    weights = (lse - top).exp()
    return (weights[..., None] * out).sum(0) / weights.sum(0)[..., None], top + weights.sum(0).log()


def overflowing_merge(out, lse):
    weights = lse.exp()
    return (weights[..., None] * out).sum(0) / weights.sum(0)[..., None], weights.sum(0).log()


def average(out, lse):
    return out.mean(0), lse.logsumexp(0)


def cut(row):
    count = sum(i >= 0 for i in row)
    return row[:count] + [-1] * (len(row) - count), count


WRONG = {
    "owner without interleave": (exercises.check_ownership, lambda p, d, i: p % d, ownership.local_index),
    "local index without interleave": (exercises.check_ownership, ownership.owner, lambda p, d, i: p // d),
    "subtracting from a localised length": (
        exercises.check_local_lengths,
        lambda n, t, d, r, i: [ownership.local_length(n, d, r, i) - t + 1 + k for k in range(t)],
    ),
    "defect 1": (exercises.check_guards, skip_all),
    "defect 3": (exercises.check_guards, skip_dense),
    "no guard": (exercises.check_guards, write_always),
    "cutting a row at its count": (exercises.check_holes, cut),
    "average": (exercises.check_merge, average),
    "exp without the maximum": (exercises.check_merge, overflowing_merge),
    "no care for empty shards": (exercises.check_empty_shards, plain_merge),
    "a base mistaken": (exercises.check_bases, BASES | {"A": exercises.BASE_2_AS_NATURAL}, SUMS, VALUES, OBSERVED),
    "no answer": (exercises.check_bases, {}, SUMS, VALUES, OBSERVED),
    "accumulators that nothing needs": (exercises.check_workspace, lambda t, h, s: s * t * h * 513 * 4, chunk),
    "lse forgotten": (exercises.check_workspace, accumulator_bytes, lambda h, b: b // (h * 512 * 4)),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_each_mistake_fails_and_is_shown_beside_the_right_answer(mistake):
    check, *arguments = WRONG[mistake]
    with pytest.raises(AssertionError, match=r"(?s)expected .*yours "):
        check(*arguments)


def test_a_report_shows_ten_short_numbers_around_the_first_difference():
    yours = list(range(300))
    yours[150] = -1
    with pytest.raises(AssertionError, match=r"at index 150 \(numbers 145 to 154 of 300\)$") as raised:
        reports.same("a list", list(range(300)), yours)
    assert len(str(raised.value)) < 200
    with pytest.raises(AssertionError, match=r"expected  3\n  yours     None$"):
        reports.same("a number", 3, None)


def test_a_report_points_at_what_is_wrong_and_not_at_rounding():
    expected = torch.ones(2, 8)
    yours = expected + 2.0**-23
    reports.near("floats", expected, yours)
    yours[1, 3] = 1.5
    with pytest.raises(AssertionError, match=r"first difference at index \(1, 3\)"):
        reports.near("floats", expected, yours)


def test_the_numbers_of_the_base_exercise_are_those_of_float64():
    right = {exercises.RIGHT: 8.0, exercises.NATURAL_AS_2: 7.233, exercises.BASE_2_AS_NATURAL: 8.808}
    assert {name: round(value, 4) for name, value in exercises.base_outputs(SUMS, VALUES).items()} == right
