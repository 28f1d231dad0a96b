"""The bytes of the two paged caches of a sparse MLA layer: encode, decode, write by slot, read by slot.

Latent cache, one entry per token. Three formats:

    fp8_ds_mla  656 bytes (offsets in bytes):
                [  0, 512)  512 x fp8 e4m3   the normed latent, value / scale of its tile
                [512, 528)    4 x fp32       one scale per tile of 128 values: amax / 448, at least FLT_MIN
                [528, 656)   64 x bf16       the rotated key, not quantised
    fp8         576 x fp8 e4m3               latent then rotated key, both divided by one scale for the whole tensor
    bf16        576 x bf16                   latent then rotated key; of a model in fp16 or fp32, that type

Indexer cache, one block of `block_size` tokens (132 bytes per token, but *not* entry by entry):

    [0, 128 * block_size)                    128 x fp8 e4m3 per token
    [128 * block_size, 132 * block_size)     one fp32 scale per token: amax / 448 rounded up to a power of two (ue8m0)

A slot is `block * block_size + offset`. Slot -1 means "another rank's row, or none": a write skips it, a read gives
zeros. Blocks may lie further apart in memory than they are long (a shared allocator's block stride); all offsets are
64-bit, since slot 3,273,604 is the first whose 656-byte offset passes 2**31.

Rounding is to nearest even with saturation at +-448, as the GPU converts. Source of the layouts: vLLM's `fp8_ds_mla`
cache and `indexer_k_quant_and_cache`, and FlashMLA's documentation. Upstream takes the power of two with
exp2(ceil(log2(x))), which in fp32 can miss it when x lies a few ulps above a power of two; here it is exact.

Not here: nvfp4 entries, e5m2, and which slot a token gets (ownership.py).
"""

import torch
from torch import Tensor

LATENT = 512  # values of the compressed key, shared by all heads
ROPE = 64  # values of the rotated key
TILE = 128  # latent values that share a scale
TILES = LATENT // TILE
FP8_MAX = 448.0  # largest finite e4m3 value
FLT_MIN = torch.finfo(torch.float32).tiny  # smallest normal fp32: the scale of a tile of zeros
SCALE_AT = LATENT  # byte offsets inside an fp8_ds_mla entry
ROPE_AT = LATENT + 4 * TILES
ENTRY_BYTES = ROPE_AT + 2 * ROPE  # 656
BLOCK = 64  # tokens per block, in both caches
INDEX_DIM = 128
INDEX_BYTES = INDEX_DIM + 4  # 132
INDEX_AMAX_MIN = 1e-4  # floor of amax before it becomes an index scale

