"""kernel_bench.py under the interpreter, in small sizes and fp32: right results are timed, wrong ones refused."""

import pytest
import torch

pytest.importorskip("triton")
from dcp_fix.base.errors import UserError
from dcp_fix.bench import kernel_bench, kernel_cases
from dcp_fix.bench.kernel_bench import Ceilings, KernelTime, measure
from dcp_fix.bench.upstream import NORM_ROPE, Pieces

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning"),  # numpy, in the interpreter
    pytest.mark.skipif(torch.cuda.is_available(), reason="the sizes of a CPU"),
]
CPU, LIMITS = torch.device("cpu"), Ceilings(bytes=1e12, flops=1e12)
MAKERS = {
    "launch": lambda pieces: kernel_cases.norm(1, 0, CPU, pieces, host=True),
    "norm": lambda pieces: kernel_cases.norm(3, 0.5, CPU, pieces),
    "ag_rs": lambda pieces: kernel_cases.combine("ag_rs", 2, torch.float32, CPU, pieces),
    "a2a": lambda pieces: kernel_cases.combine("a2a", 2, torch.float32, CPU, pieces),
    "attend": lambda pieces: kernel_cases.attend(2, 3, 4, CPU, pieces),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    sizes = {"HEADS": 8, "TOPK": 24, "ROWS": 128, "QUERY": 64, "POSITIONS": 32, "BF16": torch.float32}
    for name, value in sizes.items():
        monkeypatch.setattr(kernel_cases, name, value)
    monkeypatch.setattr(kernel_cases, "fused_norm_rope", reference_norm)
    monkeypatch.setattr(kernel_bench, "CALLS", 1)
    monkeypatch.setattr(kernel_bench, "launches", lambda call: [call() and 4.0] + [5.0, 6.0, 9.0])
    monkeypatch.setattr(kernel_bench, "replays", lambda call, repeats=20: [call() and 0.016, 0.020, 0.024, 0.036])


def reference_norm(inputs):
    """As kernel under the interpreter as elsewhere."""
    from dcp_fix.norm_rope.launcher import fused_norm_rope_triton

    return fused_norm_rope_triton(inputs)


def spoiled(case, how):
    """The case with a contender that spoils what the first one computes."""
    call = case.contenders["here"]
    case.contenders["spoiled"] = lambda i: how(call(i))
    return case


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_case_is_right_and_timed(make):
    case = make(None)
    (row,) = measure(case, LIMITS)
    assert row.contender == "here" and row.error <= row.allowed and (row.low, row.us, row.high) == (4.25, 5.5, 8.25)
    assert row.floor_us == 0 if case.host else row.floor_us == round(max(case.bytes, case.flops) * 1e-6, 3) > 0


WRONG = {
    "off by 2 percent": lambda x: x.mul_(1.02),
    "one row unwritten": lambda x: x.select(-2, 0).fill_(torch.nan) is not None and x,
}


def spoil(change, result):
    """Change what a case checks first: q_out, the only tensor, or out."""
    change(result["q_out"] if isinstance(result, dict) else result if torch.is_tensor(result) else result[0])
    return result


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_what_is_wrong_is_not_timed(make, change):
    rows = measure(spoiled(make(None), lambda result: spoil(change, result)), LIMITS)
    assert next(rows).contender == "here"
    with pytest.raises(UserError, match="spoiled is .* from the fp64 reference, .* is allowed"):
        next(rows)


def test_memory_that_is_never_written_is_not_a_result():
    case = MAKERS["attend"](None)
    out, lse = case.contenders["here"](0)
    case.contenders["here"] = lambda i: (torch.empty_like(out), lse)  # where the right result may still lie
    with pytest.raises(UserError, match="here is nan from"):
        next(measure(case, LIMITS))
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_table_compares_with_the_first_of_upstream():
    row = lambda name, us: KernelTime("attend", {"T": 1}, name, 1e-3, 1e-2, us, us, us, 2.0)  # noqa: E731
    rows = [row("here", 4.0), row("upstream as fed", 8.0), row("upstream packed and cut", 5.0)]
    assert kernel_bench.baseline(rows, rows[0]) is rows[1]
    cells = {column.header: list(column.cells) for column in kernel_bench.table(rows).columns}
    assert cells["x upstream"] == ["0.50", "1.00", "0.62"] and cells["of floor"] == ["50%", "25%", "40%"]


def test_without_a_gpu_nothing_is_timed():
    with pytest.raises(UserError, match="there is no GPU here"):
        kernel_bench.main(("norm",), None, None)


def test_unknown_works_and_folders_without_vllm_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match="no work sort; choose from launch, norm, combine, attend"):
        kernel_bench.main(("norm", "sort"), None, None)
    with pytest.raises(UserError, match="holds no folder vllm"):
        kernel_bench.main(("norm",), tmp_path, None)


@pytest.mark.parametrize(
    "source, said",
    [
        ("import sys; sys.exit(0)", "cannot be executed .SystemExit: 0."),
        ("raise KeyError('x')", "cannot be executed .KeyError: 'x'."),
        ("def fused(", "cannot be executed .SyntaxError"),
        ("x = 1", "has no fused_norm_rope"),
    ],
)
def test_a_vllm_whose_module_is_no_help_is_refused(tmp_path, source, said):
    file = tmp_path / NORM_ROPE
    file.parent.mkdir(parents=True)
    file.write_text(source)
    with pytest.raises(UserError, match=f"kernels.py: {said}"):
        Pieces(tmp_path).norm_rope()
