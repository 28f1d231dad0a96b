"""What exact mode costs: one rank's share of a layer's decode attention, ordinary and exact, side by side.

    dcp-fix bench exact --record FILE    on a GPU;  --device cpu runs the same code with sizes to match

A step is what the engine does between absorbed queries and attention output: query gather, own slots of the selected
ids, partial attention, combine. T requests of `context` tokens decode one token each, and every request has a cache of
its own, so none reads rows that another request has warmed; but replays repeat, and what a small batch reads stays in
the L2 cache of a GPU. The rank is alone on its device and a Mirror stands in for the group: what would arrive from the
others is a copy of what this rank sends. So times hold all computation and local copies, but no wire; `bytes` is what
one rank sends. On a GPU the step is replayed as a CUDA graph, as real decoding does. Sizes of GLM-5.2: 64 heads over
TP4, 2048 selected keys, fp8_ds_mla.

It does not: measure a network, a whole model or another system's kernels.
"""

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dcp_fix import exact, workspace
from dcp_fix.attention import sparse_partial
from dcp_fix.base.errors import UserError
from dcp_fix.bench import costs
from dcp_fix.combine import CombineManager, attend_routed
from dcp_fix.engine import exact_attention
from dcp_fix.engine.engine import resolve_device
from dcp_fix.engine.shard import check_dcp
from dcp_fix.kv_cache import BLOCK, LATENT, ROPE, new_latent_cache, write_latent
from dcp_fix.ownership import local_class, local_length, localise
from dcp_fix.ranks.group import Group
from dcp_fix.records.records import deliver_record

FORMAT = "fp8_ds_mla"
SCALE = 192**-0.5  # of GLM-5.2's heads: 128 + 64
REPEATS = 20
WIDTH = 160  # of the table where no terminal says otherwise: no number is cut


@dataclass(frozen=True)
class Size:
    """One measurement: T tokens of requests of `context` tokens, h = heads of a rank, D and C (0: ordinary)."""

    tokens: int
    context: int
    heads: int
    topk: int
    dcp: int
    method: str
    classes: int = 0


@dataclass(frozen=True)
class Result:
    """Median milliseconds of the partial attention and of the whole step; bytes that one rank sends in a step."""

    size: Size
    attend_ms: float
    step_ms: float
    bytes: int

    def as_json(self) -> dict:
        """One flat object."""
        return asdict(self.size) | {"attend_ms": self.attend_ms, "step_ms": self.step_ms, "bytes": self.bytes}


class Mirror(Group):
    """Rank 0 of `size` whose peers send what it sends; counts the bytes that would leave this rank."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size, self.sent = size, 0

    def _exchange(self, op, x, read):
        copies = self.size if op.startswith("all_gather") else 1  # else x holds a piece for each rank
        self.sent += x.nbytes * copies * (self.size - 1) // self.size
        return read([x] * self.size)


def methods(dcp: int) -> list[tuple[str, int]]:
    """(combine, classes): both ordinary ways, then exact with as few classes as D allows and with the default."""
    return [("ag_rs", 0), ("a2a", 0), *(("exact", classes) for classes in sorted({dcp, exact.CLASSES}))]


def sizes(tokens, contexts, dcps, tp: int, heads: int, topk: int) -> Iterator[Size]:
    """Every combination; `heads` of the model over `tp` ranks."""
    for dcp in dcps:
        for context in contexts:
            for count in tokens:
                for method, classes in methods(dcp):
                    yield Size(count, context, heads // tp, min(topk, context), dcp, method, classes)


@torch.inference_mode()
def measure(size: Size, device: torch.device) -> Result:
    """Time one size on this device."""
    group, (q, cache, ids, offset) = Mirror(size.dcp), inputs(size, device)
    partial: Callable = ordinary_partial
    keys: tuple = (cache, ids, offset)
    if size.classes:
        partial, keys = exact_partial, (*keys, leaf_table(size, device))
    manager = (exact_attention.ExactManager if size.classes else CombineManager)(group, size.method, size.tokens)
    gathered = manager.query_gather(q, True)
    attend = lambda: partial(size, *keys)(gathered)  # noqa: E731
    step = lambda: attend_routed(q, partial(size, *keys), manager, True)  # noqa: E731
    group.sent = 0
    step()
    sent = group.sent
    return Result(size, median_ms(attend, device), median_ms(step, device), sent)


def ordinary_partial(size: Size, cache, ids, offset) -> Callable:
    """Partial attention of rank 0 as sharded.ShardedAttention.attend has it."""
    heads = -(-size.heads * size.dcp // workspace.HEAD_BLOCK) * workspace.HEAD_BLOCK
    plan = workspace.plan(size.tokens, heads, size.topk, workspace.num_sms(cache.device))
    slots = own_slots(size, ids, offset)
    return lambda q: sparse_partial(q, cache, slots, SCALE, FORMAT, plan=plan)


def exact_partial(size: Size, cache, ids, offset, leaf_of) -> Callable:
    """The same of exact_attention.ExactAttention.attend."""
    plan = exact.plan(size.tokens, size.heads, size.topk, size.classes, workspace.num_sms(cache.device), 1 << 40)
    slots, classes = own_slots(size, ids, offset), size.classes // size.dcp
    return lambda q: exact.node_partial(q, cache, slots, ids, leaf_of, classes, size.heads, SCALE, FORMAT, plan=plan)


def leaf_table(size: Size, device: torch.device) -> torch.Tensor:
    """Every position's leaf, which the engine computes once."""
    return local_class(torch.arange(size.context, device=device), size.classes, size.dcp).to(torch.int16)


