"""What a failed check says: the case, ten numbers of what was expected and of what came, and where the two part.

`same` and `near` raise AssertionError with such a report; `near` points at the first number that is wrong, not at one
that rounding moved.

It does not: know any exercise (exercises.py, kernel_exercises.py).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dcp_fix.base.equality import close

AROUND = 10  # numbers that a report shows
ULPS = 16  # room for another order of the same fp32 operations


def same(what: str, expected: Any, yours: Any) -> None:
    """Raise AssertionError with a report unless both are equal: numbers, lists or tensors, by value."""
    compare(what, expected, yours, lambda a, b: bool(a == b))


def near(what: str, expected: Tensor, yours: Any) -> None:
    """The same for floats that may differ by a few units in the last place; infinities and NaN must be alike."""
    compare(what, expected, yours, lambda a, b: close(a, b, ULPS, floor=1.0))


def compare(what: str, expected: Any, yours: Any, equal: Callable[[Any, Any], bool]) -> None:
    """Raise AssertionError with a report unless kind and shape agree and each number is `equal` to its fellow."""
    if kind(expected) != kind(yours):
        raise AssertionError(report(what, expected, yours))
    pairs = enumerate(zip(flat(expected), flat(yours), strict=True))
    wrong = next((place for place, (a, b) in pairs if not equal(a, b)), None)
    if wrong is not None:
        raise AssertionError(report(what, expected, yours, wrong))


def kind(value: Any) -> Any:
    """What must agree before any number is looked at."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return len(value) if isinstance(value, list) else None


def flat(value: Any) -> list:
    """The numbers of a tensor in a row, of a list, or the one that there is."""
    if isinstance(value, Tensor):
        return list(value.flatten())
    return value if isinstance(value, list) else [value]


def report(what: str, expected: Any, yours: Any, wrong: int | None = None) -> str:
    """What a failed case says: expected and yours, ten numbers around number `wrong`, counted in a row."""
    if wrong is None or kind(expected) is None:
        return f"{what}\n  expected  {shown(expected)}\n  yours     {shown(yours)}"
    first, count = max(0, wrong - AROUND // 2), len(flat(expected))
    window = slice(first, first + AROUND)
    lines = [f"  {name:9} {shown(flat(x)[window])}" for name, x in (("expected", expected), ("yours", yours))]
    where: Any = wrong
    if isinstance(expected, Tensor):
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(wrong), expected.shape))
    cut = f" (numbers {first} to {min(first + AROUND, count) - 1} of {count})" if count > AROUND else ""
    return "\n".join([what, *lines, f"  first difference at index {where}{cut}"])


def shown(value: Any) -> str:
    """A value as a report prints it: floats short, and no more than ten numbers of a long list."""
    if isinstance(value, Tensor):
        value = value.flatten().tolist() if value.dim() else value.item()
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, list | tuple):
        parts = [shown(part) for part in value[:AROUND]] + ["..."] * (len(value) > AROUND)
        return ("[{}]" if isinstance(value, list) else "({})").format(", ".join(parts))
    return repr(value)


def done(exercise: str, cases: int) -> None:
    """The line of a check that passed."""
    print(f"{exercise}: all {cases} cases pass")