CACHE_FORMATS = ("fp8_ds_mla", "fp8", "bf16")
_DTYPE = {"fp8_ds_mla": torch.uint8, "fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)  # of a "bf16" cache, which is as wide as the model's type
_WIDTH = {"fp8_ds_mla": ENTRY_BYTES, "fp8": LATENT + ROPE, "bf16": LATENT + ROPE}


def new_latent_cache(
    num_blocks: int, cache_format: str, block_size: int = BLOCK, device: torch.device | str = "cpu"
) -> Tensor:
    """An empty latent cache [num_blocks, block_size, 656 uint8 | 576 fp8 | 576 bf16], all bytes zero."""
    check_format(cache_format)
    shape = (num_blocks, block_size, _WIDTH[cache_format])
    return torch.zeros(shape, dtype=_DTYPE[cache_format], device=device)


def new_index_cache(num_blocks: int, block_size: int = BLOCK, device: torch.device | str = "cpu") -> Tensor:
    """An empty indexer cache, uint8 [num_blocks, block_size, 132], all bytes zero."""
    return torch.zeros((num_blocks, block_size, INDEX_BYTES), dtype=torch.uint8, device=device)


def encode_latent(latent: Tensor, rope: Tensor) -> Tensor:
    """fp8_ds_mla entries, uint8 [T, 656], of normed latents [T, 512] and rotated keys [T, 64].

    A latent of 896s has amax 896 in each tile, so scale 2.0 and fp8 bytes 0x7e (448):

    >>> entry = encode_latent(torch.full((1, 512), 896.0), torch.zeros(1, 64))
    >>> entry.shape, hex(entry[0, 0]), entry[0, 512:528].view(torch.float32).tolist()
    (torch.Size([1, 656]), '0x7e', [2.0, 2.0, 2.0, 2.0])
    """
    tiles = latent.float().unflatten(-1, (TILES, TILE))  # [T, 4, 128]
    scale = (tiles.abs().amax(dim=-1, keepdim=True) / FP8_MAX).clamp(min=FLT_MIN)  # [T, 4, 1]
    parts = (to_fp8(tiles / scale).flatten(-2), scale.squeeze(-1), rope.bfloat16())
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


def decode_latent(entries: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of `encode_latent` up to rounding: uint8 [..., 656] -> latent fp32 [..., 512], rope fp32 [..., 64]."""
    codes, scale, rope = entries.split((SCALE_AT, ROPE_AT - SCALE_AT, ENTRY_BYTES - ROPE_AT), dim=-1)
    tiles = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (TILES, TILE))
    scale = scale.contiguous().view(torch.float32)
    rope = rope.contiguous().view(torch.bfloat16)
    return (tiles * scale.unsqueeze(-1)).flatten(-2), rope.float()


def write_latent(
    cache: Tensor,
    latent: Tensor,
    rope: Tensor,
    slot_mapping: Tensor,
    cache_format: str,
    scale: Tensor | float | None = None,
) -> None:
    """Writes latent [T, 512] and rope [T, 64] to `slot_mapping` [T]; rows with a negative slot write nothing.

    `scale` (one number) is for the format "fp8" and required there.
    """
    check_latent_cache(cache, cache_format, scale)
    mine = slot_mapping >= 0
    latent, rope, slots = latent[mine], rope[mine], slot_mapping[mine]
    if cache_format == "fp8_ds_mla":
        rows = encode_latent(latent, rope)
    else:
        rows = torch.cat((latent.float(), rope.float()), dim=-1)  # [T, 576]
        rows = to_fp8(rows / scale) if cache_format == "fp8" else rows.to(cache.dtype)
    cache[_place(slots, cache.shape[1])] = rows


def read_latent(cache: Tensor, slots: Tensor, cache_format: str, scale: Tensor | float | None = None) -> Tensor:
    """The cached rows at `slots` [...], fp32 [..., 576] = latent then rope; a negative slot gives zeros."""
    check_latent_cache(cache, cache_format, scale)
    rows = cache[_place(slots.clamp(min=0), cache.shape[1])]
    if cache_format == "fp8_ds_mla":
        rows = torch.cat(decode_latent(rows), dim=-1)
    elif cache_format == "fp8":
        rows = rows.float() * scale
    return rows.float().masked_fill_((slots < 0).unsqueeze(-1), 0.0)


def quantize_index_key(k: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 codes [T, 128] and power-of-two scales fp32 [T] of index keys [T, 128].

    amax 1.0 over 448 is 0.0022, and the next power of two is 2**-8, so the code of 1.0 is 256:

    >>> codes, scale = quantize_index_key(torch.ones(1, 128))
    >>> codes[0, 0].item(), scale.tolist()
    (256.0, [0.00390625])
    """
    amax = k.float().abs().amax(dim=-1).clamp(min=INDEX_AMAX_MIN)
    scale = _next_power_of_two(amax / FP8_MAX)
    return to_fp8(k.float() / scale.unsqueeze(-1)), scale


def write_index(cache: Tensor, k: Tensor, slot_mapping: Tensor) -> None:
    """Quantises index keys k [T, 128] into `slot_mapping` [T]; rows with a negative slot write nothing."""
    keys, scales = index_views(cache)
    mine = slot_mapping >= 0
    codes, scale = quantize_index_key(k[mine])
    place = _place(slot_mapping[mine], cache.shape[1])
    keys[place] = codes
    scales[place] = scale


def read_index(cache: Tensor, slots: Tensor) -> Tensor:
    """The index keys at `slots` [...], dequantised, fp32 [..., 128]; a negative slot gives zeros."""
    keys, scales = index_views(cache)
    place = _place(slots.clamp(min=0), cache.shape[1])
    return (keys[place].float() * scales[place].unsqueeze(-1)).masked_fill_((slots < 0).unsqueeze(-1), 0.0)


def latent_views(cache: Tensor, cache_format: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """The fields of every entry as views: latent [B, block_size, 512], rope [..., 64], tile scales [..., 4] or None."""
    if cache_format != "fp8_ds_mla":
        return cache[..., :LATENT], cache[..., LATENT:], None
    codes, scales, rope = cache.split((SCALE_AT, ROPE_AT - SCALE_AT, ENTRY_BYTES - ROPE_AT), dim=-1)
    return codes.view(torch.float8_e4m3fn), rope.view(torch.bfloat16), scales.view(torch.float32)


def index_views(cache: Tensor) -> tuple[Tensor, Tensor]:
    """The two regions of every block as views: fp8 keys [B, block_size, 128] and fp32 scales [B, block_size].

    The shape [B, block_size, 132] of the cache counts the right number of bytes but puts none of them where they are.
    """
    check_index_cache(cache)
    blocks, block_size, _ = cache.shape
    step = cache.stride(0)
    start = cache.storage_offset()
    keys = cache.as_strided((blocks, block_size, INDEX_DIM), (step, INDEX_DIM, 1), start)
    scales = cache.as_strided((blocks, block_size * 4), (step, 1), start + block_size * INDEX_DIM)
    return keys.view(torch.float8_e4m3fn), scales.view(torch.float32)


def to_fp8(x: Tensor) -> Tensor:
    """fp32 -> e4m3, nearest even, saturating at +-448 as the GPU does (older torch rounds overflow to NaN)."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def check_format(cache_format: str) -> None:
    """Raise ValueError unless `cache_format` is one of CACHE_FORMATS."""
    if cache_format not in CACHE_FORMATS:
        raise ValueError(f"cache_format={cache_format!r} is unknown; choose one of {', '.join(CACHE_FORMATS)}")


def check_latent_cache(cache: Tensor, cache_format: str, scale: Tensor | float | None) -> None:
    """Raise ValueError unless `cache` has the dtype and width of its format, and a scale where the format needs one."""
    check_format(cache_format)
    dtype, width = _DTYPE[cache_format], _WIDTH[cache_format]
    known = cache.dtype == dtype or (cache_format == "bf16" and cache.dtype in _PLAIN)
    if cache.ndim != 3 or not known or cache.shape[2] != width:
        raise ValueError(
            f"a {cache_format} cache is {dtype} [blocks, block_size, {width}], not {cache.dtype} {tuple(cache.shape)}; "
            "make one with new_latent_cache"
        )
    if (cache_format == "fp8") != (scale is not None):
        raise ValueError(f"scale={scale} with cache_format={cache_format!r}; pass a scale for 'fp8' and only there")


def check_index_cache(cache: Tensor) -> None:
    """Raise ValueError unless `cache` is uint8 [blocks, block_size, 132] with contiguous, 4-byte aligned blocks."""
    if cache.ndim != 3 or cache.dtype != torch.uint8 or cache.shape[2] != INDEX_BYTES:
        raise ValueError(
            f"an index cache is torch.uint8 [blocks, block_size, {INDEX_BYTES}], not {cache.dtype} "
            f"{tuple(cache.shape)}; make one with new_index_cache"
        )
    if cache.stride()[1:] != (INDEX_BYTES, 1) or cache.stride(0) % 4 or cache.storage_offset() % 4:
        raise ValueError(
            f"index cache strides {cache.stride()} at offset {cache.storage_offset()}: a block must be one run of "
            "bytes and start at a multiple of 4, for its fp32 scales; align the block stride"
        )


def _place(slots: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Slots [...] as (block, offset inside it), which index a cache; torch multiplies them by the strides in int64."""
    return slots // block_size, slots % block_size


def _next_power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two >= x, for positive normal fp32: any mantissa bit carries into the exponent."""
    bits = x.view(torch.int32) + 0x007FFFFF
    return (bits & 0x7F800000).view(torch.float32)
