"""The checks of the Triton exercises are two-sided: a right kernel passes, each usual mistake fails with a report."""

import pytest

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from dcp_fix.learn import kernel_exercises  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy, which warns


@triton.jit
def norm_of(row, eps, WIDTH: tl.constexpr):
    return row / tl.sqrt(tl.sum(row * row, axis=0) / WIDTH + eps)


@triton.jit
def guarded(q, kv, slot_mapping, q_out, kv_out, cache, eps, WIDTH: tl.constexpr, GUARD: tl.constexpr):
    """GUARD: 0 every effect its own, 1 the whole token, 2 the KV row as well, 3 none, 4 a row that is not normed."""
    token, column = tl.program_id(0), tl.arange(0, WIDTH)
    slot = tl.load(slot_mapping + token)
    row = norm_of(tl.load(kv + token * WIDTH + column), eps, WIDTH)
    if slot >= 0 or GUARD != 1:
        tl.store(q_out + token * WIDTH + column, norm_of(tl.load(q + token * WIDTH + column), eps, WIDTH))
        if slot >= 0 or GUARD != 2:
            tl.store(kv_out + token * WIDTH + column, row)
    if slot >= 0 or GUARD == 3:
        row = tl.load(kv + token * WIDTH + column) if GUARD == 4 else row
        tl.store(cache + tl.maximum(slot, 0) * WIDTH + column, row)


@triton.jit
def merging(out_a, lse_a, out_b, lse_b, out, lse, WIDTH: tl.constexpr, CARE: tl.constexpr):
    """CARE: 2 all of it, 1 nothing for empty sides, 0 no maximum either, -1 a plain average."""
    row, column = tl.program_id(0), tl.arange(0, WIDTH)
    a, b = tl.load(lse_a + row), tl.load(lse_b + row)
    top = tl.maximum(a, b) if CARE > 0 else a * 0.0
    less = tl.where(top == float("-inf"), 0.0, top) if CARE > 1 else top
    weight_a, weight_b = tl.exp(a - less), tl.exp(b - less)
    if CARE == -1:
        weight_a, weight_b = weight_a * 0.0 + 1.0, weight_b * 0.0 + 1.0
    total = weight_a + weight_b
    share = tl.where(total > 0, total, 1.0) if CARE > 1 else total
    x_a, x_b = tl.load(out_a + row * WIDTH + column), tl.load(out_b + row * WIDTH + column)
    tl.store(out + row * WIDTH + column, (weight_a * x_a + weight_b * x_b) / share)
    tl.store(lse + row, top + tl.log(total))


class With:
    """A kernel with one more constant."""

    def __init__(self, kernel, **constants):
        self.kernel, self.constants = kernel, constants

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.kernel[grid](*arguments, **options, **self.constants)


def test_right_kernels_pass(capsys):
    kernel_exercises.check_guard_kernel(With(guarded, GUARD=0))
    kernel_exercises.check_merge_kernel(With(merging, CARE=2))
    assert capsys.readouterr().out.count(" cases pass\n") == 2


@pytest.mark.parametrize("guard", [1, 2, 3, 4])
def test_a_misplaced_guard_or_a_wrong_value_fails(guard):
    with pytest.raises(AssertionError, match=r"(?s)slots .*expected .*yours "):
        kernel_exercises.check_guard_kernel(With(guarded, GUARD=guard))


@pytest.mark.parametrize("care", [1, 0, -1])
def test_a_careless_merge_fails(care):
    with pytest.raises(AssertionError, match=r"(?s)expected .*yours "):
        kernel_exercises.check_merge_kernel(With(merging, CARE=care))


def test_what_a_kernel_raises_is_said():
    def stub(*arguments, **options):
        raise NotImplementedError("your lines")

    class Stub:
        def __getitem__(self, grid):
            return stub

    with pytest.raises(AssertionError, match="the kernel raised NotImplementedError: your lines"):
        kernel_exercises.check_merge_kernel(Stub())
