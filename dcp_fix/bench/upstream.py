"""What ships, to measure against: the kernels of a vLLM wheel, unpacked or installed, without importing vLLM.

    pieces = Pieces(Path("site-packages"))
    pieces.combine()          the kernels of v1/attention/ops/dcp.py: weigh, pack, merge
    pieces.norm_rope()        fused_norm_rope of models/deepseek_v32/common/kernels.py
    pieces.flashmla()         attention_flashmla.FlashMLA

A module is executed from its file, among the stand-ins of doctor/world.py. So it works where vLLM's requirements are
missing, and only for what these modules do on their own: launch Triton kernels. Nothing here is copied: without the
user's own wheel there is nothing to measure.
It does not: run collectives, or choose defaults for the user.
"""

from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from dcp_fix.attention import flashmla as attention_flashmla
from dcp_fix.base.errors import UserError, shown
from dcp_fix.doctor.stand_ins import Hopper, module
from dcp_fix.doctor.target import version_of
from dcp_fix.doctor.world import load_module

COMBINE = "vllm/v1/attention/ops/dcp.py"
NORM_ROPE = "vllm/models/deepseek_v32/common/kernels.py"


class Pieces:
    """The vLLM in `root`; `version` as its metadata says. Raises UserError where there is none."""

    def __init__(self, root: Path) -> None:
        if not (root / "vllm").is_dir():
            raise UserError(
                f"{root}: holds no folder vllm; name the folder that a wheel was unpacked or installed into"
            )
        self.root = root
        self.version = version_of(root)[0] or "of unknown version"

    def flashmla(self) -> attention_flashmla.FlashMLA:
        return attention_flashmla.load(self.root)

    def combine(self) -> "Combine":
        names = ("CorrectAttnCPOutKernel", "_dcp_a2a_pack_send", "_dcp_a2a_unpack_combine")
        return Combine(self._module(COMBINE, *names))

    def norm_rope(self):
        return self._module(NORM_ROPE, "fused_norm_rope").fused_norm_rope

    def _module(self, path: str, *names: str) -> ModuleType:
        """The module of that file. Raises UserError for one that cannot be executed or lacks a name."""
        file = self.root / path
        if not file.is_file():
            raise UserError(f"{self.root}: vLLM {self.version} has no {path}; 0.29 and 0.30 do")
        try:
            found = load_module(self.root, path.removesuffix(".py").replace("/", "."), stand_ins())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever somebody else's code does
            raise UserError(f"{file}: cannot be executed ({type(error).__name__}: {shown(error)})") from None
        if lacking := [name for name in names if not hasattr(found, name)]:
            raise UserError(f"{file}: has no {', '.join(lacking)}; 0.29 and 0.30 do")
        return found


class Combine:
    """Upstream's three combine kernels under the shapes of combine/kernel.py, in the type of `out`."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def weigh(self, out: Tensor, lses: Tensor, rank: int) -> Tensor:
        """out [T, H, D], lses [P, T, H] -> weighed [T, H, D]; upstream overwrites `out`, here it writes beside it."""
        weighed, log = torch.empty_like(out), torch.empty_like(lses[0])
        self.module.CorrectAttnCPOutKernel.kernel[out.shape[0], out.shape[1]](
            out, weighed, lses, log, *out.stride(), *lses.stride(), rank, HEAD_DIM=out.shape[2], N_ROUNDED=len(lses),
            IS_BASE_E=True,
        )  # fmt: skip
        return weighed

    def pack(self, out: Tensor, lse: Tensor, ranks: int) -> Tensor:
        """out [T, H, D], lse [T, H] -> [P, T, h, D + 1 or 2]."""
        (tokens, heads, width), extra = out.shape, 4 // out.itemsize
        sent = torch.empty(ranks, tokens, heads // ranks, width + extra, dtype=out.dtype, device=out.device)
        self.module._dcp_a2a_pack_send(out, lse, sent, ranks, heads // ranks, width, extra)
        return sent

    def merge(self, arrived: Tensor, width: int) -> Tensor:
        """What `pack` made, of all ranks -> [T, h, D]."""
        return self.module._dcp_a2a_unpack_combine(arrived, width, arrived.shape[-1] - width, False, True)


class Platform(Hopper):
    """What the launchers ask of the platform, of this machine."""

    def is_cuda(self) -> bool:
        return torch.cuda.is_available()

    def is_arch_support_pdl(self) -> bool:
        return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def stand_ins() -> dict[str, ModuleType]:
    """What the modules use of the rest of vLLM."""
    return {
        "vllm.platforms": module(current_platform=Platform()),
        "vllm.utils.torch_utils": module(is_quantized_kv_cache=lambda name: name.startswith("fp8")),
    }
