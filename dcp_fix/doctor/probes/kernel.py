"""Probes 1, 3 and 4: the target's own fused norm/RoPE kernel, run on poisoned buffers.

Every case runs twice: with all slots owned (the control, checked against the formulas below), then with some or all
slots negative, as a rank sees them under DCP. A control that fails means that this is not the kernel we know, and the
answer is `not-run`; a case that fails while its control passes is the defect.

    query   q_out[t]   = q[t] / sqrt(mean(q[t]^2) + eps) * w                                  every row
    dense K kv_out[t]  = the same of the latent; kpe_out[t] = interleaved RoPE of k_pe[t]      every row
    caches  the slot's bytes                                                                  only where slot >= 0
    top-k   topk[t, :] = -1                                                                   every row, indexer layers

fp32 on a CPU (the interpreter casts bf16 and fp8 wrongly), bf16 on a GPU. Sizes are odd on purpose. This file does not
check the values inside the caches, only which bytes were touched.
"""

import inspect
from dataclasses import dataclass, replace

import torch

from dcp_fix.doctor.attempt import NotRun, attempt, one_line
from dcp_fix.doctor.world import World, module, unwritten_memory_is_nan

KERNELS = ("vllm.models.deepseek_v32.common.kernels", "vllm.models.deepseek_v32.nvidia.kernels")
HELPERS = ("vllm.utils.", "vllm.envs", "vllm.v1.", "vllm.model_executor.warmup.")
# Formats of out-of-tree plugins register themselves there; with none registered vLLM's own function answers None.
STAND_INS = {"vllm.config.cache": module(get_kv_cache_dtype_handler=lambda name: None)}

REQUIRED = (
    "positions q_c q_rms_norm_w q_rms_eps kv_c kv_rms_norm_w kv_rms_eps k_pe k_rope_cos_sin_cache index_k "
    "index_k_layer_norm_w index_k_layer_norm_bias index_k_layer_norm_eps index_k_rope_cos_sin_cache "
    "topk_indices_buffer slot_mapping indexer_k_cache mla_kv_cache mla_kv_cache_dtype mla_k_scale has_indexer "
    "index_rope_interleave"
).split()
OPTIONAL = (
    "q_c_out kv_c_out k_pe_out index_k_out indexer_slot_mapping indexer_cache_shuffled skip_scale"  # by release
).split()

TOKENS, Q_DIM, LATENT, ROPE, INDEX_DIM, TOPK, BLOCK, EPS = 4, 48, 512, 64, 128, 40, 64, 1e-6
OWNED = (3, 70, 2, 64)  # two blocks, no order
MIXED = (3, -1, 70, -1)
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
    names = list(inspect.signature(launcher).parameters)
    gone = [n for n in REQUIRED if n not in names]
    new = [n for n in names if n not in REQUIRED and n not in OPTIONAL]
    if gone or new:
        raise NotRun(f"unknown signature of fused_norm_rope: new {new or 'nothing'}, gone {gone or 'nothing'}")
    return set(names)


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
        def poisoned(width):
            return torch.full((TOKENS, width), torch.nan, device=self.device, dtype=self.dtype)

        self.topk = torch.full((TOKENS + 2, TOPK + 3), UNTOUCHED, dtype=torch.int32, device=self.device)
        return dict(
            topk_indices_buffer=self.topk[:, :TOPK],
            q_c_out=poisoned(Q_DIM + 16)[:, :Q_DIM],
            kv_c_out=poisoned(LATENT) if self.case.dense else None,
            k_pe_out=poisoned(ROPE) if self.case.dense else None,
            index_k_out=poisoned(INDEX_DIM) if self.case.index_out else None,
        )

    def _caches(self) -> dict:
        case, slots = self.case, None
        if case.slots is not None:
            slots = torch.tensor(case.slots, dtype=torch.int64, device=self.device)
        self.latent, latent = self._cache(case.latent_cache and ENTRY[case.latent_cache] * self._latent_bytes())
        if latent is not None and case.latent_cache == "auto":
            latent = latent.view(self.dtype)
        self.index, index = self._cache(INDEX_DIM + 4 if case.indexer and case.indexer_cache else None)
        none = slots is None
        return dict(
            slot_mapping=slots,
            indexer_slot_mapping=None if slots is None else slots.clone(),
            mla_kv_cache=None if none else latent,
            indexer_k_cache=None if none else index,
            mla_kv_cache_dtype=case.latent_cache or "auto",
            mla_k_scale=None if latent is None else torch.full((1,), 0.5, device=self.device),
        )

    def _latent_bytes(self):
        return torch.finfo(self.dtype).bits // 8 if self.case.latent_cache == "auto" else 1

    def _cache(self, entry_bytes):
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


