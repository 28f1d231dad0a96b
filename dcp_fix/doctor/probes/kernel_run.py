"""One launch of a target's fused norm/RoPE kernel: which buffers, what they hold before, and what was touched after.

Outputs are poisoned, rows are slices of wider ones, and each cache lies between guard blocks, so that a write at slot
-1 is seen and does no harm. fp32 on a CPU (the interpreter casts bf16 and fp8 wrongly), bf16 on a GPU; sizes are odd on
purpose. Which cases are run and what is wrong about them is kernel.py's business.
"""

import inspect
from dataclasses import dataclass, replace

import torch

from dcp_fix.doctor.attempt import NotRun
from dcp_fix.doctor.stand_ins import module
from dcp_fix.doctor.unwritten import unwritten_memory_is_nan
from dcp_fix.doctor.world import World
from dcp_fix.repairs.signature import changes

KERNELS = ("vllm.models.deepseek_v32.common.kernels", "vllm.models.deepseek_v32.nvidia.kernels")
# Formats of out-of-tree plugins register themselves there; with none registered vLLM's own function answers None.
STAND_INS = {"vllm.config.cache": module(get_kv_cache_dtype_handler=lambda name: None)}

TOKENS, Q_DIM, LATENT, ROPE, INDEX_DIM, TOPK, BLOCK, EPS = 4, 48, 512, 64, 128, 40, 64, 1e-6
OWNED = (3, 70, 2, 64)  # two blocks, no order
MIXED = (0, -1, 70, -1)  # slot 0 is owned like any other
NEGATIVE = (-1,) * TOKENS
GUARD_BLOCKS = 2  # a write at slot -1 lands in front of the cache, where it must be seen and do no harm
POISON, UNTOUCHED = 0x7F, 77  # of bytes, of top-k entries
ENTRY = {"auto": LATENT + ROPE, "fp8": LATENT + ROPE, "fp8_ds_mla": 656}


@dataclass(frozen=True)
class Case:
    """One launch. `latent_cache` None: the caller writes the cache itself; `slots` None: memory profiling."""

    name: str
    slots: tuple[int, ...] | None
    indexer: bool = True
    latent_cache: str | None = "auto"
    indexer_cache: bool = True
    index_out: bool = False
    dense: bool = False
    interleaved: bool = True
    far_positions: bool = False

    def control(self) -> "Case":
        """The same launch with every slot owned and both caches given."""
        latent = self.latent_cache or "auto"
        return replace(self, name="", slots=OWNED, latent_cache=latent, indexer_cache=True, far_positions=False)


# --- the call ---------------------------------------------------------------------------------------------------------


def load_kernel(world: World):
    """The target's module that defines fused_norm_rope."""
    for name in KERNELS:
        if world.path_of(name).with_suffix(".py").is_file():
            return world.load(name)
    raise NotRun(f"this vLLM has no fused norm/RoPE kernel: none of {', '.join(KERNELS)} exists")


def check_signature(launcher) -> set[str]:
    """The launcher's parameters. NotRun, with what changed, unless we know every one of them."""
    new, gone = changes(launcher)
    if new or gone:
        raise NotRun(f"unknown signature of fused_norm_rope: new {new or 'nothing'}, gone {gone or 'nothing'}")
    return set(inspect.signature(launcher).parameters)


