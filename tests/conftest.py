"""What every test file shares: one torch thread, one meaning of TRITON_INTERPRET, `gpu` tests skipped without a GPU."""

import os

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


def pytest_collection_modifyitems(items):
    """Skip `gpu` tests, with the reason in the report, where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