def wrong_rows(got, want) -> tuple[list[int], list[int]]:
    """(rows that hold poison, rows that hold another value than `want`)"""
    unwritten = got.float().isnan().any(dim=-1)
    tolerance = 1e-4 if got.dtype == torch.float32 else 0.02
    wrong = ((got.float() - want).abs() > tolerance * (1 + want.abs())).any(dim=-1) & ~unwritten
    return unwritten.nonzero().flatten().tolist(), wrong.nonzero().flatten().tolist()


# --- checks: a list of sentences, empty when all is well --------------------------------------------------------------


def describe(what, rows) -> list[str]:
    """Sentences about the rows that `wrong_rows` found."""
    unwritten, wrong = rows
    parts = []
    if unwritten:
        parts.append(f"{what} of token{'s' * (len(unwritten) > 1)} {', '.join(map(str, unwritten))} never written")
    if wrong:
        parts.append(f"{what} of token{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))} wrong")
    return parts


def check_query(launch: Launch) -> list[str]:
    """Every query row holds its norm."""
    return describe("query row", wrong_rows(launch.q_out, launch.expected_query()))


def check_dense(launch: Launch) -> list[str]:
    """Every dense row holds the normed latent and the rotated key."""
    latent, rotated = launch.expected_dense()
    return describe("kv_c_out row", wrong_rows(launch.arguments["kv_c_out"], latent)) + describe(
        "k_pe_out row", wrong_rows(launch.arguments["k_pe_out"], rotated)
    )


def check_owned(launch: Launch) -> list[str]:
    """Every owned slot got its entry."""
    owned = {slot for slot in launch.case.slots or () if slot >= 0}
    lost = [(name, sorted(owned - touched)) for name, touched in touched_slots(launch).items()]
    return [f"{name} cache not written at owned slots {slots}" for name, slots in lost if slots]


def check_writes(launch: Launch) -> list[str]:
    """As `check_owned`; and nothing else was written, and the top-k rows are as they should be."""
    owned = {slot for slot in launch.case.slots or () if slot >= 0}
    extra = [(name, sorted(touched - owned)) for name, touched in touched_slots(launch).items()]
    found = [f"{name} cache written outside the owned slots (at {slots})" for name, slots in extra if slots]
    return check_owned(launch) + found + check_topk(launch.topk.cpu(), launch.case.indexer)


def touched_slots(launch: Launch) -> dict[str, set[int]]:
    """{cache: slots with a changed byte}, of the caches that were given."""
    touched = {}
    if launch.latent is not None:
        touched["latent"] = launch.touched(launch.latent, launch.latent.shape[-1])
    if launch.index is not None:
        touched["indexer"] = launch.touched_index()
    return touched


def check_topk(topk, indexer: bool) -> list[str]:
    """Indexer layers reset the rows of the batch and no others; shared layers reset nothing."""
    if not indexer:
        return ["top-k entries of a shared layer overwritten"] if (topk != UNTOUCHED).any() else []
    reset = (topk[:TOKENS, :TOPK] == -1).all(dim=1)
    found = [] if reset.all() else [f"top-k rows {(~reset).nonzero().flatten().tolist()} not reset"]
    topk[:TOKENS, :TOPK] = UNTOUCHED
    return found + (["top-k entries outside the batch overwritten"] if (topk != UNTOUCHED).any() else [])


# --- the three probes -------------------------------------------------------------------------------------------------