class Launch:
    """Buffers of one case, poisoned, and the call."""

    def __init__(self, launcher, case: Case, device: str):
        self.case, self.names, self.device = case, check_signature(launcher), device
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        generator = torch.Generator().manual_seed(20)
        self.random = lambda *shape: torch.randn(*shape, generator=generator).to(device, self.dtype)
        arguments = {**self._inputs(), **self._outputs(), **self._caches()}
        with unwritten_memory_is_nan():
            self.q_out = launcher(**{name: value for name, value in arguments.items() if name in self.names})
        self.arguments = arguments

    def _inputs(self) -> dict:
        indexer = self.case.indexer
        angle = torch.arange(16)[:, None] * 10000 ** (-torch.arange(0, ROPE, 2) / ROPE)
        table = torch.cat([angle.cos(), angle.sin()], dim=1).to(self.device)
        if self.case.far_positions:  # rows that no token may look up
            table = torch.cat([table, torch.full_like(table, torch.nan)])
        far = [16 if self.case.far_positions and slot < 0 else t for t, slot in enumerate(self.case.slots or OWNED)]
        return dict(
            positions=torch.tensor(far, device=self.device),
            q_c=self.random(TOKENS, Q_DIM + 3)[:, :Q_DIM],
            q_rms_norm_w=self.random(Q_DIM),
            q_rms_eps=EPS,
            kv_c=self.random(TOKENS, LATENT + 8)[:, :LATENT],
            kv_rms_norm_w=self.random(LATENT),
            kv_rms_eps=EPS,
            k_pe=self.random(TOKENS, ROPE),
            k_rope_cos_sin_cache=table,
            index_k=self.random(TOKENS, INDEX_DIM) if indexer else None,
            index_k_layer_norm_w=self.random(INDEX_DIM).float() if indexer else None,
            index_k_layer_norm_bias=self.random(INDEX_DIM).float() if indexer else None,
            index_k_layer_norm_eps=EPS,
            index_k_rope_cos_sin_cache=table if indexer else None,
            has_indexer=indexer,
            index_rope_interleave=self.case.interleaved,
        )

    def _outputs(self) -> dict:
        def poisoned(width: int, wanted: bool = True):
            return torch.full((TOKENS, width), torch.nan, device=self.device, dtype=self.dtype) if wanted else None

        self.topk = torch.full((TOKENS + 2, TOPK + 3), UNTOUCHED, dtype=torch.int32, device=self.device)
        return dict(
            topk_indices_buffer=self.topk[:, :TOPK],
            q_c_out=poisoned(Q_DIM + 16)[:, :Q_DIM],
            kv_c_out=poisoned(LATENT, self.case.dense),
            k_pe_out=poisoned(ROPE, self.case.dense),
            index_k_out=poisoned(INDEX_DIM, self.case.index_out),
        )

    def _caches(self) -> dict:
        case, plain = self.case, self.case.latent_cache == "auto"
        slots = None if case.slots is None else torch.tensor(case.slots, dtype=torch.int64, device=self.device)
        size = None if case.latent_cache is None else ENTRY[case.latent_cache] * (self.dtype.itemsize if plain else 1)
        self.latent, latent = self._cache(size)
        self.index, index = self._cache(INDEX_DIM + 4 if case.indexer and case.indexer_cache else None)
        if slots is None:
            latent = index = None
        return dict(
            slot_mapping=slots,
            indexer_slot_mapping=None if slots is None else slots.clone(),
            mla_kv_cache=latent.view(self.dtype) if plain and latent is not None else latent,
            indexer_k_cache=index,
            mla_kv_cache_dtype=case.latent_cache or "auto",
            mla_k_scale=torch.full((1,), 0.5, device=self.device) if size else None,
        )

    def _cache(self, entry_bytes: int | None):
        """(whole buffer, cache of two blocks inside it), every byte poisoned; (None, None) without a cache."""
        if entry_bytes is None:
            return None, None
        whole = torch.full((2 * GUARD_BLOCKS + 2, BLOCK, entry_bytes), POISON, dtype=torch.uint8, device=self.device)
        return whole, whole[GUARD_BLOCKS : GUARD_BLOCKS + 2]

    # --- what was written ---

    def expected_query(self):
        return rms_norm(self.arguments["q_c"], self.arguments["q_rms_norm_w"])

    def expected_dense(self):
        a = self.arguments
        cos, sin = a["k_rope_cos_sin_cache"][a["positions"]].chunk(2, dim=-1)
        even, odd = a["k_pe"].float()[:, 0::2], a["k_pe"].float()[:, 1::2]
        rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(1)
        return rms_norm(a["kv_c"], a["kv_rms_norm_w"]), rotated

    def touched(self, whole, entry_bytes) -> set[int]:
        """Slots with a changed byte; negative numbers lie in front of the cache."""
        rows = (whole.view(-1, entry_bytes) != POISON).any(dim=1).nonzero().flatten().tolist()
        return {row - GUARD_BLOCKS * BLOCK for row in rows}

    def touched_index(self) -> set[int]:
        """As `touched`, for blocks of 64 x 128 values followed by 64 scales."""
        split = BLOCK * INDEX_DIM
        flat = self.index.view(self.index.shape[0], -1) != POISON
        values = flat[:, :split].reshape(-1, INDEX_DIM).any(dim=1)
        scales = flat[:, split:].reshape(-1, 4).any(dim=1)
        return {row - GUARD_BLOCKS * BLOCK for row in (values | scales).nonzero().flatten().tolist()}


def rms_norm(x, weight):
    """The formula of the module docstring, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPS) * weight.float()
