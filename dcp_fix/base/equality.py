"""Equality and digests: what "identical" and "close" mean here.

`same_bytes` compares bits: equal NaN payloads are the same, 0.0 and -0.0 are not. `close` counts units in the last
place of the compared dtype, and NaN is close to nothing. Only the first may be called identical.

This file does not decide what to compare, and it never rounds a number.
"""

import hashlib
import math

import torch


def raw_bytes(data) -> bytes:
    """The bytes of a tensor (row-major, its own dtype), of a list of ints (as int64), or bytes as they are."""
    if isinstance(data, bytes):
        return data
    if not isinstance(data, torch.Tensor):
        data = torch.tensor(list(data), dtype=torch.int64)
    return data.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def digest(data) -> str:
    """SHA256, in hex, of `raw_bytes(data)`. Shape and dtype are not part of it; compare those with `same_bytes`.

    >>> digest([1, 2]) == digest(torch.tensor([[1], [2]]))
    True
    """
    return hashlib.sha256(raw_bytes(data)).hexdigest()


def same_bytes(a, b) -> bool:
    """Whether two tensors (or lists of ints, or bytes) agree in dtype, shape and every bit."""
    if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
        raise ValueError(f"cannot compare {type(a).__name__} with {type(b).__name__}: pass two of a kind")
    if isinstance(a, torch.Tensor) and (a.dtype != b.dtype or a.shape != b.shape):
        return False
    return raw_bytes(a) == raw_bytes(b)


def ulps_apart(a: torch.Tensor, b: torch.Tensor, floor=0.0) -> float:
    """The largest difference between two floating-point tensors of one dtype and shape, in units in the last place.

    The unit is that of the larger of |a|, |b| and `floor`, so 1.0 and its neighbour below are half a unit apart. Sums
    that cancel leave tiny elements with the rounding of large ones: name the magnitude of the summands as `floor` (a
    number, or a tensor that broadcasts). A NaN anywhere, or an infinity that the other side lacks, is `math.inf` apart.
    """
    if a.dtype != b.dtype or a.shape != b.shape or not a.is_floating_point():
        raise ValueError(
            f"cannot count ulps between {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}: "
            "pass floating-point tensors of one dtype and shape"
        )
    if a.numel() == 0:
        return 0.0
    x, y = a.detach().cpu().double(), b.detach().cpu().double()
    same = x == y  # equal infinities too, whose difference is NaN
    magnitude = torch.maximum(torch.maximum(x.abs(), y.abs()), torch.as_tensor(floor).detach().cpu().double())
    apart = torch.where(same, 0.0, (x - y).abs() / unit_in_last_place(magnitude, a.dtype))
    return apart.nan_to_num(nan=math.inf, posinf=math.inf).max().item()


def unit_in_last_place(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The spacing of `dtype` at each magnitude (fp64): 2**exponent * eps, and never below the smallest subnormal."""
    info = torch.finfo(dtype)
    bits = magnitude.clamp_min(info.smallest_normal).contiguous().view(torch.int64)
    power_of_two = (bits & 0x7FF0_0000_0000_0000).view(torch.float64)  # exponent field alone: exact, unlike pow or log2
    return power_of_two * info.eps


def close(a: torch.Tensor, b: torch.Tensor, ulps: float, floor=0.0) -> bool:
    """Whether no element of `a` is further than `ulps` units from `b`; `ulps_apart` defines the unit and `floor`."""
    return ulps_apart(a, b, floor) <= ulps


def first_difference(a, b):
    """Where two token lists, bytes or tensors first differ in a bit: an index, a tuple for a tensor of several dims.

    None if they are the same. A list that is the start of the other differs where it ends.
    """
    if not isinstance(a, torch.Tensor):
        pairs = enumerate(zip(a, b, strict=False))
        end = None if len(a) == len(b) else min(len(a), len(b))
        return next((i for i, (x, y) in pairs if x != y), end)
    if a.dtype != b.dtype or a.shape != b.shape:
        raise ValueError(
            f"cannot compare {a.dtype} {tuple(a.shape)} with {b.dtype} {tuple(b.shape)} element by element"
        )
    if same_bytes(a, b):
        return None
    rows = [t.detach().cpu().contiguous().view(-1).view(torch.uint8).view(a.numel(), -1) for t in (a, b)]
    differs = (rows[0] != rows[1]).any(dim=1).nonzero()
    index = tuple(int(i) for i in torch.unravel_index(differs[0, 0], a.shape))
    return index[0] if a.dim() == 1 else index
