"""The two caches byte by byte against numpy, with every byte that must stay poisoned."""

import doctest
import resource

import numpy as np
import pytest
import torch

from dcp_fix import kv_cache
from dcp_fix.base.equality import same_bytes
from dcp_fix.kv_cache import (
    CACHE_FORMATS,
    decode_latent,
    encode_latent,
    index_views,
    latent_views,
    new_index_cache,
    new_latent_cache,
    quantize_index_key,
    read_index,
    read_latent,
    to_fp8,
    write_index,
    write_latent,
)
from tests import bytes_oracle

POISON = 0x7F
formats = pytest.mark.parametrize("cache_format", CACHE_FORMATS)


def rows(tokens, width, seed=0, spread=4.0):
    """fp32 rows whose magnitudes span many octaves, so that tiles get different scales and codes go subnormal."""
    generator = torch.Generator().manual_seed(seed)
    octave = torch.randn(tokens, width // 32, generator=generator).mul(spread).exp2().repeat_interleave(32, dim=1)
    return torch.randn(tokens, width, generator=generator) * octave


def scale_for(cache_format):
    return 0.37 if cache_format == "fp8" else None


def gapped(cache, gap):
    """A poisoned cache of the same shape whose blocks lie `gap` bytes further apart, and the memory below it."""
    blocks, size = cache.shape[0], cache[0].numel() * cache.element_size()
    memory = torch.full((blocks, size + gap), POISON, dtype=torch.uint8)
    return memory[:, :size].view(cache.dtype).unflatten(1, cache.shape[1:]), memory


def expected_row(latent, rope, cache_format):
    if cache_format == "fp8_ds_mla":
        return bytes_oracle.entry(latent, rope)
    both = np.concatenate((latent, rope))
    if cache_format == "bf16":
        return bytes_oracle.bf16_bytes(both)
    return bytes_oracle.e4m3_codes(both / np.float32(0.37))


def test_docstrings():
    assert doctest.testmod(kv_cache).failed == 0


def test_the_layout_in_numbers():
    assert (kv_cache.ENTRY_BYTES, kv_cache.SCALE_AT, kv_cache.ROPE_AT) == (656, 512, 528)
    assert kv_cache.INDEX_BYTES == 132 and kv_cache.FLT_MIN == 2.0**-126
    sizes = {f: new_latent_cache(3, f)[0].numel() * new_latent_cache(3, f).element_size() for f in CACHE_FORMATS}
    assert sizes == {"fp8_ds_mla": 64 * 656, "fp8": 64 * 576, "bf16": 64 * 1152}
    assert new_index_cache(3).shape == (3, 64, 132)


def test_fp8_rounds_to_nearest_even_and_saturates():
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    finite = values.isfinite()
    assert np.array_equal(bytes_oracle.e4m3_values(codes.numpy())[finite], values[finite].numpy())
    middles = (values[:126] + values[1:127]) / 2
    edges = torch.tensor([448.0, 463.9, 464.0, 465.0, 479.9, 480.0, 1e9, float("inf"), 1e-9, 0.0, float("nan")])
    x = torch.cat((values[finite], middles, middles.nextafter(torch.tensor(1e9)), middles.nextafter(-middles), edges))
    for signed in (x, -x):
        got = to_fp8(signed).view(torch.uint8)
        number = ~signed.isnan()
        assert np.array_equal(got[number].numpy(), bytes_oracle.e4m3_codes(signed[number].numpy()))
        assert (got[~number] & 0x7F == 0x7F).all()


@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
def test_an_entry_is_exactly_these_656_bytes(tokens):
    latent, rope = rows(tokens, 512, seed=tokens), rows(tokens, 64, seed=tokens + 1)
    packed = encode_latent(latent, rope)
    assert packed.shape == (tokens, 656) and packed.dtype == torch.uint8
    for t in range(tokens):
        assert packed[t].tolist() == bytes_oracle.entry(latent[t].numpy(), rope[t].numpy()).tolist()


def test_an_entry_of_special_tiles():
    latent = torch.zeros(1, 512)
    latent[0, 128:256] = 1e-44  # subnormal: the floor FLT_MIN is the scale
    latent[0, 256:384] = -448.0
    latent[0, 384:512] = torch.linspace(-3e38, 3e38, 128)
    packed = encode_latent(latent, torch.full((1, 64), -0.0))
    assert packed[0].tolist() == bytes_oracle.entry(latent[0].numpy(), np.full(64, -0.0, np.float32)).tolist()
    assert packed[0, 512:528].view(torch.float32)[:3].tolist() == [2.0**-126, 2.0**-126, 1.0]
    assert packed[0, :128].eq(0).all() and packed[0, 256:384].eq(0xFE).all()


def test_decoding_gives_each_value_within_half_a_code_of_its_tile():
    latent, rope = rows(19, 512), rows(19, 64)
    got, got_rope = decode_latent(encode_latent(latent, rope))
    scale = latent.unflatten(1, (4, 128)).abs().amax(-1, keepdim=True) / 448
    error = (got - latent).unflatten(1, (4, 128)).abs()
    assert (error <= latent.unflatten(1, (4, 128)).abs() / 16 * 1.000001 + scale * 2.0**-10).all()
    assert same_bytes(got_rope, rope.bfloat16().float())
    assert same_bytes(encode_latent(got, got_rope)[:, 528:], encode_latent(latent, rope)[:, 528:])


@formats
@pytest.mark.parametrize("block_size, gap", [(64, 0), (4, 0), (5, 240), (64, 16)])
def test_a_write_touches_its_slots_and_nothing_else(cache_format, block_size, gap):
    cache, memory = gapped(new_latent_cache(7, cache_format, block_size), gap)
    slots = torch.randperm(7 * block_size, generator=torch.Generator().manual_seed(3))[:13]
    slots[[0, 5, 12]] = torch.tensor([-1, -7, -1])
    latent, rope = rows(13, 512), rows(13, 64, spread=1.0)
    write_latent(cache, latent, rope, slots, cache_format, scale_for(cache_format))

    expected = torch.full_like(memory, POISON)
    width = memory.shape[1] - gap
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            entry = expected[slot // block_size, :width].view(block_size, -1)[slot % block_size]
            entry.copy_(torch.from_numpy(expected_row(latent[t].numpy(), rope[t].numpy(), cache_format)))
    assert same_bytes(memory, expected)


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reading_returns_what_was_written_and_zeros_for_holes(cache_format, dtype):
    cache, _ = gapped(new_latent_cache(5, cache_format), 48)
    latent, rope = rows(11, 512, spread=1.0).to(dtype), rows(11, 64, spread=1.0).to(dtype)
    slots = torch.arange(11).mul(29)
    scale = scale_for(cache_format)
    write_latent(cache, latent, rope, slots, cache_format, scale)
    wanted = torch.stack((slots, torch.full_like(slots, -1)))  # [2, 11]
    got = read_latent(cache, wanted, cache_format, scale)
    assert got.shape == (2, 11, 576) and got.dtype == torch.float32
    assert got[1].eq(0).all(), "a hole must read as zeros even where slot 0 holds NaN"
    exact = torch.cat((latent, rope), dim=1).float()
    if cache_format == "bf16":
        assert same_bytes(got[0], exact.bfloat16().float())
    else:
        assert ((got[0] - exact).abs() <= exact.abs() / 16 * 1.000001 + exact.abs().max() * 2.0**-15).all()


def test_a_hole_reads_as_zeros_where_slot_0_holds_nan():
    cache, _ = gapped(new_latent_cache(1, "fp8"), 0)
    index_cache, _ = gapped(new_index_cache(1), 0)
    assert read_latent(cache, torch.tensor([0]), "fp8", 1.0).isnan().all()
    assert read_latent(cache, torch.tensor([-1]), "fp8", 1.0).eq(0).all()
    assert read_index(index_cache, torch.tensor([0])).isnan().all()
    assert read_index(index_cache, torch.tensor([-1])).eq(0).all()


@formats
def test_views_are_the_fields_of_every_entry(cache_format):
    cache, _ = gapped(new_latent_cache(3, cache_format, 4), 32)
    latent, rope = rows(12, 512, spread=1.0), rows(12, 64, spread=1.0)
    write_latent(cache, latent, rope, torch.arange(12), cache_format, scale_for(cache_format))
    codes, key, scales = latent_views(cache, cache_format)
    assert codes.shape == (3, 4, 512) and key.shape == (3, 4, 64)
    unscaled = codes.float()
    if scales is not None:
        unscaled = (unscaled.unflatten(-1, (4, 128)) * scales.unsqueeze(-1)).flatten(-2)
    factor = scale_for(cache_format) or 1.0
    key_factor = factor if cache_format == "fp8" else 1.0
    got = torch.cat((unscaled * factor, key.float() * key_factor), dim=-1).flatten(0, 1)
    assert same_bytes(got, read_latent(cache, torch.arange(12), cache_format, scale_for(cache_format)))


@pytest.mark.parametrize("amax", [448 * 2.0**-8, 448 * 2.0**-8 * (1 + 2.0**-23), 1e-4, 1e-6, 0.0, 448.0, 3.0, 1e30])
def test_an_index_scale_is_the_next_power_of_two(amax):
    k = torch.linspace(-1, 1, 128).unsqueeze(0) * amax
    codes, scale = quantize_index_key(k)
    expected_codes, expected_scale = bytes_oracle.index_key(k[0].numpy())
    assert scale.item() == expected_scale and np.log2(expected_scale) % 1 == 0
    assert codes.view(torch.uint8)[0].tolist() == expected_codes.tolist()


@pytest.mark.parametrize("block_size, gap", [(64, 0), (4, 0), (5, 60), (64, 252)])
def test_an_index_block_is_all_codes_then_all_scales(block_size, gap):
    cache, memory = gapped(new_index_cache(6, block_size), gap)
    slots = torch.randperm(6 * block_size, generator=torch.Generator().manual_seed(5))[:14]
    slots[[1, 13]] = -1
    k = rows(14, 128)
    write_index(cache, k, slots)

    expected = torch.full_like(memory, POISON)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = expected[slot // block_size], slot % block_size
            codes, scale = bytes_oracle.index_key(k[t].numpy())
            block[offset * 128 : offset * 128 + 128] = torch.from_numpy(codes)
            at = block_size * 128 + offset * 4
            block[at : at + 4] = torch.frombuffer(bytearray(scale.tobytes()), dtype=torch.uint8)
    assert same_bytes(memory, expected)
    error = (read_index(cache, slots) - torch.where(slots.unsqueeze(1) >= 0, k, 0.0)).abs()
    assert (error <= k.abs() / 16 + k.abs().amax(1, keepdim=True) * 2.0**-16).all()
    assert [view.data_ptr() - memory.data_ptr() for view in index_views(cache)] == [0, block_size * 128]


def test_an_index_cache_may_lie_inside_a_larger_allocation():
    """As one of many layers' in one buffer: bytes before and behind it stay, and it reads as written."""
    whole = torch.full((5, 64, 132), POISON, dtype=torch.uint8)
    cache, alone = whole[2:4], new_index_cache(2)
    k, slots = rows(3, 128, seed=7), torch.tensor([0, 63, 100])
    write_index(cache, k, slots)
    write_index(alone, k, slots)
    assert (whole[:2] == POISON).all() and (whole[4:] == POISON).all()
    assert same_bytes(read_index(cache, slots), read_index(alone, slots))
    assert all(view.data_ptr() >= cache.data_ptr() for view in index_views(cache))


@pytest.mark.parametrize("cache_format, first", [("fp8_ds_mla", 3_273_604), ("fp8", 3_728_271)])
def test_case_10_offsets_are_64_bit(cache_format, first):
    """Slots around the first whose byte offset leaves int32; the cache is never touched, so it takes no memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    blocks = first // 64 + 3
    width, dtype = new_latent_cache(0, cache_format).shape[2], new_latent_cache(0, cache_format).dtype
    cache = torch.empty((blocks, 64, width), dtype=torch.uint8).view(dtype)
    slots = torch.tensor([first - 1, first, first + 128], dtype=torch.int64)
    assert [(s * width > 2**31 - 1) for s in slots.tolist()] == [False, True, True]
    latent, rope = rows(3, 512, spread=1.0), rows(3, 64, spread=1.0)
    write_latent(cache, latent, rope, slots, cache_format, scale_for(cache_format))
    for t, slot in enumerate(slots.tolist()):
        row = cache.view(torch.uint8).view(-1)[slot * width : (slot + 1) * width]
        assert row.tolist() == expected_row(latent[t].numpy(), rope[t].numpy(), cache_format).tolist()
    small = new_latent_cache(1, cache_format)
    write_latent(small, latent, rope, torch.arange(3), cache_format, scale_for(cache_format))
    got = read_latent(cache, slots, cache_format, scale_for(cache_format))
    assert same_bytes(got, read_latent(small, torch.arange(3), cache_format, scale_for(cache_format)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: new_latent_cache(1, "fp4"), "cache_format='fp4' is unknown"),
        (lambda: read_latent(new_latent_cache(1, "bf16"), torch.tensor([0]), "fp8", 1.0), "make one with new_latent"),
        (lambda: read_latent(new_latent_cache(1, "fp8"), torch.tensor([0]), "fp8"), "scale=None"),
        (lambda: read_latent(new_latent_cache(1, "bf16"), torch.tensor([0]), "bf16", 0.5), "scale=0.5"),
        (lambda: read_index(new_latent_cache(1, "fp8_ds_mla"), torch.tensor([0])), "make one with new_index_cache"),
        (lambda: read_index(new_index_cache(2).transpose(0, 1), torch.tensor([0])), "must be one run"),
        (lambda: read_index(gapped(new_index_cache(2), 2)[0], torch.tensor([0])), "align the block stride"),
    ],
)
def test_bad_caches_are_refused_with_the_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()
