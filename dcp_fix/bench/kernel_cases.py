"""The works of kernel_bench.py: inputs, contenders, fp64 references and floors, in the sizes of GLM-5.2.

    launch    what Python takes to launch the norm of one token, without a graph
    norm      fused norm and RoPE of T tokens, Lq = 2048, indexer, top-k 2048; a share `negative` of them owns no slot
    combine   local parts at D = 4, 64 heads: ag_rs (weigh) and a2a (to_wire, then merge), in bf16 and fp32
    attend    sparse partial of T tokens and H heads over 2048 selected of 65536 rows, of which a rank of D owns 1 / D

`combine` counts what a rank does itself: before the exchange for ag_rs, before and after it for a2a. `attend` counts
packing slots and decoding rows with the kernel that needs them; "packed and cut" gives FlashMLA the longest row's
length, which a host knows only after waiting, so its packing is not timed.
It does not: time anything.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dcp_fix import workspace
from dcp_fix.attention import sparse_partial
from dcp_fix.kv_cache import (
    BLOCK,
    ENTRY_BYTES,
    INDEX_BYTES,
    INDEX_DIM,
    LATENT,
    ROPE,
    new_index_cache,
    new_latent_cache,
    read_latent,
    write_latent,
)
from dcp_fix.norm_rope import IndexerInputs, NormRopeInputs, fused_norm_rope, rms_norm, rotate
from dcp_fix.ownership import owner

FORMAT, SCALE = "fp8_ds_mla", 192**-0.5
HEADS, DCP, TOPK, ROWS, QUERY, POSITIONS = 64, 4, 2048, 65536, 2048, 16384
BF16 = torch.bfloat16
CHECKED = 8  # tokens that attend is checked on


@dataclass(frozen=True)
class KernelCase:
    """One size: contenders map the number of a set of inputs to their result, `error` measures set 0's."""

    work: str
    sizes: dict
    sets: int
    bytes: int
    flops: int
    contenders: dict[str, Callable]
    error: Callable
    allowed: float
    host: bool = False  # time the launch from Python instead of the kernel


