"""Scratch rows: the output buffers of the fused norm/RoPE kernel, and what lies in them before it writes.

A caching allocator hands a kernel memory that somebody else has used. As long as every row is written that does not
matter; when rows are skipped (the defects of vLLM issues 50095 and 54907), what lies there becomes a query or a key.
The buffers here belong to the engine, so that what lies there is the same on every run:

    previous   another request's rows, left by `remember`; never reset, so also those of this request's earlier steps
    zeros      zeros, before every launch
    noise      seeded noise of the size of normed rows, before every launch

Nothing here ever leaves a row of the same prompt at its own position: that would hide an unwritten row completely.

It does not: allocate per step. The addresses never change, as a CUDA graph needs.
"""

import torch
from torch import Tensor

from dcp_fix.base.errors import UserError

STALE = ("previous", "zeros", "noise")
NOISE_SEED = 50095


class Scratch:
    """Buffers `names` -> [rows, width] of one rank; `stale` says what unwritten rows hold."""

    def __init__(self, widths: dict[str, int], rows: int, stale: str, device: torch.device, dtype: torch.dtype) -> None:
        if stale not in STALE:
            raise UserError(f"stale memory {stale!r} is not one of {', '.join(STALE)}")
        self.stale, self.device = stale, device
        self.buffers = {name: torch.zeros(rows, width, device=device, dtype=dtype) for name, width in widths.items()}
        self.noise = {name: noise_like(buffer) for name, buffer in self.buffers.items()} if stale == "noise" else {}

    def take(self, name: str, rows: int) -> Tensor:
        """The first `rows` rows of a buffer [rows, width], as an allocator would hand them over."""
        view = self.buffers[name][:rows]
        if self.stale == "zeros":
            view.zero_()
        elif self.stale == "noise":
            view.copy_(self.noise[name][:rows])
        return view

    def remember(self, rows: int) -> None:
        """Let the first `rows` rows, which a request has just left, lie everywhere: one after the other to the end."""
        for buffer in self.buffers.values():
            for start in range(rows, buffer.shape[0], rows):
                end = min(start + rows, buffer.shape[0])
                buffer[start:end] = buffer[: end - start]


def noise_like(buffer: Tensor) -> Tensor:
    """Standard normal rows, the same on every run and every device."""
    generator = torch.Generator().manual_seed(NOISE_SEED)
    return torch.randn(buffer.shape, generator=generator).to(buffer)
