"""The fused norm/RoPE: named cases on the reference and on the kernel, and again with each defect put back.

The kernel runs compiled where there is a GPU and under Triton's interpreter elsewhere (see conftest.py).
"""

import doctest
import importlib.util
import re
import resource
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dcp_fix import broken, norm_rope
from dcp_fix.base.equality import close, same_bytes
from dcp_fix.kv_cache import new_index_cache, new_latent_cache, read_index, read_latent
from dcp_fix.norm_rope import IndexerInputs, fused_norm_rope, fused_norm_rope_reference
from tests.norm_rope_cases import CASES, Run
from tests.triton_rounding import round_like_torch

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="an out-of-range store would take the GPU with it")
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def torch_rounds(monkeypatch):
    if DEVICE == "cpu":
        round_like_torch(monkeypatch)


def kernel():
    from dcp_fix.norm_rope.launcher import fused_norm_rope_triton

    return fused_norm_rope_triton


def implementation(backend):
    return (fused_norm_rope_reference, "cpu") if backend == "reference" else (kernel(), DEVICE)


def test_docstrings():
    assert doctest.testmod(norm_rope).failed == 0


# --- the cases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", list(CASES.values())[::4], ids=list(CASES)[::4])
def test_kernel_with_several_rows_a_program(case, monkeypatch):
    """As for many tokens: the same bytes as with a row a program, up to the order of the sums."""
    from dcp_fix.norm_rope import launcher as norm_rope_launcher

    monkeypatch.setattr(norm_rope_launcher, "MANY_TOKENS", 1)
    run = Run(case, DEVICE)
    run.go(kernel())
    run.check()


@cases
def test_reference(case):
    run = Run(case)
    assert run.go(fused_norm_rope_reference) is run.out["q"]
    run.check()


@cases
def test_kernel(case):
    reference, run = Run(case), Run(case, DEVICE)
    reference.go(fused_norm_rope_reference)
    assert run.go(kernel()) is run.out["q"]
    for name, out in run.out.items():
        assert close(out.cpu(), reference.out[name], ulps=4 if case.dtype == torch.float32 else 1, floor=1.0)
    run.check()


def touched_by_skipping_all_rows(run):
    """Every case with a row that owns no slot, or with no slots at all: the query is always asked for."""
    return run.slots is None or (run.slots < 0).any().item()


def touched_by_skipping_dense_rows(run):
    """Those where such a row has more to do than its query: dense rows, or an index slot of its own."""
    if run.slots is None:
        return False
    skipped = run.slots < 0
    indexed = run.index_cache is not None and (run.index_slots[skipped] >= 0).any().item()
    return skipped.any().item() and (bool(run.case.dense) or indexed)


DEFECTS = {  # name: (puts it back, which cases it touches, the effects it may leave unwritten)
    "skip_all_rows": (broken.skip_all_rows, touched_by_skipping_all_rows, "q_out"),
    "skip_dense_rows": (broken.skip_dense_rows, touched_by_skipping_dense_rows, "kv_out|kpe_out|index cache"),
}


@pytest.mark.parametrize("backend", ["reference", "kernel"])
@pytest.mark.parametrize("defect", DEFECTS)
def test_putting_a_defect_back_fails_exactly_the_cases_it_touches(defect, backend):
    put_back, touched, effects = DEFECTS[defect]
    function, device = implementation(backend)
    tried = dict(list(CASES.items())[:: 1 if backend == "reference" else 5])
    expected, failing = {name for name, case in tried.items() if touched(Run(case))}, set()
    for name, case in tried.items():
        run = Run(case, device)
        run.go(put_back(function))
        try:
            run.check()
        except AssertionError as error:
            assert re.match(f"({effects}): rows .* are not written", str(error)), (name, error)
            failing.add(name)
    assert failing == expected
    assert 0 < len(failing) < len(tried)


def test_there_are_at_least_67_cases_and_the_defects_touch_different_ones():
    assert len(CASES) >= 67
    runs = {name: Run(case) for name, case in CASES.items()}
    query = {name for name, run in runs.items() if touched_by_skipping_all_rows(run)}
    dense = {name for name, run in runs.items() if touched_by_skipping_dense_rows(run)}
    assert dense < query < set(CASES)


