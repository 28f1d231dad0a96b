"""Named cases for the fused norm/RoPE, and a check that runs one on any implementation.

The expected values come from float64 formulas of this file (RoPE as a complex product), never from the reference. Each
output and cache is poisoned first. `check` raises AssertionError with the effect that is wrong or missing: what must be
written is within rounding, what must not be written is still poison, byte for byte.
"""

from dataclasses import dataclass

import torch

from dcp_fix.base.equality import unit_in_last_place
from dcp_fix.kv_cache import FP8_MAX, index_views, latent_views, new_index_cache, new_latent_cache
from dcp_fix.norm_rope import IndexerInputs, NormRopeInputs
from dcp_fix.ownership import slot_mapping

EPS, KV_SCALE, POISON = 1e-5, 0.013, 0x7F
TABLE_ROWS = 1100
PADDED_POSITIONS = torch.tensor([TABLE_ROWS, 10**6, -1])
BOTH = ("kv", "kpe")


@dataclass(frozen=True)
class Case:
    name: str
    rows: str = "dcp"  # owned | dcp | padded | all-negative | case-15 | case-13 | profiling
    tokens: int = 5
    dtype: torch.dtype = torch.float32
    cache_format: str | None = "fp8_ds_mla"
    dense: tuple[str, ...] = BOTH
    indexer: str | None = "interleaved"  # interleaved | split-half | None
    index_rows: str = "same"  # same | replicated | opposite | uncached
    group: tuple[int, int, int] = (2, 1, 0)  # dcp_size, interleave, dcp_rank
    q_dim: int = 256
    topk: int = 512
    rotated: int = 64  # leading values of the index key that RoPE turns
    block_size: int = 64
    index_block_size: int = 64
    gap: int = 0  # bytes between blocks


def _cases():
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    for name, dtype in dtypes.items():
        for cache_format in ("fp8_ds_mla", "fp8", "bf16"):
            for rows in ("owned", "dcp", "padded"):
                yield Case(f"{name}-into-{cache_format}-{rows}", rows, dtype=dtype, cache_format=cache_format)
    for indexer in (None, "interleaved", "split-half"):
        for rows in ("dcp", "profiling", "all-negative"):
            for dense in (BOTH, ()):
                name = f"{indexer or 'no'}-indexer-{rows}-{'dense' if dense else 'cache-only'}"
                yield Case(name, rows, indexer=indexer, dense=dense, group=(2, 4, 1))
    for dense in BOTH:
        for rows in ("dcp", "case-15", "all-negative"):
            yield Case(f"only-{dense}-out-{rows}", rows, dense=(dense,))
    yield Case("case-15-cache-only", "case-15", dense=())
    yield Case("D1-owns-everything", group=(1, 1, 0), dense=())
    for dcp_size in (2, 4, 8):
        for interleave in (1, 4, 64):
            group = (dcp_size, interleave, dcp_size - 1)
            yield Case(f"D{dcp_size}-I{interleave}", tokens=9, group=group, block_size=16, index_block_size=16)
    for rank in (0, 1):
        yield Case(
            f"case-13-rank{rank}", "case-13", tokens=10, index_rows="replicated", group=(2, 1, rank), block_size=4,
            index_block_size=4, dense=(),
        )  # fmt: skip
    for cache_format in ("fp8_ds_mla", "fp8", "bf16"):
        yield Case(f"replicated-index-{cache_format}", cache_format=cache_format, index_rows="replicated")
    yield Case("index-owns-what-latent-does-not", index_rows="opposite", dense=())
    yield Case("index-owns-what-latent-does-not-dense", index_rows="opposite", indexer="split-half")
    yield Case("index-blocks-of-16-far-apart", index_block_size=16, gap=240, index_rows="replicated")
    yield Case("both-caches-with-gaps", gap=48, block_size=5, index_block_size=7)
    yield Case("index-rotates-all-128", indexer="split-half", rotated=128)
    yield Case("index-rotates-32", rotated=32)
    yield Case("index-rotates-48-split-half", indexer="split-half", rotated=48)
    yield Case("index-uncached", index_rows="uncached", dense=())
    yield Case("dense-rows-without-a-cache", cache_format=None, index_rows="uncached")
    yield Case("nothing-but-the-query", cache_format=None, indexer=None, dense=())
    yield Case("no-tokens", "owned", tokens=0)
    yield Case("one-token-not-owned", tokens=1, group=(2, 1, 1))
    yield Case("seventeen-tokens", tokens=17, dtype=torch.bfloat16)
    for q_dim in (33, 96, 1536):
        yield Case(f"query-latent-{q_dim}", q_dim=q_dim, dense=())
    for topk in (7, 2048):
        yield Case(f"topk-{topk}", topk=topk, rows="padded", dense=())


