"""LSE combine, the Triton kernels: formula, shapes and neutral element of reference.py, one pass each.

    _weigh   grid (rows)   ag_rs, before its exchange: own out times own share, in the wire's type, by receiver
    _total   grid (rows)   ag_rs, after it: what arrived, summed in rank order
    _to_wire grid (rows)   a2a and exact, before: out and lse into one buffer, a piece for each receiver
    _merge   grid (rows)   a2a, after: shares from the lses that arrived, outs weighed and summed in rank order

A row is one head of one token. Each kernel reads what it needs once and writes once; +inf of an lse is handled where
it is loaded, and a share of zero selects its output away after loading it (0 x NaN is NaN).

Products are rounded before they are summed (enable_fp_fusion=False), sums run in rank order and the one division is
exact, so _weigh with _total gives the bits of _merge over an fp32 wire. Over a bf16 wire the two round different
things, the weighed output or the plain one: each term is off by at most half a bf16 ulp of its own size. An lse always
travels in fp32.

TRITON_INTERPRET=1 must be set before this module is imported; the interpreter is only to be trusted with fp32.
It does not: exchange anything (reference.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGN = 16  # bytes: where the outputs and the lses of a piece begin
WIDE_ROWS = 4096  # from here on a program takes several rows; below, a row each keeps every multiprocessor busy


@triton.jit
def _clean(lse):
    """fp32, with the mark for "no key" turned into -inf. NaN stays: it is a fault, no mark."""
    lse = lse.to(tl.float32)
    return tl.where(lse == float("inf"), float("-inf"), lse)


@triton.jit
def _denominator(lses, at, stride, RANKS: tl.constexpr):
    """Of the lses at `at`, `at + stride` ...: the top one, what to subtract from each, the sum of the weights."""
    top = _clean(tl.load(lses + at))
    for rank in tl.static_range(1, RANKS):
        top = tl.maximum(top, _clean(tl.load(lses + at + rank * stride)))
    finite = tl.where(top == float("-inf"), 0.0, top)
    total = tl.exp(_clean(tl.load(lses + at)) - finite)
    for rank in tl.static_range(1, RANKS):
        total += tl.exp(_clean(tl.load(lses + at + rank * stride)) - finite)
    return top, finite, total


@triton.jit
def _weighed(x, lse, finite, total):
    """x [R, D] times the share of a partial with this lse [R]; zero where the share is."""
    share = tl.div_rn(tl.exp(lse - finite), tl.where(total == 0, 1.0, total))[:, None]
    return tl.where(share == 0, 0.0, x.to(tl.float32) * share)


@triton.jit
def _weigh(
    out, out_token, out_head, lses, lse_rank, lse_token, lse_head, rank, sent, tokens, heads,
    RANKS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head, column = row // heads, row % heads, tl.arange(0, BLOCK)
    live = token < tokens
    token = tl.minimum(token, tokens - 1)
    inside = live[:, None] & (column < WIDTH)[None, :]
    x = tl.load(out + (token * out_token + head * out_head)[:, None] + column[None, :], mask=inside, other=0.0)
    at = token * lse_token + head * lse_head
    _, finite, total = _denominator(lses, at, lse_rank, RANKS)
    own = _clean(tl.load(lses + at + rank * lse_rank))
    local = heads // RANKS
    place = (head // local * tokens + token) * local + head % local
    value = _weighed(x, own, finite, total).to(sent.dtype.element_ty)
    tl.store(sent + place[:, None] * WIDTH + column[None, :], value, mask=inside)


@triton.jit
def _total(parts, stride, result, numel, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < numel
    total = tl.load(parts + at, mask=live, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        total += tl.load(parts + rank * stride + at, mask=live, other=0.0).to(tl.float32)
    tl.store(result + at, total.to(result.dtype.element_ty), mask=live)


@triton.jit
def _to_wire(
    out, out_token, out_head, lse, lse_token, lse_head, sent, sent_rank, sent_lse, sent_lse_rank, tokens, heads,
    RANKS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head, column = row // heads, row % heads, tl.arange(0, BLOCK)
    live = token < tokens
    inside = live[:, None] & (column < WIDTH)[None, :]
    x = tl.load(out + (token * out_token + head * out_head)[:, None] + column[None, :], mask=inside, other=0.0)
    log = _clean(tl.load(lse + token * lse_token + head * lse_head, mask=live, other=0.0))
    local = heads // RANKS
    receiver, place = head // local, token * local + head % local
    into = sent + (receiver * sent_rank + place * WIDTH)[:, None] + column[None, :]
    tl.store(into, x.to(sent.dtype.element_ty), mask=inside)
    tl.store(sent_lse + receiver * sent_lse_rank + place, log, mask=live)


@triton.jit
def _merge(
    outs, out_rank, out_token, out_head, lses, lse_rank, lse_token, lse_head, result, result_lse, tokens, heads,
    RANKS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head, column = row // heads, row % heads, tl.arange(0, BLOCK)
    live = token < tokens
    token = tl.minimum(token, tokens - 1)
    inside = live[:, None] & (column < WIDTH)[None, :]
    at, x_at = token * lse_token + head * lse_head, token * out_token + head * out_head
    top, finite, total = _denominator(lses, at, lse_rank, RANKS)
    into = x_at[:, None] + column[None, :]
    merged = _weighed(tl.load(outs + into, mask=inside, other=0.0), _clean(tl.load(lses + at)), finite, total)
    for rank in tl.static_range(1, RANKS):
        log = _clean(tl.load(lses + at + rank * lse_rank))
        merged += _weighed(tl.load(outs + rank * out_rank + into, mask=inside, other=0.0), log, finite, total)
    tl.store(result + row[:, None] * WIDTH + column[None, :], merged.to(result.dtype.element_ty), mask=inside)
    if result_lse is not None:
        tl.store(result_lse + row, top + tl.log(total), mask=live)


def weigh(out: Tensor, lses: Tensor, rank: int, wire: torch.dtype) -> Tensor:
    """out [T, H, D] of `rank`, lses [P, T, H] of all ranks -> its weighed terms by receiver: wire [P, T, H / P, D]."""
    (tokens, heads, width), ranks = out.shape, len(lses)
    out = rows_of(out)
    sent = torch.empty(ranks, tokens, heads // ranks, width, dtype=wire, device=out.device)
    if sent.numel():
        grid, blocks = launch(tokens * heads, width)
        _weigh[grid](
            out, *out.stride()[:2], lses, *lses.stride(), rank, sent, tokens, heads, RANKS=ranks, WIDTH=width,
            **blocks,
        )  # fmt: skip
    return sent


def total(parts: Tensor, result: Tensor | None = None) -> Tensor:
    """parts[0] + parts[1] + ... in that order and in fp32: [P, ...] contiguous -> fp32 [...], or in `result`'s type."""
    result = torch.empty(parts.shape[1:], device=parts.device) if result is None else result
    numel = result.numel()
    if numel:
        block = 2048 if numel >= 1 << 20 else 512
        _total[(triton.cdiv(numel, block),)](
            parts, parts.stride(0), result, numel, RANKS=len(parts), BLOCK=block, enable_fp_fusion=False
        )
    return result


