"""Memory that nobody has written, made visible: it holds NaN, or the largest integer."""

import contextlib
from unittest import mock

import torch


@contextlib.contextmanager
def unwritten_memory_is_nan():
    """torch.empty and its kin give NaN (or the largest integer), to tell a row nobody wrote from one of zeros."""
    with contextlib.ExitStack() as patches:
        for name in ("empty", "empty_like", "empty_strided"):
            make = getattr(torch, name)
            patches.enter_context(mock.patch.object(torch, name, lambda *a, _make=make, **k: poison(_make(*a, **k))))
        yield


def poison(x: torch.Tensor) -> torch.Tensor:
    """Fill x, which may be of any dtype and stride, with NaN or the largest integer."""
    if x.dtype.is_floating_point and x.element_size() > 1:
        return x.fill_(torch.nan)
    return x.view(torch.uint8).fill_(0x7F).view(x.dtype) if x.element_size() == 1 else x.fill_(torch.iinfo(x.dtype).max)
