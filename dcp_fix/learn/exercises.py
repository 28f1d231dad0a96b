"""The checks of notebooks/90_exercises: each runs your function beside this package's own and reports where they part.

    check_ownership      owner and local index of a position
    check_local_lengths  keys that each of several query tokens sees on a rank
    check_guards         one program of the fused kernel: which effects run when the slot is negative
    check_holes          packing a top-k row whose holes lie anywhere
    check_merge          the LSE merge of partial attention
    check_empty_shards   the same merge where a shard holds no key, however a kernel marks that
    check_bases          which LSE bases explain three observed outputs
    check_workspace      bytes of the split-KV accumulators, and the chunk that fits a budget

A check prints one line if all its cases pass. Otherwise it raises AssertionError with a report (reports.py). The
notebook and the test suite call the same checks.

It does not: hold any solution. Those are the functions of this package, and the marked cells of the notebook.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dcp_fix import combine, ownership, workspace
from dcp_fix.engine.model import rms_norm
from dcp_fix.learn.reports import done, near, same

DEALS = [(size, interleave) for size in (1, 2, 4, 8) for interleave in (1, 4, 64)]
EPS = 1e-5
RIGHT, NATURAL_AS_2, BASE_2_AS_NATURAL = "right", "natural read as base 2", "base 2 read as natural"


# --- integers ---------------------------------------------------------------------------------------------------------


def check_ownership(owner: Callable, local_index: Callable) -> None:
    """`owner` and `local_index`, both (position, dcp_size, interleave) -> int, on every deal of positions 0 .. 299."""
    pairs = {"owner": (owner, ownership.owner), "local_index": (local_index, ownership.local_index)}
    for size, interleave in DEALS:
        for name, (theirs, own) in pairs.items():
            what = f"{name} of positions 0 .. 299, dcp_size={size}, interleave={interleave}"
            same(what, *([function(p, size, interleave) for p in range(300)] for function in (own, theirs)))
    done("ownership", 2 * len(DEALS))


def check_local_lengths(local_lengths: Callable) -> None:
    """`local_lengths(length, tokens, dcp_size, dcp_rank, interleave)` -> list: what the last `tokens` tokens see."""
    cases = [(10, 3, 2, 1), (10, 3, 2, 2), (10, 4, 4, 1), (7, 7, 8, 4), (300, 5, 4, 64)]
    for length, tokens, size, interleave in cases:
        for rank in range(size):
            seen = range(length - tokens + 1, length + 1)
            expected = [ownership.local_length(n, size, rank, interleave) for n in seen]
            what = f"last {tokens} of {length} tokens, rank {rank} of {size}, interleave {interleave}"
            same(what, expected, local_lengths(length, tokens, size, rank, interleave))
    done("local lengths", sum(size for _, _, size, _ in cases))


def check_holes(pack: Callable) -> None:
    """`pack(row)` -> (row with its valid ids first, order kept, then -1; how many are valid); rows are lists."""
    rows = [[-1, 2, -1, -1, 0, -1, 1, -1], [-1, -1, -1], [5, 4, 3], [9], [-1, -1, 0], [0, -1, -1]]
    for row in rows:
        packed, counts = ownership.pack_valid(torch.tensor([row]))
        same(f"row {row}", (packed[0].tolist(), int(counts[0])), pack(row))
    done("holes", len(rows))


# --- the fused kernel -------------------------------------------------------------------------------------------------


def check_guards(kernel: Callable) -> None:
    """`kernel(token, q, kv, slot_mapping, norm, q_out, kv_out, cache)` runs for one token and writes the outputs.

    Query row and KV row belong to every token, the cache row to tokens with a slot. The outputs come poisoned.
    """

    def every_token(q: Tensor, kv: Tensor, slots: Tensor, *outputs: Tensor) -> None:
        for token in range(len(slots)):
            kernel(token, q, kv, slots, norm, *outputs)

    done("guards", check_guarded_rows(every_token, 6, 8))


def check_guarded_rows(kernel: Callable, q_width: int, kv_width: int) -> int:
    """`kernel(q, kv, slots, q_out, kv_out, cache)` for four tokens; returns how many cases there were."""
    cases = [[0, 1, 2, 3], [0, -1, 1, -1], [-1, -1, -1, -1], [-1, -1, 5, -1]]
    for slots in cases:
        q, kv = seeded(4, q_width, seed=1), seeded(4, kv_width, seed=2)
        outputs = [torch.full(shape, math.nan) for shape in ((4, q_width), (4, kv_width), (7, kv_width))]
        kernel(q, kv, torch.tensor(slots), *outputs)
        cache = torch.full_like(outputs[2], math.nan)
        for token, slot in enumerate(slots):
            if slot >= 0:
                cache[slot] = norm(kv[token])
        for name, yours, expected in zip(("query", "KV", "cache"), outputs, (norm(q), norm(kv), cache), strict=True):
            where = f"slots {slots}: {name} rows"
            same(f"{where} that were written", rows_written(expected), rows_written(yours))
            near(where, expected.nan_to_num(7.0), yours.nan_to_num(7.0))
    return len(cases)


def norm(x: Tensor) -> Tensor:
    """RMSNorm of rows [..., n] with a weight of ones, as the exercise's kernel calls it."""
    return rms_norm(x, torch.ones(x.shape[-1]), EPS)