# --- single properties ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "kernel"])
@pytest.mark.parametrize("defect", [None, *DEFECTS])
def test_case_15_every_row_is_written_and_no_cache_byte_of_a_negative_slot(backend, defect):
    function, device = implementation(backend)
    put_back = DEFECTS[defect][0] if defect else lambda corrected: corrected
    run = Run(CASES["only-kv-out-case-15"], device)
    run.go(put_back(function))
    written = {name: (~out.isnan()).all(1).tolist() for name, out in run.out.items()}
    owned = [True, False, True, False, True]
    assert written["q"] == (owned if defect == "skip_all_rows" else [True] * 5)
    assert written["kv"] == ([True] * 5 if defect is None else owned)
    cached = run.cache.cpu().ne(0x7F).any(2).nonzero().tolist()
    assert cached == [[0, 0], [0, 1], [2, 2]]  # slots 0, 1 and 130, whatever the defect
    assert run.topk[:5].eq(-1).all()


@pytest.mark.parametrize("backend", ["reference", "kernel"])
def test_int32_positions_and_slots_give_the_same_bytes(backend):
    function, device = implementation(backend)
    runs = [Run(CASES["case-13-rank1"], device) for _ in range(2)]
    runs[1].positions, runs[1].slots = runs[1].positions.int(), runs[1].slots.int()
    runs[1].own_index_slots = runs[1].own_index_slots.int()
    for run in runs:
        run.go(function)
    for name in runs[0].memory:
        assert same_bytes(*(run.memory[name].cpu().view(torch.uint8) for run in runs))


@pytest.mark.parametrize("backend", ["reference", "kernel"])
def test_without_q_out_a_new_tensor_is_returned(backend):
    function, device = implementation(backend)
    runs = [Run(CASES["fp32-into-bf16-dcp"], device) for _ in range(2)]
    expected = runs[0].go(function)
    runs[1].out["q"] = None
    got = runs[1].go(function)
    assert same_bytes(got.cpu(), expected.cpu()) and got.data_ptr() != expected.data_ptr()


def test_the_public_function_runs_the_reference_on_a_cpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "dcp_fix.norm_rope_triton", None)  # importing it would now fail
    run = Run(CASES["D2-I4"])
    run.go(fused_norm_rope)
    run.check()


@pytest.mark.gpu
def test_the_public_function_runs_the_kernel_on_a_gpu():
    runs = [Run(CASES["bf16-into-fp8_ds_mla-dcp"], "cuda") for _ in range(2)]
    runs[0].go(fused_norm_rope)
    runs[1].go(kernel())
    for name in runs[0].memory:
        assert same_bytes(*(run.memory[name].view(torch.uint8) for run in runs))


# --- 64-bit offsets (case 10) -----------------------------------------------------------------------------------------

FAR = {
    "fp8_ds_mla": [3_273_603, 3_273_604, 3_273_700],  # 656 bytes per entry: the second is the first beyond 2**31
    "fp8": [3_728_270, 3_728_271, 3_728_400],  # 576 bytes
    "index": [16_268_800, 16_268_871, 16_269_000],  # 132 bytes, in blocks of 8448
}


