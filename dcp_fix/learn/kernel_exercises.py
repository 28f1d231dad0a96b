"""The checks of the two exercises on Triton kernels: each launches your kernel where exercises.py calls a function.

    check_guard_kernel   one program per token: query row, KV row, cache row, each under its own guard
    check_merge_kernel   one program per row: two partials (out, lse) become one

Both run under Triton's interpreter, on a CPU, in fp32: set TRITON_INTERPRET=1 before triton is imported. A check raises
AssertionError with the report of reports.py, also where the kernel itself raises.

It does not: time anything, or hold a solution.
"""

import math
from typing import Any

import torch
from torch import Tensor

from dcp_fix.learn.exercises import EPS, check_guarded_rows, compare_merge, seeded
from dcp_fix.learn.reports import done

WIDTH = 64  # numbers of a row: one block of a program


def check_guard_kernel(kernel: Any) -> None:
    """`kernel[(T,)](q, kv, slot_mapping, q_out, kv_out, cache, eps, WIDTH=...)`: rows of WIDTH fp32, int64 slots [T].

    The outputs come filled with NaN. Rows are compared by value, not only by whether they were written.
    """
    cases = check_guarded_rows(lambda *tensors: launch(kernel, 4, *tensors, EPS), WIDTH, WIDTH)
    done("guard kernel", cases)


def check_merge_kernel(kernel: Any) -> None:
    """`kernel[(R,)](out_a, lse_a, out_b, lse_b, out, lse, WIDTH=...)`: out fp32 [R, WIDTH], natural lse fp32 [R].

    A side without a key has lse -inf and out 0; two such sides give the same again.
    """

    def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.full((3, 1, WIDTH), math.nan), torch.full((3, 1), math.nan)
        launch(kernel, 3, outs[0], lses[0], outs[1], lses[1], out, lse)
        return out, lse

    inf = math.inf
    cases = {
        "both sides hold keys": ([0.5, -1.0, 3.0], [0.0, 2.0, 3.0]),
        "lse around 1000, where a plain exp overflows": ([1000.0, 999.0, 1001.0], [1000.5, 1002.0, 990.0]),
        "one side without a key": ([-inf, 1.0, -inf], [2.0, -inf, 0.0]),
        "neither side has a key": ([-inf, -inf, 1.0], [-inf, -inf, 1.0]),
    }
    for what, sides in cases.items():
        lses = torch.tensor(sides)[..., None]  # [2, 3, 1]
        outs = torch.where(torch.isneginf(lses)[..., None], 0.0, seeded(2, 3, 1, WIDTH, seed=6))
        compare_merge(what, merge, outs, lses)
    done("merge kernel", len(cases))


def launch(kernel: Any, programs: int, *arguments: Tensor | float) -> None:
    """Run a kernel, one program per row. Raises AssertionError where the kernel raises, with what it said."""
    try:
        kernel[(programs,)](*arguments, WIDTH=WIDTH)
    except Exception as error:  # whatever a learner's kernel raises is the result
        cause = error.__cause__ or error
        raise AssertionError(f"the kernel raised {type(cause).__name__}: {cause}") from error