def run_cases(launcher, cases, check, device, progress, known=None) -> list[str]:
    """Sentences about the cases that fail. `known` (by default `check`) decides whether a control behaves as it should;
    what `check` says of a control beyond that is a finding like any other."""
    found, controlled = [], set()
    for case in cases:
        control = case.control()
        if control not in controlled:
            progress(f"{case.name} (control)", control=True)
            found += run_control(launcher, case, check, known or check, device)
            controlled.add(control)
        progress(case.name)
        result = attempt(lambda case=case: check(Launch(launcher, case, device)))
        messages = [f"raises {one_line(result.raised)}"] if result.raised else result.value
        found += [f"{case.name}: {message}" for message in messages]
    return found


def run_control(launcher, case: Case, check, known, device) -> list[str]:
    """The control of `case`: NotRun if `known` finds fault, else what `check` says of it."""
    launched = attempt(lambda: Launch(launcher, case.control(), device))
    strange = [f"raises {one_line(launched.raised)}"] if launched.raised else known(launched.value)
    if strange:
        raise NotRun(f"the control of '{case.name}', every slot owned, fails: nothing can be said ({strange[0]})")
    return [f"{case.name} (every slot owned): {message}" for message in check(launched.value)]


def summary(found: list[str]) -> str:
    """At most three of the findings, and how many more there are."""
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


def query_rows(launcher, device, progress) -> tuple[str, str]:
    """Probe 1, as (verdict, evidence)."""
    dense = "kv_c_out" in check_signature(launcher)
    cases = [
        Case("mixed slots", MIXED, far_positions=True),
        Case("all slots negative", NEGATIVE, dense=dense),
        Case("mixed slots, shared layer", MIXED, indexer=False, latent_cache="fp8_ds_mla"),
    ]
    found = run_cases(launcher, cases, check_query, device, progress)
    if found:
        return "defect", summary(found)
    return "ok", f"{len(cases)} launches with mixed and all-negative slots: every query row holds RMSNorm(q)"


def k_rows(launcher, device, progress) -> tuple[str, str]:
    """Probe 3, as (verdict, evidence)."""
    if "kv_c_out" not in check_signature(launcher):
        return "not-applicable", (
            "fused_norm_rope of this release has no kv_c_out and k_pe_out: there are no dense K rows to leave unwritten"
        )
    cases = [
        Case("mixed slots", MIXED, dense=True),
        Case("all slots negative, fp8_ds_mla", NEGATIVE, dense=True, latent_cache="fp8_ds_mla"),
        Case("mixed slots, shared layer, fp8", MIXED, dense=True, indexer=False, latent_cache="fp8"),
        Case("no slot mapping (memory profiling)", None, dense=True),
    ]
    found = run_cases(launcher, cases, check_dense, device, progress)
    if found:
        return "defect", summary(found)
    return "ok", f"{len(cases)} launches: kv_c_out and k_pe_out hold the normed latent and the rotated key in every row"


def owner_only_writes(launcher, device, progress) -> tuple[str, str]:
    """Probe 4, as (verdict, evidence)."""
    dense = "kv_c_out" in check_signature(launcher)
    cases = [
        Case("mixed slots", MIXED, dense=dense),
        Case("mixed slots, split-half RoPE, fp8", MIXED, latent_cache="fp8", interleaved=False, dense=dense),
        Case("all slots negative, fp8_ds_mla", NEGATIVE, latent_cache="fp8_ds_mla", dense=dense),
        Case("all slots negative, no dense rows", NEGATIVE),
        Case("mixed slots, shared layer", MIXED, indexer=False, dense=dense),
        Case("no slot mapping (memory profiling)", None),
        Case("mixed slots, latent cache written by the caller", MIXED, latent_cache=None, dense=dense),
    ]
    if "index_k_out" in check_signature(launcher):
        cases.append(Case("mixed slots, indexer cache written by the caller", MIXED, indexer_cache=False, dense=True))
        rows = dict(dense=True, index_out=True, latent_cache=None, indexer_cache=False)
        cases.append(Case("all rows handed to the caller, no cache given", None, **rows))
    found = run_cases(launcher, cases, check_writes, device, progress, known=check_owned)
    if found:
        return "defect", summary(found)
    good = "caches unchanged outside owned slots, top-k reset, shared layers untouched"
    return "ok", f"{len(cases)} launches: {good}"