def away(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in fp64; NaN if anything was left unwritten."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def sets_of(size: int) -> int:
    """Sets of inputs to rotate: few where one set alone is several times the L2 cache."""
    return 2 if size >= 1 << 28 else 4


# --- norm -------------------------------------------------------------------------------------------------------------


def norm(tokens: int, negative: float, device, pieces, host: bool = False) -> KernelCase:
    """q_out and kv_out against fp64; the caches' bytes have tests of their own."""
    size = norm_bytes(tokens, negative)
    sets = [norm_inputs(tokens, negative, device, number) for number in range(sets_of(size))]
    contenders = {"here": lambda i: our_norm(sets[i])}
    if pieces:
        launch = pieces.norm_rope()
        contenders["upstream"] = lambda i: upstream_norm(launch, sets[i])
    name = "launch" if host else "norm"
    sizes = {"T": tokens, "negative": negative}
    return KernelCase(name, sizes, len(sets), size, 0, contenders, norm_error, allowed=4e-3, host=host)


def norm_bytes(tokens: int, negative: float) -> int:
    """Bytes that must move, each once; the caches' entries of tokens that own a slot only."""
    per_token = 4 * QUERY + 4 * (LATENT + ROPE) + 8 * ROPE + 4 * TOPK + 2 * INDEX_DIM
    return tokens * (per_token + round((1 - negative) * (ENTRY_BYTES + INDEX_BYTES)))


def norm_inputs(tokens: int, negative: float, device, seed: int) -> dict:
    """The arguments of fused_norm_rope by name, outputs full of NaN."""
    random = torch.Generator(device).manual_seed(seed)
    randn = lambda *shape: torch.randn(shape, generator=random, device=device)  # noqa: E731
    nan = lambda width: torch.full((tokens, width), torch.nan, dtype=BF16, device=device)  # noqa: E731
    slots = torch.randperm(tokens, generator=random, device=device)
    slots = torch.where(torch.rand(tokens, generator=random, device=device) < negative, -1, slots)
    blocks, table = -(-tokens // BLOCK), randn(POSITIONS, ROPE)
    indexer = IndexerInputs(
        randn(tokens, INDEX_DIM).to(BF16), randn(INDEX_DIM), randn(INDEX_DIM), 1e-6, table,
        new_index_cache(blocks, device=device),
    )  # fmt: skip
    return {
        "positions": torch.randint(POSITIONS, (tokens,), generator=random, device=device),
        "q": randn(tokens, QUERY).to(BF16), "q_weight": randn(QUERY).to(BF16),
        "kv": randn(tokens, LATENT).to(BF16), "kv_weight": randn(LATENT).to(BF16),
        "k_pe": randn(tokens, ROPE).to(BF16), "cos_sin": table, "eps": 1e-6, "slot_mapping": slots,
        "kv_cache": new_latent_cache(blocks, FORMAT, device=device), "q_out": nan(QUERY), "kv_out": nan(LATENT),
        "kpe_out": nan(ROPE), "indexer": indexer,
        "topk_indices": torch.zeros(tokens, TOPK, dtype=torch.int32, device=device),
    }  # fmt: skip


def our_norm(a: dict) -> dict:
    """Returns the inputs, whose outputs it wrote."""
    fused_norm_rope(NormRopeInputs(**a))
    return a


def upstream_norm(launch, a: dict) -> dict:
    """The same through upstream's launcher; returns the inputs, whose outputs it wrote."""
    i = a["indexer"]
    launch(
        a["positions"], a["q"], a["q_weight"], a["eps"], a["kv"], a["kv_weight"], a["eps"], a["k_pe"], a["cos_sin"],
        i.k, i.weight, i.bias, i.eps, i.cos_sin, a["topk_indices"], slot_mapping=a["slot_mapping"],
        indexer_k_cache=i.cache, mla_kv_cache=a["kv_cache"], mla_kv_cache_dtype=FORMAT, index_rope_interleave=True,
        q_c_out=a["q_out"], kv_c_out=a["kv_out"], k_pe_out=a["kpe_out"],
    )  # fmt: skip
    return a


def norm_error(a: dict) -> float:
    """The largest of three outputs' distances; then poisons them for the next contender."""
    angles = a["cos_sin"][a["positions"]]
    wanted = {
        "q_out": rms_norm(a["q"].double(), a["q_weight"], a["eps"]),
        "kv_out": rms_norm(a["kv"].double(), a["kv_weight"], a["eps"]),
        "kpe_out": rotate(a["k_pe"], angles, interleaved=True),
    }
    errors = [away(a[name], want) for name, want in wanted.items()]
    if not (a["topk_indices"] == -1).all():
        errors.append(torch.inf)
    for name in wanted:
        a[name].fill_(torch.nan)
    a["topk_indices"].zero_()
    return max(errors, key=lambda error: (error != error, error))  # NaN is the largest


# --- combine ----------------------------------------------------------------------------------------------------------


def combine(method: str, tokens: int, wire: torch.dtype, device, pieces) -> KernelCase:
    """Local parts of one rank: its lse is row 1 of the gathered ones, and every rank sends what it sends."""
    from dcp_fix.combine import kernel as ours

    local = HEADS // DCP
    size = combine_bytes(method, tokens, wire)
    sets = [combine_inputs(tokens, wire, device, number) for number in range(sets_of(part_bytes(tokens, wire)))]
    results = [torch.full((tokens, local, LATENT), torch.nan, dtype=wire, device=device) for _ in sets]
    theirs = pieces.combine() if pieces and wire == BF16 else None
    contenders = {}
    if method == "ag_rs":
        contenders["here"] = lambda i: ours.weigh(sets[i][0], sets[i][1], 1, wire)
        if theirs:
            contenders["upstream"] = lambda i: theirs.weigh(*sets[i], 1).unflatten(1, (DCP, local)).transpose(0, 1)
    else:
        contenders["here"] = lambda i: ours.merge(
            *ours.from_wire(ours.to_wire(sets[i][0], sets[i][1][1], DCP, wire), tokens, local, LATENT, wire),
            results[i], want_lse=False,
        )[0]  # fmt: skip
        if theirs:
            contenders["upstream"] = lambda i: theirs.merge(theirs.pack(sets[i][0], sets[i][1][1], DCP), LATENT)
    sizes = {"method": method, "T": tokens, "D": DCP, "wire": str(wire).removeprefix("torch.")}
    error = partial(combine_error, method, *sets[0])
    return KernelCase("combine", sizes, len(sets), size, 0, contenders, error, 2.0**-8 if wire == BF16 else 2e-6)


def part_bytes(tokens: int, wire: torch.dtype) -> int:
    """One rank's output of all heads."""
    return tokens * HEADS * LATENT * wire.itemsize


def combine_bytes(method: str, tokens: int, wire: torch.dtype) -> int:
    """Bytes that must move, each once: ag_rs reads and writes a part; a2a also reads what came, writes its heads."""
    part = part_bytes(tokens, wire)
    return 2 * part if method == "ag_rs" else 2 * part + part + part // DCP


def combine_inputs(tokens: int, wire: torch.dtype, device, seed: int) -> tuple[Tensor, Tensor]:
    """out [T, H, 512] and lses [D, T, H], of which a tenth is +inf: no key."""
    random = torch.Generator(device).manual_seed(seed)
    out = torch.randn(tokens, HEADS, LATENT, generator=random, device=device).to(wire)
    lses = 3 * torch.randn(DCP, tokens, HEADS, generator=random, device=device)
    empty = torch.rand(lses.shape, generator=random, device=device) < 0.1
    return out, lses.masked_fill_(empty, torch.inf)


def combine_error(method: str, out: Tensor, lses: Tensor, got: Tensor) -> float:
    """Of ag_rs the own weighed terms [P, T, h, D]; of a2a the merge of what this rank packed for each of the others."""
    by_rank = out.double().unflatten(1, (DCP, -1)).transpose(0, 1)  # [P, T, h, D]
    if method == "a2a":
        logs = lses[1].double().masked_fill(lses[1] == torch.inf, -torch.inf).unflatten(1, (DCP, -1)).transpose(0, 1)
        return away(got, (logs.softmax(0).nan_to_num(0.0)[..., None] * by_rank).sum(0))
    share = lses.double().masked_fill(lses == torch.inf, -torch.inf).softmax(0).nan_to_num(0.0)[1]
    return away(got, share.unflatten(1, (DCP, -1)).transpose(0, 1)[..., None] * by_rank)


# --- attend -----------------------------------------------------------------------------------------------------------


def attend(tokens: int, heads: int, dcp: int, device, pieces) -> KernelCase:
    """A contender returns (out, lse). Bytes: every selected row once, queries, results."""
    from dcp_fix.attention import backends
    from dcp_fix.attention.kernel import decode_rows, pack

    cache = filled_cache(device)
    sets = [attend_inputs(tokens, heads, dcp, device, number) for number in range(1 if tokens > 1000 else 4)]
    plan = workspace.plan(tokens, heads, TOPK, workspace.num_sms(device), capacity=ROWS, ranks=dcp)
    ours = lambda i: sparse_partial(*given(sets[i], cache), plan=plan)  # type: ignore[misc]  # noqa: E731
    contenders: dict[str, Callable] = {"here": partial(through, None, ours)}
    if pieces:
        flashmla = pieces.flashmla()
        packed = [pack(slots, tail=-1) for _, slots in sets]
        width = -(-int(max(counts.max() for _, counts in packed)) // 64) * 64
        fed = {"upstream as fed": [slots for _, slots in sets]}
        if dcp > 1:
            fed["upstream packed and cut"] = [slots[:, :width].contiguous() for slots, _ in packed]
        for name, slots in fed.items():
            contenders[name] = partial(decode, flashmla, sets, cache, slots)
        with using(flashmla):
            chosen = backends.way(plan, tokens, heads, BF16, FORMAT)
        if chosen != "here":
            contenders["here with flashmla"] = partial(through, flashmla, ours)
        if plan.decoded:
            contenders["upstream prefill, unpacked"] = lambda i: flashmla.prefill(
                sets[i][0], decode_rows(cache, FORMAT, BF16), *packed[i], SCALE
            )
    size, flops = attend_work(tokens, heads, dcp)
    sizes = {"T": tokens, "H": heads, "D": dcp}
    error = partial(attend_error, *sets[0], cache)
    return KernelCase("attend", sizes, len(sets), size, flops, contenders, error, allowed=1e-2)


def given(inputs, cache) -> tuple:
    """The arguments of sparse_partial."""
    q, slots = inputs
    return q, cache, slots, SCALE, FORMAT


@contextmanager
def using(backend):
    """While this backend, or none, is the one in use."""
    from dcp_fix.attention import backends

    before = backends.CHOSEN[:]
    backends.use(backend)
    try:
        yield
    finally:
        backends.CHOSEN[:] = before


def attend_work(tokens: int, heads: int, dcp: int) -> tuple[int, int]:
    """Bytes that must move, each once, and operations of the two products; padded heads count for nothing."""
    keys = tokens * TOPK // dcp
    size = min(keys, ROWS) * ENTRY_BYTES + tokens * heads * (2 * (LATENT + ROPE) + 4 * LATENT)
    return size, 2 * keys * heads * (2 * LATENT + ROPE)


def through(backend, call: Callable, i: int):
    """`call` with this backend in use, or with None."""
    with using(backend):
        return call(i)


def decode(flashmla, sets, cache, slots: list[Tensor], i: int):
    """FlashMLA's sparse decode; its schedule is made in the first call of a size, as vLLM makes it once a step."""
    return flashmla.decode(sets[i][0], cache, slots[i], SCALE)


def filled_cache(device) -> Tensor:
    """A cache of ROWS random entries."""
    random, cache = torch.Generator(device).manual_seed(0), new_latent_cache(ROWS // BLOCK, FORMAT, device=device)
    rows = torch.randn(ROWS, LATENT + ROPE, generator=random, device=device)
    write_latent(cache, rows[:, :LATENT], rows[:, LATENT:], torch.arange(ROWS, device=device), FORMAT)
    return cache


def attend_inputs(tokens: int, heads: int, dcp: int, device, seed: int) -> tuple[Tensor, Tensor]:
    """q bf16 [T, H, 576] and slots int32 [T, K], of which those that another rank owns are holes."""
    random = torch.Generator(device).manual_seed(seed)
    q = torch.randn(tokens, heads, LATENT + ROPE, generator=random, device=device).to(BF16)
    slots = torch.randint(ROWS, (tokens, TOPK), generator=random, device=device, dtype=torch.int32)
    return q, torch.where(owner(slots, dcp) == 0, slots, -1)


def attend_error(q: Tensor, slots: Tensor, cache: Tensor, got) -> float:
    """The larger of out's distance and lse's, over CHECKED tokens from first to last."""
    picked = torch.linspace(0, len(q) - 1, min(CHECKED, len(q)), device=q.device).long().unique()
    outs, lses = [], []
    for token in picked.tolist():
        rows = read_latent(cache, slots[token][slots[token] >= 0].long(), FORMAT).double()
        scores = SCALE * q[token].double() @ rows.T
        outs.append(scores.softmax(-1) @ rows[:, :LATENT])
        lses.append(scores.logsumexp(-1))
    errors = away(got[0][picked], torch.stack(outs)), away(got[1][picked], torch.stack(lses))
    return max(errors, key=lambda error: (error != error, error))


WORKS = {
    "launch": [partial(norm, 1, 0, host=True)],
    "norm": [partial(norm, t, n) for t, n in ((1, 0), (128, 0), (1024, 0), (8192, 0), (8192, 0.75))],
    "combine": [
        partial(combine, m, t, w) for w in (BF16, torch.float32) for m in ("ag_rs", "a2a") for t in (1, 64, 1024, 8192)
    ],
    "attend": [partial(attend, t, h, d) for t in (8192, 64, 1) for h in (64, 32, 16) for d in (1, 4, 8)],
}
