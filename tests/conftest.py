"""What every test file shares: one torch thread, one meaning of TRITON_INTERPRET, `gpu` tests skipped without a GPU."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from dcp_fix.base.interpreter import InterpreterUnusable

# `make fuzz` takes the second profile. No deadline: a busy machine is no error.
for name, examples in {"tests": 200, "fuzz": 10_000}.items():
    settings.register_profile(
        name, max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
    )
settings.load_profile("tests")

# What the caller's terminal wants is nothing to the output that tests compare, also of the processes that they start.
for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
    os.environ.pop(name, None)

# Two pytest workers share two cores. Rank threads of a LocalGroup set their own number.
torch.set_num_threads(1)

# Triton reads this when it decorates a kernel, and every test file is imported before the first test runs: decided
# here, or the first file to set it would decide for the files collected after it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    """Skip, with the reason in the report, what Triton's interpreter cannot run under these versions."""
    try:
        return (yield)
    except InterpreterUnusable as reason:
        pytest.skip(str(reason))


# `make quick` leaves these out: beginnings of node ids, a whole folder, file or test of more than about two seconds.
SLOW = (
    "tests/attention/test_attention.py::test_ranks_take_turns",
    "tests/attention/test_flashmla.py",
    "tests/attention/test_kernel.py::test_compiles",
    "tests/base/test_process.py",
    "tests/bench/test_kernel_bench.py",
    "tests/compare/test_compare.py::test_an_attention_without",
    "tests/compare/test_compare.py::test_dcp2",
    "tests/compare/test_compare.py::test_what_passes_is_waited_for",
    "tests/doctor/test_doctor.py",
    "tests/engine/test_cached_rows.py::test_in_exact_mode",
    "tests/engine/test_decode_step.py::test_fixed_memory",
    "tests/engine/test_engine.py::test_dense_prefill",
    "tests/engine/test_exact_tp.py",
    "tests/exact/test_exact.py",
    "tests/exact/test_kernel.py",
    "tests/ladder/",
    "tests/learn/test_browser.py",
    "tests/learn/test_explorer.py",
    "tests/learn/test_notebook_mutants.py",
    "tests/learn/test_notebooks.py::test_slides",
    "tests/norm_rope/test_norm_rope.py::test_hopper_code",
    "tests/norm_rope/test_norm_rope.py::test_putting_a_defect_back",
    "tests/ranks/test_faults.py",
    "tests/ranks/test_torch_group.py",
    "tests/real_vllm/test_real_ladder.py",
    "tests/records/test_recorded.py",
    "tests/test_cli.py::test_a_damaged_checkpoint",
    "tests/test_cli.py::test_sizes_and_devices",
    "tests/tiny/test_tiny.py::test_checkpoint",
    "tests/tiny/test_tiny.py::test_training_lowers",
    "tests/tools/test_endure.py",
    "tests/upstream/",
    "tests/verify/",
)
HERE = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items):
    """Mark what is slow; skip `gpu` tests, with the reason in the report, where there is no CUDA device."""
    for item in items:
        name = f"{item.path.relative_to(HERE).as_posix()}::{item.name}" if item.path.is_relative_to(HERE) else ""
        if name.startswith(SLOW):
            item.add_marker("slow")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
