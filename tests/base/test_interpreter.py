"""Triton's interpreter under versions that it cannot run with: one sentence, from each kernel that loops."""

import pytest
import torch

from dcp_fix.base import interpreter
from dcp_fix.base.interpreter import InterpreterUnusable, check_interpreter


@pytest.fixture
def versions(monkeypatch):
    """Pretends that these are installed."""

    def pretend(triton, numpy):
        monkeypatch.setattr(interpreter, "version_of", {"triton": triton, "numpy": numpy}.get)

    return pretend


@pytest.mark.parametrize("triton, numpy", [((3, 6), (2, 3)), ((3, 7), (2, 5)), ((3, 7), (2, 4)), ((4, 0), (3, 0))])
def test_pairs_that_work(versions, triton, numpy):
    versions(triton, numpy)
    check_interpreter()


@pytest.mark.parametrize("numpy", [(2, 4), (2, 5)])
def test_the_sentence_names_both_versions_and_the_remedy(versions, numpy):
    versions((3, 6), numpy)
    with pytest.raises(
        InterpreterUnusable, match=rf"triton 3\.6 .* numpy 2\.{numpy[1]}: install numpy<2\.4 or triton>=3\.7"
    ):
        check_interpreter()


def test_the_versions_are_those_that_are_imported():
    triton, numpy = pytest.importorskip("triton"), pytest.importorskip("numpy")
    interpreter.version_of.cache_clear()
    assert triton.__version__.startswith(interpreter.shown(interpreter.version_of("triton")) + ".")
    assert numpy.__version__.startswith(interpreter.shown(interpreter.version_of("numpy")) + ".")


def test_kernels_that_loop_ask_first(versions):
    pytest.importorskip("triton")
    from dcp_fix.attention import kernel as attention_kernel
    from dcp_fix.attention import spill
    from dcp_fix.exact import kernel as exact_kernel

    versions((3, 6), (2, 5))
    q, kv, slots = torch.zeros(1, 2, 576), torch.zeros(1, 64, 576), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(InterpreterUnusable):
        attention_kernel.sparse_partial_triton(q, kv, slots, 1.0)
    with pytest.raises(InterpreterUnusable):
        exact_kernel.leaf_partials_triton(q, kv, slots, slots, torch.zeros(1, dtype=torch.int64), 1, 2, 1.0)
    counts = torch.ones(1, dtype=torch.int32)
    with pytest.raises(InterpreterUnusable):
        spill.with_spill(q, kv, "bf16", slots.int(), counts, 1, 1.0, torch.zeros(1, 2, 512), torch.zeros(1, 2))
