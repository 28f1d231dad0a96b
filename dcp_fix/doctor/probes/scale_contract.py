"""Which scale does the fused kernel store beside the fp8 values of a latent tile, and which readers take it?

An fp8_ds_mla entry holds four tiles of 128 values and an fp32 scale each. Two contracts have shipped:

    up to 0.30      scale = amax / 448                                           amax 336 -> 0.75
    from 0.31       the same, rounded up to a power of two (vLLM PR 49435)       amax 336 -> 1.0

Readers, as upstream reports them (none is run here):

    Hopper, SM90             converts the fp32 scale to bf16: fine with either
    Blackwell, SM100         FlashMLA takes it for an e8m0, a power of two (FlashMLA PR 184, 192)
    Blackwell, SM120         FlashInfer floors it to a power of two for models that are not GLM (vLLM PR 54563)

so with amax / 448 a Blackwell reads other values, smaller by a factor in (0.5, 1] where it floors.

The control is tiles whose scale is a power of two anyway. Latents are constant, so that the norm leaves the weight and
each tile's amax is known; one value of each tile, 4/7 of the amax, must come back from byte and scale.
"""

import torch

from dcp_fix.doctor.attempt import NotRun, attempt, judged, one_line
from dcp_fix.doctor.probes.kernel_run import BLOCK, GUARD_BLOCKS, LATENT, OWNED, TOKENS, Case, Launch

TILE, TILES, LARGEST = 128, 4, 448.0
CONTROL = (448.0, 896.0, 224.0, 7.0)  # amax of each tile
AMAX = (336.0, 21.0, 560.0, 98.0)
PER_AMAX, POWER_OF_TWO = "amax / 448", "a power of two"
HOPPER = 9  # major compute capability


class Tiles(Launch):
    """A launch whose tiles have the given amax: latents of one, and the amax in the weights."""

    def __init__(self, launcher, amax: tuple[float, ...], device: str):
        self.amax = amax
        super().__init__(launcher, Case("tiles", OWNED, latent_cache="fp8_ds_mla"), device)

    def _inputs(self) -> dict:
        amax = torch.tensor(self.amax, device=self.device)
        weight = amax.repeat_interleave(TILE) / 4
        weight[0::TILE], weight[1::TILE] = amax, amax * 4 / 7
        ones = torch.ones(TOKENS, LATENT, device=self.device, dtype=self.dtype)
        return {**super()._inputs(), "kv_c": ones, "kv_rms_norm_w": weight.to(self.dtype), "kv_rms_eps": 0.0}

    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(scales fp32 [tokens, 4], what comes back of the second value of each tile, the same)"""
        entries = self.latent.view(-1, self.latent.shape[-1])[[GUARD_BLOCKS * BLOCK + slot for slot in OWNED]].cpu()
        values = entries[:, :LATENT].contiguous().view(torch.float8_e4m3fn).float()
        scales = entries[:, LATENT : LATENT + 4 * TILES].contiguous().view(torch.float32)
        return scales, values[:, 1::TILE] * scales


def contract(scales: torch.Tensor, amax: tuple[float, ...]) -> str | None:
    """Which contract the scales keep, None for neither. What keeps both counts as a power of two."""
    exact = torch.tensor(amax) / LARGEST
    for name, want in ((POWER_OF_TWO, exact.log2().ceil().exp2()), (PER_AMAX, exact)):
        if torch.allclose(scales, want.expand_as(scales), rtol=1e-6, atol=0):
            return name
    return None


def judge(launcher, amax: tuple[float, ...], device: str) -> tuple[str | None, float, list[str]]:
    """(the contract, the first tile's scale, what else is wrong)"""
    scales, values = Tiles(launcher, amax, device).stored()
    kept, first = contract(scales, amax), scales[0, 0].item()
    if kept is None:
        return (
            None,
            first,
            [f"tiles of amax {amax} get scales {scales[0].tolist()}, neither {PER_AMAX} nor {POWER_OF_TWO}"],
        )
    back = torch.allclose(values, (torch.tensor(amax) * 4 / 7).expand_as(values), rtol=1e-5, atol=0)
    return kept, first, [] if back else [f"byte times scale gives {values[0].tolist()} for 4/7 of {amax}"]


def verdict(kept: str, measured: str, major: int | None) -> tuple[str, str]:
    """(verdict, evidence) on the GPU whose major compute capability is given. Without one a contract that some
    generation cannot read is a defect, and the evidence says whose."""
    if kept == POWER_OF_TWO:
        return "ok", f"{measured}: {kept}, which the readers of Hopper and of Blackwell take as it is"
    hit = "Blackwell (SM100 FlashMLA; SM120 FlashInfer for models that are not GLM): defect, it takes the scale for a"
    how = "power of two, and where it floors values shrink by a factor in (0.5, 1] (as upstream reports it, not run)"
    return "ok" if major == HOPPER else "defect", f"{measured}: {kept}. Hopper (SM90): ok. {hit} {how}"


def scale_contract(launcher, device: str, progress) -> tuple[str, str]:
    """(verdict, evidence)"""
    progress("tiles whose scale is a power of two", control=True)
    control = attempt(lambda: judge(launcher, CONTROL, device))
    if control.raised or control.value[2]:
        why = one_line(control.raised) if control.raised else control.value[2][0]
        raise NotRun(f"the control, tiles whose scale is a power of two, fails, so nothing can be said: {why}")
    progress("tiles whose amax / 448 is no power of two")
    case = attempt(lambda: judge(launcher, AMAX, device))
    if case.raised:
        return "defect", f"tiles of amax {AMAX}: raises {one_line(case.raised)}"
    kept, first, found = case.value
    major = torch.cuda.get_device_capability()[0] if device == "cuda" else None
    return judged(found, "") if found else verdict(kept, f"a tile of amax {AMAX[0]:.0f} gets scale {first:g}", major)
