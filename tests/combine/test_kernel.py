"""combine/kernel.py: under the interpreter against the reference and fp64, on a GPU also its bits over both routes."""

import math

import pytest
import torch

from dcp_fix.base.equality import close, same_bytes
from dcp_fix.combine import by_receiver, clean_lse, merge_partials, merge_weights, weighted
from tests.combine.test_combine import partials, softmax_oracle

pytest.importorskip("triton")
from dcp_fix.combine import kernel as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ULPS = 8  # of the sum of the terms' sizes: an exp that is approximated, P products and sums
FP32, NAN = torch.float32, math.nan
SHAPES = [(1, 1, 3, 5), (2, 3, 4, 512), (3, 2, 6, 7), (8, 1, 8, 33)]  # P, T, H, D
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning"),  # numpy, in the interpreter
]


def poisoned(shape, dtype=FP32):
    return torch.full(shape, NAN, dtype=dtype, device=DEVICE)


@pytest.fixture(autouse=True)
def nothing_is_empty(monkeypatch):
    """What a kernel allocates holds NaN until it is written."""
    monkeypatch.setattr(torch, "empty", _empty)


def _empty(*shape, dtype=FP32, device=None):
    shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return torch.full(tuple(shape), NAN, dtype=dtype, device=device)


def routes(out, lse, wire=FP32):
    """Both routes of all ranks, without a group: {route: fp32 [T, H, D]}."""
    ranks, tokens, heads, width = out.shape
    sent = [kernels.weigh(out[rank], lse, rank, wire) for rank in range(ranks)]
    packed = [kernels.to_wire(out[rank], lse[rank], ranks, wire) for rank in range(ranks)]
    results = {"ag_rs": [], "a2a": []}
    for rank in range(ranks):
        results["ag_rs"].append(kernels.total(torch.stack([x[rank] for x in sent])))
        parts = kernels.from_wire(torch.stack([x[rank] for x in packed]), tokens, heads // ranks, width, wire)
        results["a2a"].append(kernels.merge(*parts, want_lse=False)[0])
    return {route: torch.cat(parts, dim=1) for route, parts in results.items()}


def size(out, lse, empty):
    """The sum of the terms' sizes, which bounds what rounding can do: fp64 [T, H, D]."""
    return softmax_oracle(out.abs(), lse, empty)


@pytest.mark.parametrize("shape", SHAPES)
def test_both_routes_against_fp64_and_each_other(shape):
    out, lse, empty = partials(*shape, seed=shape[0])
    got = {route: x.cpu() for route, x in routes(out.to(DEVICE), lse.to(DEVICE)).items()}
    assert same_bytes(got["ag_rs"], got["a2a"])
    error = (got["a2a"].double() - softmax_oracle(out, lse, empty)).abs()
    assert (error <= ULPS * 2.0**-23 * size(out, lse, empty)).all()
    assert got["a2a"][0].eq(0).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_narrow_wire_costs_half_an_ulp_of_each_term(shape):
    out, lse, empty = partials(*shape, seed=shape[0])
    if DEVICE == "cpu":
        pytest.skip("the interpreter truncates to bf16; tests/combine/test_combine.py has the reference's bound")
    for got in routes(out.to(DEVICE), lse.to(DEVICE), wire=torch.bfloat16).values():
        error = (got.cpu().double() - softmax_oracle(out, lse, empty)).abs()
        assert (error <= (2.0**-8 + ULPS * 2.0**-23) * size(out, lse, empty)).all()


def test_merge_is_merge_partials():
    out, lse, empty = partials(4, tokens=3, heads=5, width=33)
    got, got_lse = (x.cpu() for x in kernels.merge(out.to(DEVICE), lse.to(DEVICE)))
    want, want_lse = merge_partials(out, lse)
    assert close(got, want, ulps=ULPS, floor=1.0) and close(got_lse, want_lse, ulps=ULPS, floor=1.0)
    assert (got_lse[0] == -math.inf).all() and torch.isfinite(got_lse[1:][~empty.all(0)[1:]]).all()


def test_a_nan_is_no_mark_and_reaches_the_whole():
    out, lse, _ = partials(3, tokens=2, heads=6, width=7, holes=0.0)
    lse[0, 1], out[0, 1] = math.inf, NAN
    lse[1, 1, 3], out[1, 1, 3] = NAN, NAN
    whole = kernels.merge(out.to(DEVICE), lse.to(DEVICE))
    assert whole[1].isnan().nonzero().tolist() == [[1, 3]]
    for got in (*routes(out.to(DEVICE), lse.to(DEVICE)).values(), whole[0]):
        assert got.isnan().all(-1).nonzero().tolist() == [[1, 3]] and got.isnan().sum() == 7


@pytest.mark.parametrize("strange", [math.inf, -math.inf, NAN])
def test_what_an_empty_shard_leaves_is_selected_away(strange):
    out = torch.stack([torch.full((2, 2, 4), strange), torch.full((2, 2, 4), 3.0)]).to(DEVICE)
    lse = torch.stack([torch.full((2, 2), math.inf), torch.zeros(2, 2)]).to(DEVICE)
    for got in routes(out, lse).values():
        assert (got == 3.0).all()
    lse[0] = 0.0  # now it has weight, and nothing hides it
    for got in routes(out, lse).values():
        assert not torch.isfinite(got).any()


def test_strides_and_padding_are_heeded():
    out, lse, _ = partials(2, tokens=3, heads=4, width=8)
    want = routes(out.to(DEVICE), lse.to(DEVICE))["a2a"]
    padded, turned = poisoned((2, 5, 6, 11)), lse.transpose(1, 2).contiguous().transpose(1, 2).to(DEVICE)
    padded[:, 1:4, 1:5, :8] = out.to(DEVICE)
    apart = poisoned((2, 3, 4, 16))  # every other element: copied first
    apart[..., ::2] = out.to(DEVICE)
    for given in (padded[:, 1:4, 1:5, :8], apart[..., ::2]):
        for got in routes(given, turned).values():
            assert same_bytes(got.cpu(), want.cpu())


def test_what_is_sent_has_a_row_for_each_receiver():
    out, lse, _ = partials(2, tokens=3, heads=4, width=5)
    sent = kernels.weigh(out[1].to(DEVICE), lse.to(DEVICE), 1, FP32).cpu()
    assert close(sent, by_receiver(weighted(out[1], merge_weights(lse)[0][1]), 2), ulps=4, floor=1.0)
    outs, lses = kernels.from_wire(kernels.to_wire(out[1].to(DEVICE), lse[1].to(DEVICE), 2, FP32).cpu(), 3, 2, 5, FP32)
    assert same_bytes(outs, by_receiver(out[1], 2)) and torch.equal(lses, by_receiver(clean_lse(lse[1]), 2))
    assert outs.data_ptr() % kernels.ALIGN == lses.data_ptr() % kernels.ALIGN == 0


def test_several_rows_a_program(monkeypatch):
    """As many rows as take several a program, the last one ragged."""
    out, lse, _ = partials(2, tokens=3, heads=6, width=3)
    want = routes(out.to(DEVICE), lse.to(DEVICE))
    monkeypatch.setattr(kernels, "WIDE_ROWS", 1)
    for route, got in routes(out.to(DEVICE), lse.to(DEVICE)).items():
        assert same_bytes(got, want[route])


def test_no_rows_are_no_launch():
    out, lse = torch.zeros(2, 0, 4, 8, device=DEVICE), torch.zeros(2, 0, 4, device=DEVICE)
    assert all(x.shape == (0, 4, 8) for x in routes(out, lse).values())
