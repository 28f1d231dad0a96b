"""What a failed check says: the case, ten numbers of what was expected and of what came, and where the two part.

Floats are short, with as many digits as it takes to see that two of them differ. `same` and `near` raise AssertionError
with such a report, and `near` points at the first number that is wrong, not at one that rounding moved.

It does not: know any exercise (exercises.py, kernel_exercises.py).
"""

import torch
from torch import Tensor

from dcp_fix.base.equality import close, first_difference, same_bytes

AROUND = 10  # numbers that a report shows
ULPS = 16  # room for another order of the same fp32 operations


def report(what: str, expected, yours, where=None) -> str:
    """What a failed case says: expected and yours, ten numbers around `where`, by default the first difference."""
    where = parting(expected, yours) if where is None else where
    if where is None:
        return f"{what}\n  expected  {shown(expected)}\n  yours     {shown(yours)}"
    (a, place), (b, _) = flat(expected, where), flat(yours, where)
    first = max(0, place - AROUND // 2)
    window, digits = slice(first, first + AROUND), telling_digits(a[place : place + 1], b[place : place + 1])
    lines = [f"  {name:9} {shown(part[window], digits)}" for name, part in (("expected", a), ("yours", b))]
    cut = f" (numbers {first} to {min(first + AROUND, len(a)) - 1} of {len(a)})" if len(a) > AROUND else ""
    return "\n".join([what, *lines, f"  first difference at index {where}{cut}"])


def flat(value, where) -> tuple[list, int]:
    """The numbers of a list or tensor in a row, and where in that row the index `where` lies."""
    if isinstance(value, Tensor):
        index = where if isinstance(where, tuple) else (where,)
        place = sum(i * stride for i, stride in zip(index, value.contiguous().stride(), strict=True))
        return value.flatten().tolist(), place
    return value, where


def shown(value, digits: int = 4) -> str:
    """A value as a failure report prints it: floats short, and no more than ten numbers of a long list."""
    if isinstance(value, Tensor):
        value = value.flatten().tolist()
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    if isinstance(value, list | tuple):
        parts = [shown(part, digits) for part in value[:AROUND]] + ["..."] * (len(value) > AROUND)
        return ("[{}]" if isinstance(value, list) else "({})").format(", ".join(parts))
    return repr(value)


def telling_digits(a: list, b: list) -> int:
    """How many digits it takes to see that two numbers differ: four if that is enough."""
    return next((digits for digits in range(4, 9) if shown(a, digits) != shown(b, digits)), 9)


def parting(expected, yours):
    """The first index at which two tensors of one shape, or two lists, differ; None where there is no index to name."""
    if isinstance(expected, Tensor) and isinstance(yours, Tensor) and expected.shape == yours.shape:
        return first_difference(expected, yours.to(expected.dtype))
    if isinstance(expected, list) and isinstance(yours, list):
        return first_difference(expected, yours)
    return None


def same(what: str, expected, yours) -> None:
    """Raise AssertionError with a report unless both are equal: lists and numbers by value, tensors bit for bit."""
    if isinstance(expected, Tensor):
        equal = isinstance(yours, Tensor) and same_bytes(expected, yours)
    else:
        equal = expected == yours
    if not equal:
        raise AssertionError(report(what, expected, yours))


def near(what: str, expected: Tensor, yours) -> None:
    """The same for floats that may differ by a few units in the last place; infinities and NaN must be alike."""
    alike = isinstance(yours, Tensor) and yours.shape == expected.shape and yours.dtype == expected.dtype
    if not alike:
        raise AssertionError(report(what, expected, yours))
    far = [not close(a, b, ULPS, floor=1.0) for a, b in zip(expected.flatten(), yours.flatten(), strict=True)]
    if any(far):
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(far.index(True)), expected.shape))
        raise AssertionError(report(what, expected, yours, where))


def done(exercise: str, cases: int) -> None:
    """The line of a check that passed."""
    print(f"{exercise}: all {cases} cases pass")
