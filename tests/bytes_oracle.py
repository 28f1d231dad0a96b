"""The cache formats byte by byte in numpy, written from the layout alone: shares no code with dcp_fix.kv_cache."""

import numpy as np

# The 127 finite non-negative e4m3 values in order of their codes 0x00 .. 0x7e: 3 mantissa bits, exponent bias 7.
E4M3 = np.array([(c & 7) / 8 * 2.0**-6 if c < 8 else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3) - 7) for c in range(127)])


def e4m3_codes(x: np.ndarray) -> np.ndarray:
    """uint8 codes of fp32 values: nearest, ties to the even code, saturating at 448, NaN to 0x7f."""
    magnitude = np.abs(x.astype(np.float64))
    middle = (E4M3[:-1] + E4M3[1:]) / 2
    low = np.searchsorted(middle, magnitude, side="left")  # a tie stays at the lower code ...
    tie = (low < 126) & (middle[np.minimum(low, 125)] == magnitude)
    code = np.where(tie & (low % 2 == 1), low + 1, low)  # ... unless that one is odd
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint8) | (np.signbit(x).astype(np.uint8) << 7)


def e4m3_values(codes: np.ndarray) -> np.ndarray:
    values = np.append(E4M3, np.nan)[codes & 0x7F]
    return np.where(codes & 0x80, -values, values)


def bf16_bytes(x: np.ndarray) -> np.ndarray:
    """uint8 [..., 2 n], little endian: fp32 rounded to its upper half, ties to even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    upper = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    return np.ascontiguousarray(upper).view(np.uint8)


def entry(latent: np.ndarray, rope: np.ndarray) -> np.ndarray:
    """One fp8_ds_mla entry, uint8 [656], of fp32 latent [512] and rope [64]."""
    out = np.zeros(656, np.uint8)
    for tile in range(4):
        x = latent[tile * 128 : (tile + 1) * 128].astype(np.float32)
        scale = max(np.abs(x).max() / np.float32(448), np.float32(2.0**-126))
        out[tile * 128 : (tile + 1) * 128] = e4m3_codes(x / scale)
        out[512 + 4 * tile : 516 + 4 * tile] = np.frombuffer(np.float32(scale).tobytes(), np.uint8)
    out[528:656] = bf16_bytes(rope)
    return out


def index_key(k: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """fp8 codes [128] and the power-of-two scale of one index key, the exponent found by trial."""
    amax, exponent = max(np.float32(np.abs(k).max()), np.float32(1e-4)), -126
    while 2.0**exponent < np.float64(amax / np.float32(448)):
        exponent += 1
    return e4m3_codes(k / np.float32(2.0**exponent)), np.float32(2.0**exponent)