CASES = {case.name: case for case in _cases()}


def placed(case):
    """(positions [T], slot_mapping [T] | None, blocks of the latent cache)."""
    t, (dcp_size, interleave, rank) = torch.arange(case.tokens), case.group
    generator = torch.Generator().manual_seed(len(case.name))
    if case.rows == "case-13":
        return t, slot_mapping(t, torch.tensor([7, 3]), case.block_size, dcp_size, rank), 8
    if case.rows == "case-15":
        slots = torch.tensor([0, -1, 1, -1, 130])
        return torch.where(slots < 0, 10**6, t + 40), slots, 3
    positions = t * interleave + t * 7 % interleave  # every rank of the group owns some
    if case.rows == "profiling":
        return positions, None, 2
    if case.rows == "all-negative":
        return PADDED_POSITIONS[t % 3], torch.full_like(t, -1), 2
    if case.rows == "dcp":
        table = torch.randperm(1100 // case.block_size + 1, generator=generator)
        return positions, slot_mapping(positions, table, case.block_size, dcp_size, rank, interleave), len(table)
    slots = torch.randperm(5 * case.block_size, generator=generator)[: case.tokens]
    positions = torch.randperm(TABLE_ROWS, generator=generator)[: case.tokens]
    if case.rows == "padded":
        slots[-2:], positions[-2:] = -1, PADDED_POSITIONS[:2]
    return positions, slots, 5


def index_placed(case, positions, slots, latent_blocks):
    """The indexer's own slot mapping (None: it shares the latent's) and the blocks of its cache."""
    blocks = max(latent_blocks * case.block_size, TABLE_ROWS) // case.index_block_size + 1
    if case.index_rows == "replicated":
        table = torch.tensor([7, 3, 9]) if case.rows == "case-13" else torch.arange(blocks).flip(0)
        return slot_mapping(positions, table, case.index_block_size), blocks
    if case.index_rows == "opposite":
        return torch.where(slots < 0, torch.arange(len(slots)), -1), blocks
    return None, blocks


class Run:
    """One case's inputs and poisoned outputs; `go` calls an implementation, `check` looks at every effect."""

    def __init__(self, case, device="cpu"):
        self.case, self.device = case, device
        self.positions, self.slots, blocks = placed(case)
        self.own_index_slots, index_blocks = index_placed(case, self.positions, self.slots, blocks)
        self.index_slots = self.slots if self.own_index_slots is None else self.own_index_slots
        self._inputs(torch.Generator().manual_seed(len(case.name)))
        self._outputs(blocks, index_blocks)

    def _inputs(self, generator):
        def normal(*shape, dtype=self.case.dtype):
            return torch.randn(shape, generator=generator).to(self.device, dtype)

        tokens, q_dim = self.case.tokens, self.case.q_dim
        # As in a model, q, kv and k_pe are views of one projection's output. The tables end in a NaN that nobody reads.
        self.q, self.kv, self.k_pe = normal(tokens, q_dim + 576).split((q_dim, 512, 64), dim=1)
        self.q_weight, self.kv_weight = 1 + 0.1 * normal(q_dim), 1 + 0.1 * normal(512)
        self.cos_sin = normal(TABLE_ROWS + 1, 64, dtype=torch.float32)
        self.index_k, self.index_weight, self.index_bias = normal(tokens, 128), 1 + normal(128) / 8, normal(128)
        self.index_cos_sin = normal(TABLE_ROWS + 1, self.case.rotated, dtype=torch.float32)
        for table in (self.cos_sin, self.index_cos_sin):
            table[-1] = torch.nan

    def _outputs(self, blocks, index_blocks):
        case, self.memory = self.case, {}
        widths = {"q": case.q_dim} | {name: {"kv": 512, "kpe": 64}[name] for name in case.dense}
        for name, width in widths.items():  # rows inside wider memory, so that a write beside them shows
            shape = (case.tokens + 1, width + 8)
            self.memory[name] = torch.full(shape, torch.nan, dtype=case.dtype, device=self.device)
        self.out = {name: self.memory[name][: case.tokens, :width] for name, width in widths.items()}
        self.topk = torch.full((case.tokens + 1, case.topk), 7, dtype=torch.int32, device=self.device)
        self.cache = self.index_cache = None
        if case.cache_format:
            like = new_latent_cache(blocks, case.cache_format, case.block_size)
            self.memory["cache"] = poisoned(like, case.gap, self.device)
            self.cache = cache_in(self.memory["cache"], like)
        if case.indexer and case.index_rows != "uncached":
            like = new_index_cache(index_blocks, case.index_block_size)
            self.memory["index cache"] = poisoned(like, case.gap, self.device)
            self.index_cache = cache_in(self.memory["index cache"], like)

    def go(self, implementation):
        """Calls `implementation` on the case and returns what it returns."""
        case, indexer = self.case, None

        def there(x):
            return None if x is None else x.to(self.device)

        if case.indexer:
            indexer = IndexerInputs(
                self.index_k, self.index_weight, self.index_bias, EPS, self.index_cos_sin[:-1], self.index_cache,
                there(self.own_index_slots), case.indexer == "interleaved",
            )  # fmt: skip
        inputs = NormRopeInputs(
            there(self.positions), self.q, self.q_weight, self.kv, self.kv_weight, self.k_pe, self.cos_sin[:-1],
            EPS, slot_mapping=there(self.slots), kv_cache=self.cache,
            cache_format=case.cache_format or "fp8_ds_mla",
            kv_scale=torch.tensor([KV_SCALE], device=self.device) if case.cache_format == "fp8" else None,
            q_out=self.out["q"], kv_out=self.out.get("kv"), kpe_out=self.out.get("kpe"), indexer=indexer,
            topk_indices=self.topk,
        )  # fmt: skip
        return implementation(inputs)

    def check(self):
        latent = rms_norm(self.kv, self.kv_weight)
        key, key_size = rotate(wide(self.k_pe), self._angles(self.cos_sin), interleaved=True)
        self._check_topk()
        self._check_rows("q", rms_norm(self.q, self.q_weight))
        self._check_rows("kv", latent)
        self._check_rows("kpe", key, key_size)
        if self.cache is not None:
            self._check_cache(latent, key, key_size)
        if self.index_cache is not None:
            self._check_index_cache()

    def _angles(self, table):
        """The documented row of the table: positions outside it read its ends."""
        return wide(table)[self.positions.clamp(0, TABLE_ROWS - 1)]

    def _check_topk(self):
        tokens = self.case.tokens
        assert self.topk[:tokens].eq(-1 if self.case.indexer else 7).all(), "topk_indices: rows of this call"
        assert self.topk[tokens:].eq(7).all(), "topk_indices: rows beyond this call"

    def _check_rows(self, name, exact, size=None):
        if name not in self.out:
            return
        rounds_to(f"{name}_out", self.out[name], exact, size)
        self.out[name][:] = torch.nan
        assert self.memory[name].isnan().all(), f"{name}_out: written beside its rows"

    def _check_cache(self, latent, key, key_size):
        rows, place = owned(self.slots, self.case.block_size)
        latent, key, key_size = latent[rows], key[rows], key_size[rows]
        codes, rope, scales = latent_views(self.cache, self.case.cache_format)
        if scales is not None:
            tiles = latent.unflatten(1, (4, 128))
            rounds_to("latent cache: scales", scales[place], tiles.abs().amax(2) / FP8_MAX)
            latent = (tiles / wide(scales[place]).unsqueeze(2)).flatten(1)
        elif self.case.cache_format == "fp8":
            scale = torch.tensor(KV_SCALE).double()
            latent, key, key_size = latent / scale, key / scale, key_size / scale
        rounds_to("latent cache: latent", codes[place], latent)
        rounds_to("latent cache: key", rope[place], key, key_size)
        self.cache.view(torch.uint8)[place] = POISON
        assert self.memory["cache"].eq(POISON).all(), "latent cache: bytes written outside the owned slots"

    def _check_index_cache(self):
        rows, place = owned(self.index_slots, self.case.index_block_size)
        width = self.case.rotated
        k = layer_norm(self.index_k, self.index_weight, self.index_bias)[rows]
        turned, size = rotate(k[:, :width], self._angles(self.index_cos_sin)[rows], self.case.indexer == "interleaved")
        k, size = torch.cat((turned, k[:, width:]), 1), torch.cat((size, k[:, width:].abs() + 3.0), 1)
        scale = (k.abs().amax(1, keepdim=True).clamp(min=1e-4) / FP8_MAX).log2().ceil().exp2()
        keys, scales = index_views(self.index_cache)
        rounds_to("index cache", keys[place], k / scale, size / scale)
        assert wide(scales[place]).equal(scale.squeeze(1)), "index cache: scales"
        keys.view(torch.uint8)[place] = POISON
        scales.view(torch.int32)[place] = 0x7F7F7F7F
        assert self.memory["index cache"].eq(POISON).all(), "index cache: bytes written outside the owned slots"


def wide(x):
    return x.cpu().double()


def rms_norm(x, weight):
    x = wide(x)
    return x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * wide(weight)


def layer_norm(x, weight, bias):
    x = wide(x) - wide(x).mean(1, keepdim=True)
    return x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * wide(weight) + wide(bias)


def rotate(x, angles, interleaved):
    """RoPE as a product of complex numbers, and the size of the summands behind each value."""
    half = x.shape[1] // 2
    pairs = x.unflatten(1, (half, 2)) if interleaved else x.unflatten(1, (2, half)).transpose(1, 2)
    turned = torch.complex(*pairs.unbind(2)) * torch.complex(angles[:, :half], angles[:, half:])
    size = (pairs.abs().sum(2) * angles.abs().unflatten(1, (2, half)).sum(1)).unsqueeze(2).expand(-1, -1, 2)
    turned, size = (p if interleaved else p.transpose(1, 2) for p in (torch.view_as_real(turned), size))
    return turned.flatten(1), size.flatten(1)


def rounds_to(name, got, exact, size=None):
    """`got` is `exact` (float64) rounded once to its type, give or take fp32 noise of summands as large as `size`."""
    dtype, got = got.dtype, wide(got)
    missing = got.isnan().any(1).nonzero().flatten().tolist()
    assert not missing, f"{name}: rows {missing} are not written"
    if dtype == torch.float8_e4m3fn:
        exact = exact.clamp(-FP8_MAX, FP8_MAX)
    noise = 2e-6 * (exact.abs() if size is None else size + exact.abs())
    allowed = unit_in_last_place(torch.maximum(got.abs(), exact.abs()), dtype) / 2 + noise
    wrong = ((got - exact).abs() > allowed).nonzero()
    assert len(wrong) == 0, f"{name}: {len(wrong)} values are off, the first at {wrong[0].tolist()}"


def owned(slots, block_size):
    """The rows that write to a cache, and where: (block, offset)."""
    rows = torch.zeros(0, dtype=torch.int64) if slots is None else (slots >= 0).nonzero().flatten()
    mine = rows if slots is None else slots[rows]
    return rows, (mine // block_size, mine % block_size)


def poisoned(like, gap, device):
    """Memory for a cache such as `like`, every byte poisoned: a block too many in front, `gap` bytes between blocks."""
    size = like.element_size() * like.shape[1] * like.shape[2]
    return torch.full((1 + like.shape[0], size + gap), POISON, dtype=torch.uint8, device=device)


def cache_in(memory, like):
    size = like.element_size() * like.shape[1] * like.shape[2]
    return memory[1:, :size].view(like.dtype).unflatten(1, like.shape[1:])