def rows_written(buffer: Tensor) -> list[bool]:
    """Which rows of a buffer that was filled with NaN hold something now."""
    return (~buffer.isnan()).any(-1).tolist()


def seeded(*shape: int, seed: int) -> Tensor:
    """Normal numbers, the same on every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- the combine ------------------------------------------------------------------------------------------------------


def partials(ranks: int, tokens: int, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """Partial attention of `ranks` shards that all hold keys: out [P, T, H, D], natural lse [P, T, H]."""
    return seeded(ranks, tokens, heads, width, seed=ranks), 3 * seeded(ranks, tokens, heads, seed=tokens + 10)


def check_merge(merge: Callable) -> None:
    """`merge(out [P, T, H, D], lse [P, T, H])` -> (out [T, H, D], lse [T, H]) where every shard holds keys."""
    shapes = [(1, 2, 3, 5), (2, 3, 2, 4), (4, 1, 5, 3), (8, 2, 3, 1)]
    for shape in shapes:
        compare_merge(f"{shape[0]} shards, T, H, D = {shape[1:]}", merge, *partials(*shape))
    out, lse = partials(2, 3, 2, 4)
    compare_merge("lse around 1000, where a plain exp overflows", merge, out, lse + 1000)
    done("merge", len(shapes) + 1)


def check_empty_shards(merge: Callable) -> None:
    """The same merge with shards that hold no key: marked -inf or +inf, with anything in their output."""
    inf, nan, ln2 = math.inf, math.nan, math.log(2)
    cases = {
        "seven empty shards beside a real one": ([3.0] + [0.0] * 7, [ln2] + [-inf] * 7),
        "the empty shard's output is NaN": ([nan, 3.0], [-inf, ln2]),
        "the empty shard's output is inf": ([inf, 3.0], [-inf, ln2]),
        "no key marked +inf, as FlashMLA does": ([nan, 3.0], [inf, ln2]),
        "the shard without a key comes last": ([3.0, nan], [ln2, inf]),
        "every shard empty": ([nan, 7.0], [-inf, -inf]),
        "every shard empty, marked +inf": ([nan, nan], [inf, inf]),
    }
    for what, (outs, lses) in cases.items():
        compare_merge(what, merge, torch.tensor(outs).view(-1, 1, 1, 1), torch.tensor(lses).view(-1, 1, 1))
    out, lse = partials(2, 3, 2, 4)
    lse[:, 1], out[:, 1] = -inf, nan
    compare_merge("one row of three without a key on any shard", merge, out, lse)
    done("empty shards", len(cases) + 1)


def compare_merge(what: str, merge: Callable, out: Tensor, lse: Tensor) -> None:
    """One merge beside this package's own."""
    expected, yours = combine.merge_partials(out, lse), merge(out.clone(), lse.clone())
    for name, want, got in zip(("out", "lse"), expected, yours, strict=True):
        empty = torch.isneginf(want)
        same(f"{what}: {name}, where it is -inf", empty, torch.isneginf(got))
        near(f"{what}: {name}", want.masked_fill(empty, 0.0), got.masked_fill(empty, 0.0))


def base_outputs(sums: list[float], values: list[float]) -> dict[str, float]:
    """The merged output of shards with exponential sums `sums`: right, and under the two ways to mistake the base."""
    lse = torch.tensor(sums, dtype=torch.float64).log()
    misread = {RIGHT: lse, NATURAL_AS_2: lse * math.log(2), BASE_2_AS_NATURAL: lse / math.log(2)}
    out = torch.tensor(values, dtype=torch.float64)
    return {name: float((wrong.softmax(0) * out).sum()) for name, wrong in misread.items()}


def check_bases(answers: dict[str, str], sums: list[float], values: list[float], observed: dict[str, float]) -> None:
    """`answers` says of each observed run how its lse was read: one of RIGHT, NATURAL_AS_2, BASE_2_AS_NATURAL."""
    outputs = base_outputs(sums, values)
    for run, value in observed.items():
        expected = min(outputs, key=lambda name: abs(outputs[name] - value))
        same(f"run {run}, which printed {value}", expected, answers.get(run))
    done("bases", len(observed))


# --- the workspace ----------------------------------------------------------------------------------------------------


def check_workspace(accumulator_bytes: Callable, chunk: Callable) -> None:
    """`accumulator_bytes(tokens, heads, splits)` and `chunk(heads, budget)`: the most tokens whose result fits.

    Nothing is accumulated where splits is 1. A chunk's result is its fp32 out [512] and lse per token and head.
    """
    sizes = [(1, 64, 132), (132, 64, 1), (8192, 64, 1), (33, 128, 2), (7, 64, 18)]
    for tokens, heads, splits in sizes:
        accumulators = splits if splits > 1 else 0
        plan = workspace.Plan(tokens, heads, 2048, splits, tokens, accumulators)
        what = f"accumulator bytes of {tokens} tokens, {heads} heads, {splits} splits"
        same(what, plan.accumulator_bytes, accumulator_bytes(tokens, heads, splits))
    budgets = [(64, 1 << 30), (128, 1 << 20), (64, 64 * 513 * 4), (16, 10**6)]
    for heads, budget in budgets:
        expected = budget // workspace.partial_bytes(heads)
        same(f"tokens of {heads} heads that fit {budget} bytes", expected, chunk(heads, budget))
    done("workspace", len(sizes) + len(budgets))
