"""Our kernels beside those that ship: right first, then how long each takes, and how far that is from the floor.

    dcp-fix bench kernels --against site-packages --record FILE        on a GPU

Three works, in the sizes of GLM-5.2 (kernel_cases.py): fused norm and RoPE, the local parts of the combine, the sparse
partial. Every contender first computes from fresh random inputs into memory that holds NaN (torch fills what it
allocates), and must lie within the stated distance of an fp64 reference, or nothing is timed. A time is one replay of a
CUDA graph that holds calls for each of several sets of inputs, so that small works do not read what the last call left
in the L2 cache only, and not the start of a graph is timed; the median and the quartiles of REPEATS replays.

    floor    bytes that must move, each once, over the bandwidth of a device-to-device copy, or multiplications over the
             rate of a large bf16 product, whichever is longer; both rates are measured first

It does not: measure a wire or a model (exact_cost.py has the step), or time what is wrong.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dcp_fix.base.errors import UserError
from dcp_fix.bench.costs import REPEATS, replays
from dcp_fix.bench.kernel_cases import WORKS, KernelCase
from dcp_fix.bench.upstream import Pieces
from dcp_fix.records.records import deliver_record

CALLS = 32  # in one replay, or starting a graph is what is timed
LONG_US = 20.0  # a work whose floor is that long is called once for each set of inputs
LAUNCHES, WARM_UP = 300, 30  # from Python
COPY_BYTES, PRODUCT = 1 << 32, 8192  # of the two ceilings


@dataclass(frozen=True)
class KernelTime:
    """One contender at one size. Times in microseconds; `error` and `allowed` as the case says."""

    work: str
    sizes: dict
    contender: str
    error: float
    allowed: float
    us: float
    low: float
    high: float
    floor_us: float


@dataclass(frozen=True)
class Ceilings:
    """What this GPU reaches: bytes per second of a copy, read and written, and bf16 operations per second."""

    bytes: float
    flops: float

    def floor_us(self, case: KernelCase) -> float:
        return round(1e6 * max(case.bytes / self.bytes, case.flops / self.flops), 3)


def ceilings() -> Ceilings:
    """Measured here and now, by medians."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    copy = statistics.median(replays(lambda: target.copy_(source)))  # an elementwise kernel reaches three quarters
    a, b = (torch.randn(PRODUCT, PRODUCT, device="cuda").bfloat16() for _ in range(2))
    product = statistics.median(replays(lambda: a @ b))
    return Ceilings(2 * COPY_BYTES / copy * 1e3, 2 * PRODUCT**3 / product * 1e3)


@torch.inference_mode()
def measure(case: KernelCase, limits: Ceilings, repeats: int = REPEATS) -> Iterable[KernelTime]:
    """A row for each contender. Raises UserError for one that is wrong."""
    for name, call in case.contenders.items():
        with poisoned():
            result = call(0)
        error = case.error(result)
        if not error <= case.allowed:  # NaN included
            raise UserError(
                f"{case.work} {case.sizes}: {name} is {error:.2e} from the fp64 reference, {case.allowed:.2e} is "
                "allowed; wrong results are not timed"
            )
        low, us, high = (round(x, 3) for x in statistics.quantiles(timed(case, call, limits, repeats), n=4))
        floor = 0.0 if case.host else limits.floor_us(case)
        yield KernelTime(case.work, case.sizes, name, error, case.allowed, us, low, high, floor)


def timed(case: KernelCase, call: Callable, limits: Ceilings, repeats: int) -> list[float]:
    """Microseconds of a call, several times: on the host or by replays."""
    if case.host:
        return launches(lambda: call(0))
    again = 1 if limits.floor_us(case) > LONG_US else -(-CALLS // case.sets)
    sets = list(range(case.sets)) * again
    return [1e3 * ms / len(sets) for ms in replays(lambda: [call(i) for i in sets], repeats)]


@contextmanager
def poisoned():
    """Whatever is allocated uninitialised holds NaN, or the largest integer."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]


def launches(call: Callable) -> list[float]:
    """Microseconds of the host for each of LAUNCHES calls, the device idle before it."""
    times = []
    for _ in range(LAUNCHES + WARM_UP):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - began))
    return times[WARM_UP:]


def table(rows: list[KernelTime]) -> Table:
    """A line per contender: time, spread, of the floor, and how much of the first upstream contender's time it is."""
    grid = Table()
    for name in ("work", "sizes", "contender", "us", "quartiles", "of floor", "x upstream", "error"):
        grid.add_column(name, no_wrap=True, justify="left" if name in ("work", "sizes", "contender") else "right")
    for row in rows:
        base = baseline(rows, row)
        sizes = " ".join(f"{key}={value}" for key, value in row.sizes.items())
        share = f"{row.floor_us / row.us:.0%}", "" if base is None else f"{row.us / base.us:.2f}"
        grid.add_row(
            row.work, sizes, row.contender, f"{row.us:.1f}", f"{row.low:.1f}-{row.high:.1f}", *share, f"{row.error:.1e}"
        )
    return grid


def baseline(rows: list[KernelTime], row: KernelTime) -> KernelTime | None:
    """The first contender of upstream at this size."""
    same = (other for other in rows if (other.work, other.sizes) == (row.work, row.sizes))
    return next((other for other in same if other.contender.startswith("upstream")), None)


def main(works: tuple[str, ...], against: Path | None, record_path: Path | None) -> int:
    """Measure, write the record, print a table; 0. Raises UserError without a GPU or for unknown works."""
    if not torch.cuda.is_available():
        raise UserError("bench kernels times CUDA kernels, and there is no GPU here")
    if unknown := set(works) - WORKS.keys():
        raise UserError(f"no work {', '.join(sorted(unknown))}; choose from {', '.join(WORKS)}")
    pieces, limits = Pieces(against) if against else None, ceilings()
    rows: list = []
    for work in works:
        for make in track(WORKS[work], work, console=Console(stderr=True)):
            rows += measure(make(torch.device("cuda"), pieces), limits)
    results = {
        "kernels": [asdict(row) for row in rows],
        "ceilings": asdict(limits),
        "upstream": pieces and f"vLLM {pieces.version}",
    }
    deliver_record(record_path, lambda: results, Console(highlight=False, width=140).print, table(rows))
    return 0