def own_slots(size: Size, ids: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Slots of the selected ids that rank 0 owns, each request in its own part of the cache; else -1."""
    local = localise(ids, size.dcp, 0).long()
    return torch.where(local >= 0, local + offset, -1)


def inputs(size: Size, device: torch.device):
    """Local queries [T, h, 576], the caches of T requests on this rank, selected ids [T, K], first slots [T, 1]."""
    random = torch.Generator(device).manual_seed(size.tokens)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.randn(size.tokens, size.heads, LATENT + ROPE, generator=random, device=device, dtype=dtype)
    blocks = -(-local_length(size.context, size.dcp, 0) // BLOCK)
    cache = new_latent_cache(blocks * size.tokens, FORMAT, device=device)
    rows = torch.randn(BLOCK, LATENT + ROPE, generator=random, device=device)
    write_latent(cache[:1], rows[:, :LATENT], rows[:, LATENT:], torch.arange(BLOCK, device=device), FORMAT)
    cache[1:] = cache[:1]
    picked = [torch.rand(size.context, generator=random, device=device).topk(size.topk)[1] for _ in range(size.tokens)]
    offset = torch.arange(size.tokens, device=device)[:, None] * blocks * BLOCK
    return q, cache, torch.stack(picked).sort(1)[0].int(), offset


def median_ms(call: Callable, device: torch.device) -> float:
    """Median milliseconds: on a GPU of a graph's replay; else of calls."""
    if device.type == "cuda":
        return round(statistics.median(costs.replays(call)), 5)
    times = [costs.seconds(call, device) * 1e3 for _ in range(costs.WARM_UP + REPEATS)]
    return round(statistics.median(times[costs.WARM_UP :]), 5)


def table(results: list[Result]) -> Table:
    """A row per size; times of exact also as a multiple of the ordinary a2a's."""
    grid = Table()
    for name in ("D", "context", "T", "combine", "C", "attend ms", "x a2a", "step ms", "x a2a", "KiB sent"):
        grid.add_column(name, no_wrap=True, justify="right")
    for result in results:
        size, base = result.size, baseline(results, result.size)
        cells = [size.dcp, size.context, size.tokens, size.method, size.classes or "", f"{result.attend_ms:.4f}"]
        cells += [f"{result.attend_ms / base.attend_ms:.2f}", f"{result.step_ms:.4f}"]
        cells += [f"{result.step_ms / base.step_ms:.2f}", f"{result.bytes / 1024:.1f}"]
        grid.add_row(*map(str, cells))
    return grid


def baseline(results: list[Result], size: Size) -> Result:
    """The ordinary a2a of the same sizes."""
    same = lambda other: (other.dcp, other.context, other.tokens) == (size.dcp, size.context, size.tokens)  # noqa: E731
    return next(result for result in results if result.size.method == "a2a" and same(result.size))


def main(
    device: str, tokens: tuple[int, ...], contexts: tuple[int, ...], dcps: tuple[int, ...], tp: int, heads: int = 64,
    topk: int = 2048, record_path: Path | None = None,
) -> int:  # fmt: skip
    """Measure every size, write the record, print the table; 0. Raises UserError for sizes that do not divide."""
    place, console = resolve_device(device), Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    check(tokens, contexts, dcps, tp, heads)
    wanted = list(sizes(tokens, contexts, dcps, tp, heads, topk))
    results = []
    for size in track(wanted, "measuring", console=Console(stderr=True)):
        results.append(measure(size, place))
    rows = [result.as_json() for result in results]
    written = lambda: {"format": FORMAT, "graph": place.type == "cuda", "rows": rows}  # noqa: E731
    deliver_record(record_path, written, lambda: console.print(table(results)))
    return 0


def check(tokens, contexts, dcps, tp: int, heads: int) -> None:
    """Raise UserError for what cannot be measured."""
    if min(*tokens, *contexts, *dcps) < 1:
        raise UserError(f"tokens {tokens}, contexts {contexts} and DCP sizes {dcps} must be at least 1")
    if heads % tp:
        raise UserError(f"a TP size of {tp} does not divide {heads} heads; choose a divisor")
    for dcp in dcps:
        check_dcp(tp, dcp)
        exact.check_classes(exact.CLASSES, dcp)
