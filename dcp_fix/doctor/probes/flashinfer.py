"""Does FlashInfer's sparse decode get a workspace that grows with DCP?

Under DCP the kernel is asked for its LSE, and then takes a slab of statistics out of the workspace that it is given:

    8 bytes * gathered heads * tokens of a batch * 256 + 1 MiB        (vLLM issue 50781; FlashInfer's fmha launcher)

The target's own functions are asked how much they would allocate; on the device "meta", which holds no memory.
"""

import torch

from dcp_fix.doctor.attempt import NotRun, attempt, one_line
from dcp_fix.doctor.stand_ins import module
from dcp_fix.doctor.world import World

MODULE = "vllm.v1.attention.backends.mla.flashinfer_mla_sparse"
REAL = (MODULE, "vllm.v1.attention.backend", "vllm.envs")
STAND_INS = {"vllm.config.cache": module(CacheDType=str)}  # an annotation that is compared with others
DCP, HEADS, TOKENS = 4, 16, 8192  # GLM-5.2 at TP4/DCP4, one batch of the default size
MIB = 1 << 20


def slab(dcp: int, heads: int, tokens: int) -> int:
    """Bytes that the kernel takes on top of its scratch, by the formula of the module docstring."""
    return 8 * heads * dcp * tokens * 256 + MIB


def flashinfer_workspace(world: World, progress) -> tuple[str, str]:
    """The verdict and its evidence."""
    path = world.path_of(MODULE).with_suffix(".py")
    if not path.is_file():
        return "not-applicable", "this release has no FLASHINFER_MLA_SPARSE"
    loaded = world.load(MODULE)
    if not getattr(loaded.FlashInferMLASparseImpl, "can_return_lse_for_decode", False):
        return "not-applicable", "FLASHINFER_MLA_SPARSE of this release returns no LSE and refuses DCP"
    progress("bytes of the workspace", control=True)
    needed = slab(DCP, HEADS, TOKENS)
    source = path.read_text(encoding="utf-8", errors="replace")
    grows = source.count("_required_workspace_bytes(") > 1  # defined, and called by somebody
    asked = attempt(lambda: loaded._required_workspace_bytes(DCP, HEADS, TOKENS) if grows else fixed(loaded))
    if asked.raised:
        raise NotRun(f"the workspace's size cannot be asked for: {one_line(asked.raised)}")
    sizes = f"{asked.value // MIB} MiB for DCP {DCP}, {HEADS} heads per rank and {TOKENS} tokens, of which the kernel"
    sizes += f" takes {needed // MIB} MiB for its statistics"
    if asked.value <= needed:
        return "defect", f"the workspace does not grow with DCP: {sizes}"
    return "ok", f"the workspace grows with DCP: {sizes}"


def fixed(loaded) -> int:
    """Bytes of a workspace that knows nothing of DCP."""
    return loaded._get_workspace_buffer(torch.device("meta")).numel()