def to_wire(out: Tensor, lse: Tensor, ranks: int, wire: torch.dtype) -> Tensor:
    """out [T, H, D], lse [T, H] -> fp32 [P, N], row s of which is what rank s wants: see `from_wire`."""
    tokens, heads, width = out.shape
    out = rows_of(out)
    sent = torch.empty(ranks, piece(tokens, heads // ranks, width, wire)[1] // 4, device=out.device)
    if out.numel():
        into, into_lse = from_wire(sent, tokens, heads // ranks, width, wire)
        grid, blocks = launch(tokens * heads, width)
        _to_wire[grid](
            out, *out.stride()[:2], lse, *lse.stride(), into, into.stride(0), into_lse, into_lse.stride(0), tokens,
            heads, RANKS=ranks, WIDTH=width, **blocks,
        )  # fmt: skip
    return sent


def from_wire(pieces: Tensor, tokens: int, heads: int, width: int, wire: torch.dtype) -> tuple[Tensor, Tensor]:
    """Views of what `to_wire` wrote: outs wire [P, T, h, D], then, from a whole ALIGN on, lses fp32 [P, T, h]."""
    start = piece(tokens, heads, width, wire)[0] // 4
    outs = pieces.view(wire)[:, : tokens * heads * width].unflatten(1, (tokens, heads, width))
    return outs, pieces[:, start : start + tokens * heads].unflatten(1, (tokens, heads))


def piece(tokens: int, heads: int, width: int, wire: torch.dtype) -> tuple[int, int]:
    """Where the lses of a piece begin, and its length, in bytes.

    >>> piece(tokens=1, heads=3, width=5, wire=torch.bfloat16)
    (32, 48)
    """
    start = aligned(tokens * heads * width * wire.itemsize)
    return start, start + aligned(tokens * heads * 4)


def aligned(size: int) -> int:
    """`size` bytes rounded up to whole ALIGNs."""
    return -(-size // ALIGN) * ALIGN


def merge(
    outs: Tensor, lses: Tensor, result: Tensor | None = None, want_lse: bool = True
) -> tuple[Tensor, Tensor | None]:
    """combine.merge_partials: outs [P, T, H, D], lses [P, T, H] -> out fp32 or in `result`'s type [T, H, D], lse fp32
    [T, H] or None.
    """
    ranks, tokens, heads, width = outs.shape
    outs = rows_of(outs)
    result = torch.empty(tokens, heads, width, device=outs.device) if result is None else result
    lse = torch.empty(tokens, heads, device=outs.device) if want_lse else None
    if result.numel():
        grid, blocks = launch(tokens * heads, width)
        _merge[grid](
            outs, *outs.stride()[:3], lses, *lses.stride(), result, lse, tokens, heads, RANKS=ranks, WIDTH=width,
            **blocks,
        )  # fmt: skip
    return result, lse


def rows_of(x: Tensor) -> Tensor:
    """x with consecutive elements in its last dimension."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def launch(rows: int, width: int) -> tuple[tuple[int], dict]:
    """Grid and block sizes for `rows` rows of `width`."""
    many = 2 if rows >= WIDE_ROWS else 1
    blocks = {"ROWS": many, "BLOCK": triton.next_power_of_2(width), "num_warps": many}
    return (triton.cdiv(rows, many),), blocks | {"enable_fp_fusion": False}
