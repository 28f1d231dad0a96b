"""Lets torch round in Triton's interpreter, which by itself truncates fp32 -> bf16 and carries wrongly into fp8.

It replaces one private function, for the duration of one test. Should Triton rename it, monkeypatch fails by name.
"""

import torch

_TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
}


def round_like_torch(monkeypatch) -> None:
    """Every conversion between floating-point types rounds to nearest even and saturates at fp8's largest value."""
    monkeypatch.setattr("triton.runtime.interpreter._convert_float", _convert)


def _convert(values, source, target, rounding_mode):
    """Same contract as the function it replaces: arrays of raw values in, arrays of raw bits out."""
    x = torch.from_numpy(values.copy()).view(_TORCH[source.name]).float()
    if target.name == "fp8e4nv":
        x = x.clamp(-448.0, 448.0)
    bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[_TORCH[target.name].itemsize]
    return x.to(_TORCH[target.name]).view(bits).numpy()
