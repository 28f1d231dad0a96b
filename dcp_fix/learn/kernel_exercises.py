"""The checks of the two exercises on Triton kernels: each launches your kernel beside this package's reference.

    check_guard_kernel   one program per token: query row, KV row, cache row, each under its own guard
    check_merge_kernel   one program per row: two partials (out, lse) become one

Both run under Triton's interpreter, on a CPU, in fp32: set TRITON_INTERPRET=1 before triton is imported. A check raises
AssertionError with the report of reports.py, also where the kernel itself raises.

It does not: time anything, or hold a solution.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dcp_fix import combine
from dcp_fix.learn.exercises import EPS, norm, rows_written, seeded
from dcp_fix.learn.reports import done, near, same

WIDTH = 64  # numbers of a row: one block of a program


def check_guard_kernel(kernel: Callable) -> None:
    """`kernel[(T,)](q, kv, slot_mapping, q_out, kv_out, cache, eps, WIDTH=...)`: rows of WIDTH fp32, int64 slots [T].

    The outputs come filled with NaN. Rows are compared by value, not only by whether they were written.
    """
    cases = [[0, 1, 2, 3], [0, -1, 1, -1], [-1, -1, -1, -1], [-1, -1, 5, -1]]
    for slots in cases:
        q, kv = seeded(4, WIDTH, seed=1), seeded(4, WIDTH, seed=2)
        q_out, kv_out, cache = (torch.full((rows, WIDTH), math.nan) for rows in (4, 4, 7))
        launch(kernel, 4, q, kv, torch.tensor(slots), q_out, kv_out, cache, EPS)
        written = torch.full_like(cache, math.nan)
        for token, slot in enumerate(slots):
            if slot >= 0:
                written[slot] = norm(kv[token])
        for name, yours, expected in (("query", q_out, norm(q)), ("KV", kv_out, norm(kv)), ("cache", cache, written)):
            where = f"slots {slots}: {name} rows"
            same(f"{where} that were written", rows_written(expected), rows_written(yours))
            near(where, expected.nan_to_num(7.0), yours.nan_to_num(7.0))
    done("guard kernel", len(cases))


def check_merge_kernel(kernel: Callable) -> None:
    """`kernel[(R,)](out_a, lse_a, out_b, lse_b, out, lse, WIDTH=...)`: out fp32 [R, WIDTH], natural lse fp32 [R].

    A side without a key has lse -inf and out 0; two such sides give the same again.
    """
    inf = math.inf
    cases = {
        "both sides hold keys": ([0.5, -1.0, 3.0], [0.0, 2.0, 3.0]),
        "lse around 1000, where a plain exp overflows": ([1000.0, 999.0, 1001.0], [1000.5, 1002.0, 990.0]),
        "one side without a key": ([-inf, 1.0, -inf], [2.0, -inf, 0.0]),
        "neither side has a key": ([-inf, -inf, 1.0], [-inf, -inf, 1.0]),
    }
    for what, (lse_a, lse_b) in cases.items():
        lses = torch.tensor([lse_a, lse_b])
        outs = torch.where(torch.isneginf(lses)[..., None], 0.0, seeded(2, 3, WIDTH, seed=6))
        out, lse = torch.full((3, WIDTH), math.nan), torch.full((3,), math.nan)
        launch(kernel, 3, outs[0], lses[0], outs[1], lses[1], out, lse)
        expected = combine.merge_partials(outs[:, :, None], lses[:, :, None])
        near(f"{what}: out", expected[0][:, 0], out)
        empty = torch.isneginf(expected[1][:, 0])
        same(f"{what}: lse, where it is -inf", empty, torch.isneginf(lse))
        near(f"{what}: lse", expected[1][:, 0].masked_fill(empty, 0.0), lse.masked_fill(empty, 0.0))
    done("merge kernel", len(cases))


def launch(kernel: Callable, programs: int, *arguments: Tensor | float) -> None:
    """Run a kernel, one program per row. Raises AssertionError where the kernel raises, with what it said."""
    try:
        kernel[(programs,)](*arguments, WIDTH=WIDTH)
    except Exception as error:  # whatever a learner's kernel raises is the result
        cause = error.__cause__ or error
        raise AssertionError(f"the kernel raised {type(cause).__name__}: {cause}") from error
