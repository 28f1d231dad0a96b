"""Sparse MLA partial, a second backend: FlashMLA's sparse kernels as a vLLM wheel ships them, where a user names one.

    flashmla = load(Path("site-packages"))        the folder that holds vllm/_flashmla_C.abi3.so
    use(flashmla)                                 from now on attention_triton.py asks `pays`

Two of its kernels are of use here, both in bf16, heads padded to 64, lse natural, +inf or -inf for a token without key:

    prefill(q, rows, packed, counts, scale)       rows unpacked once; takes the length of every token's packed slots
    decode(q, cache, slots, scale)                fp8_ds_mla entries; walks every column it is given, holes too

The first spends nothing on holes and needs no length on the host, so a CUDA graph can hold it and no key is ever
dropped. The second must be fed packed slots cut to the longest row, which only a host that waited knows: cut shorter it
would drop keys, so it is measured (kernel_bench.py) and not chosen by itself.

Measured on one H200 with vLLM 0.30.0, K = 2048, T = 8192, milliseconds with the unpacking, ours over the same rows:

    heads        64                    32                    16
    D = 1        4.84 of ours 9.27     5.06 of ours 6.06     4.83 of ours 4.06
    D = 4        1.27 of ours 2.78     1.79 of ours 1.77     1.63 of ours 1.18
    D = 8        0.85 of ours 1.72     1.36 of ours 1.03     1.19 of ours 0.68

so it is chosen above 32 heads (below 64 it pads). Its output is rounded to bf16 once more, by half an ulp.
It does not: import vllm, or look for one by itself.
"""

from pathlib import Path

import torch
from torch import Tensor

from dcp_fix.combine_triton import merge
from dcp_fix.errors import UserError
from dcp_fix.kv_cache import LATENT

LIBRARY = "vllm/_flashmla_C.abi3.so"
HEADS = 64  # it computes this many, or twice as many
PAYS_ABOVE = 32  # heads
CHOSEN: list = []  # the one backend in use, or nothing


class FlashMLA:
    """FlashMLA's operators, under the names and shapes of this package."""

    def __init__(self, operators) -> None:
        self.operators = operators

    def prefill(self, q: Tensor, rows: Tensor, packed: Tensor, counts: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """q bf16 [T, H, 576], rows bf16 [N, 576], packed int32 [T, K], counts int32 [T] -> out bf16, lse fp32."""
        out, _, lse = self.operators.sparse_prefill_fwd(
            padded(q), rows[:, None], packed[:, None], scale, LATENT, None, counts, None
        )
        return out[:, : q.shape[1]], lse[:, : q.shape[1]]

    def decode(self, q: Tensor, cache: Tensor, slots: Tensor, scale: float, plan=(None, None)):
        """q bf16 [T, H, 576], cache uint8 [B, 64, 656], slots int32 [T, K] -> out bf16, lse fp32, and its schedule,
        which further calls of the same sizes take as `plan`.
        """
        out, lse, *plan = self.operators.sparse_decode_fwd(
            padded(q)[None], cache[..., None, :], slots[None], None, None, *plan, None, None, None, LATENT, scale, None
        )
        return out[0, :, : q.shape[1]], lse[0, : q.shape[1]].T, tuple(plan)


def load(root: Path) -> FlashMLA:
    """FlashMLA of the vLLM in this folder. Raises UserError where there is none, or none that this torch can load."""
    library = root / LIBRARY
    if not library.exists():
        raise UserError(f"{root}: no {LIBRARY} in it; name a folder that a vLLM wheel was unpacked or installed into")
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise UserError(f"{library}: cannot be loaded ({error}); it wants the torch that its vLLM pins") from error
    return FlashMLA(torch.ops._flashmla_C)


def use(backend: FlashMLA | None) -> None:
    """Make `backend` the one that `attend` takes; None: none."""
    CHOSEN[:] = [] if backend is None else [backend]


def pays(heads: int, dtype: torch.dtype) -> bool:
    """Whether a backend is in use that is faster than our kernel for unpacked rows."""
    return bool(CHOSEN) and heads > PAYS_ABOVE and dtype == torch.bfloat16


def attend(q, rows, packed, counts, scale: float, value_scale: float) -> tuple[Tensor, Tensor]:
    """attention.sparse_partial over unpacked rows: out fp32 [T, H, 512], lse fp32 [T, H], neutral where no key is."""
    out, lse = CHOSEN[0].prefill(q, rows, packed, counts, scale)
    out, lse = merge(out[None], lse[None])  # of one partial: fp32, the marks of "no key" made neutral, in one pass
    return out if value_scale == 1.0 else out.mul_(value_scale), lse


def padded(q: Tensor) -> Tensor:
    """q with zero heads up to a multiple of 64."""
    missing = -q.shape[1] % HEADS
    return torch.nn.functional.pad(q, (0, 0, 0, missing)) if missing else q.contiguous()
