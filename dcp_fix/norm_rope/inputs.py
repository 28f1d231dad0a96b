"""The door of fused norm and RoPE: what both implementations, reference.py and launcher.py, take and refuse."""

from dataclasses import dataclass

from torch import Tensor

from dcp_fix.kv_cache import INDEX_DIM, LATENT, ROPE, check_index_cache, check_latent_cache


@dataclass(frozen=True)
class IndexerInputs:
    """What a layer with a lightning indexer adds. `slot_mapping` defaults to the latent's, the blocks are its own."""

    k: Tensor  # [T, 128]
    weight: Tensor  # [128]
    bias: Tensor  # [128]
    eps: float
    cos_sin: Tensor  # [max_pos, R] fp32, R <= 128: the rotated values come first
    cache: Tensor | None = None  # uint8 [B, block_size, 132]
    slot_mapping: Tensor | None = None  # [T]
    interleaved: bool = True


def index_slots(indexer: IndexerInputs | None, slot_mapping: Tensor | None) -> Tensor | None:
    """The slots that the index job writes to; None when it has nowhere to write."""
    if indexer is None or indexer.cache is None:
        return None
    return slot_mapping if indexer.slot_mapping is None else indexer.slot_mapping


def check_inputs(
    positions, q, q_weight, kv, kv_weight, k_pe, cos_sin, slot_mapping, kv_cache, cache_format, kv_scale, q_out, kv_out,
    kpe_out, indexer, topk_indices,
) -> None:  # fmt: skip
    """The door of both implementations: raises ValueError with the offending value."""
    tokens, width = (len(positions), q.shape[-1]) if q.ndim == 2 else (len(positions), "Lq")
    _check_shape("q", q, (tokens, width))
    _check_shape("q_weight", q_weight, (width,))
    _check_shape("q_out", q_out, (tokens, width))
    _check_shape("kv", kv, (tokens, LATENT))
    _check_shape("kv_weight", kv_weight, (LATENT,))
    _check_shape("kv_out", kv_out, (tokens, LATENT))
    _check_shape("k_pe", k_pe, (tokens, ROPE))
    _check_shape("kpe_out", kpe_out, (tokens, ROPE))
    _check_shape("cos_sin", cos_sin, (len(cos_sin), ROPE))
    _check_shape("slot_mapping", slot_mapping, (tokens,))
    if kv_cache is not None:
        check_latent_cache(kv_cache, cache_format, kv_scale)
        _check_rows(positions, slot_mapping, kv_cache, cos_sin)
    if indexer is not None:
        _check_indexer(indexer, positions, slot_mapping)
        if topk_indices is not None and (topk_indices.ndim != 2 or len(topk_indices) < tokens):
            raise ValueError(f"topk_indices {tuple(topk_indices.shape)} needs a row for each of {tokens} tokens")


def _check_indexer(indexer: IndexerInputs, positions: Tensor, slot_mapping: Tensor | None) -> None:
    _check_shape("indexer.k", indexer.k, (len(positions), INDEX_DIM))
    _check_shape("indexer.weight", indexer.weight, (INDEX_DIM,))
    _check_shape("indexer.bias", indexer.bias, (INDEX_DIM,))
    _check_shape("indexer.slot_mapping", indexer.slot_mapping, (len(positions),))
    rotated = indexer.cos_sin.shape[-1]
    if indexer.cos_sin.ndim != 2 or rotated % 2 or rotated > INDEX_DIM:
        raise ValueError(f"indexer.cos_sin {tuple(indexer.cos_sin.shape)} must be [max_pos, R], R even and <= 128")
    if indexer.cache is not None:
        check_index_cache(indexer.cache)
        _check_rows(positions, index_slots(indexer, slot_mapping), indexer.cache, indexer.cos_sin)


def _check_rows(positions: Tensor, slots: Tensor | None, cache: Tensor, cos_sin: Tensor) -> None:
    """Slots inside the cache and, where there is a slot, positions inside the table. CPU only: a GPU would stall."""
    if slots is None or slots.is_cuda or slots.numel() == 0:
        return
    capacity = cache.shape[0] * cache.shape[1]
    if slots.max() >= capacity:
        raise ValueError(f"slot {int(slots.max())} lies outside a cache of {capacity} slots; allocate more blocks")
    outside = (slots >= 0) & ((positions < 0) | (positions >= len(cos_sin)))
    if outside.any():
        raise ValueError(
            f"position {int(positions[outside][0])} of a row that owns a slot lies outside the cos/sin table of "
            f"{len(cos_sin)} positions; lengthen the table"
        )


def _check_shape(name: str, x: Tensor | None, shape: tuple) -> None:
    if x is None:
        return
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {shape}")
    if x.numel() and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name} has strides {x.stride()}: the last must be 1; call .contiguous() on it")