def far_run(function, which, device, slots):
    """Writes three tokens to `slots` of a cache whose memory is not touched elsewhere; returns the rows read back.

    As much memory again lies below the cache, so that an offset that wraps around lands in it.
    """
    slots = torch.tensor(slots)
    case = replace(CASES["fp32-into-fp8_ds_mla-owned"], name="far", tokens=3, cache_format=None, dense=())
    run = Run(case, device)
    like = new_index_cache(0) if which == "index" else new_latent_cache(0, which)
    size = like.shape[1] * like.shape[2]
    blocks = int(slots.max()) // 64 + 1
    below = 2**31 if blocks * size > 2**31 else 0
    memory = torch.empty(below + blocks * size, dtype=torch.uint8, device=device)
    cache = memory[below:].view(blocks, *like.shape[1:]).view(like.dtype)
    run.slots, scale = slots, None
    if which == "index":
        run.case, run.index_cache, run.own_index_slots = replace(case, index_rows="same"), cache, None
    else:
        run.case, run.cache = replace(case, cache_format=which, indexer=None), cache
        scale = 0.013 if which == "fp8" else None
    for slot in slots.tolist():  # poison where the rows belong
        row = cache[slot // 64].view(torch.uint8)
        row[:] = 0x7F
    run.go(function)
    slots = slots.to(device)
    return read_index(cache, slots) if which == "index" else read_latent(cache, slots, which, scale)


@pytest.mark.parametrize("backend", ["reference", "kernel"])
@pytest.mark.parametrize("which", FAR)
def test_case_10_slots_beyond_2_gib(which, backend):
    function, device = implementation(backend)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    far = far_run(function, which, device, FAR[which])
    assert same_bytes(far.cpu(), far_run(function, which, device, [0, 1, 2]).cpu())
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert device == "cuda" or grown < 200_000  # KiB: the rest is never touched; on a GPU it is the compiler that grows


@interpreted
@pytest.mark.parametrize("which", FAR)
def test_case_10_fails_when_the_kernel_counts_in_32_bits(which, tmp_path, monkeypatch):
    from dcp_fix.norm_rope import kernel as norm_rope_kernel
    from dcp_fix.norm_rope import launcher as norm_rope_launcher

    source = Path(norm_rope_kernel.__file__).read_text()
    narrow = source.replace(".to(tl.int64)", ".to(tl.int32)").replace("-1, tl.int64)", "-1, tl.int32)")
    assert narrow != source
    path = tmp_path / "narrow.py"
    path.write_text(narrow)
    spec = importlib.util.spec_from_file_location("narrow", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "narrow", module)
    spec.loader.exec_module(module)
    expected = far_run(kernel(), which, "cpu", [0, 1, 2])
    monkeypatch.setattr(norm_rope_launcher, "fused_norm_rope_kernel", module.fused_norm_rope_kernel)
    near, far = (far_run(kernel(), which, "cpu", slots) for slots in ([0, 1, 2], FAR[which]))
    assert same_bytes(near, expected)
    assert not same_bytes(far, expected)


# --- bad input --------------------------------------------------------------------------------------------------------


def bad(**changes):
    """A run whose attributes are replaced: {"q": tensor} or {"slots": function of the old value}."""
    run = Run(CASES["fp32-into-fp8_ds_mla-owned"])
    for name, value in changes.items():
        setattr(run, name, value(getattr(run, name)) if callable(value) else value)
    return run


@pytest.mark.parametrize("backend", ["reference", "kernel"])
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kv": torch.zeros(5, 511)}, r"kv has shape \(5, 511\), expected \(5, 512\)"),
        ({"q": torch.zeros(4, 256)}, r"q has shape \(4, 256\), expected \(5, 256\)"),
        ({"q_weight": torch.zeros(255)}, r"q_weight has shape \(255,\)"),
        ({"k_pe": torch.zeros(5, 128)[:, ::2]}, r"k_pe has strides \(128, 2\).*call .contiguous"),
        ({"slots": lambda s: s[:-1]}, r"slot_mapping has shape \(4,\)"),
        ({"slots": lambda s: s + 320}, "lies outside a cache of 320 slots; allocate more blocks"),
        ({"positions": lambda p: p + 1100}, "of a row that owns a slot lies outside the cos/sin table of 1100"),
        ({"positions": lambda p: p - 1100}, "of a row that owns a slot lies outside the cos/sin table of 1100"),
        ({"index_k": torch.zeros(5, 64)}, r"indexer.k has shape \(5, 64\)"),
        ({"index_cos_sin": torch.zeros(1101, 130)}, "R even and <= 128"),
        ({"topk": torch.zeros(4, 8, dtype=torch.int32)}, "needs a row for each of 5 tokens"),
        ({"cache": lambda c: c[..., :576]}, "make one with new_latent_cache"),
        ({"index_cache": lambda c: c[..., :131]}, "make one with new_index_cache"),
        ({"own_index_slots": torch.full((5,), 10**9)}, "slot 1000000000 lies outside"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_at_the_door_and_nothing_is_written(changes, message, backend):
    function = implementation(backend)[0]
    if backend == "kernel" and DEVICE == "cuda":
        pytest.skip("values are not read on a GPU")
    run = bad(**changes)
    with pytest.raises(ValueError, match=message):
        run.go(function)
    assert run.out["q"].isnan().all() and run.memory["cache"].eq(0x7F).all()


def test_an_indexer_is_the_only_reason_to_reset_topk():
    run = Run(CASES["no-indexer-dcp-dense"])
    run.go(fused_norm_rope_reference)
    assert run.topk.eq(7).all()
    assert IndexerInputs.__dataclass_fields__["slot_mapping"].default is None
