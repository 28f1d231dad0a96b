"""The door of fused norm and RoPE: what both implementations, reference.py and launcher.py, take and refuse."""

from dataclasses import dataclass, replace

import torch
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


@dataclass(frozen=True, eq=False)
class NormRopeInputs:
    """T tokens of a layer: what its four jobs (reference.py) read, and where they write."""

    positions: Tensor  # [T]
    q: Tensor  # [T, Lq]
    q_weight: Tensor  # [Lq]
    kv: Tensor  # [T, 512]
    kv_weight: Tensor  # [512]
    k_pe: Tensor  # [T, 64]
    cos_sin: Tensor  # [max_pos, 64] fp32: 32 cosines, then 32 sines
    eps: float
    slot_mapping: Tensor | None = None  # [T]; None in a profiling run: nothing is cached
    kv_cache: Tensor | None = None  # see kv_cache.new_latent_cache
    cache_format: str = "fp8_ds_mla"
    kv_scale: Tensor | None = None  # [1] fp32, for cache_format "fp8"
    q_out: Tensor | None = None  # [T, Lq], allocated when None
    kv_out: Tensor | None = None  # [T, 512], written only when given
    kpe_out: Tensor | None = None  # [T, 64], written only when given
    indexer: IndexerInputs | None = None  # None in layers that share the previous indexer's selection
    topk_indices: Tensor | None = None  # int32 [>= T, topk], reset only when `indexer` is given

    @property
    def index_slots(self) -> Tensor | None:
        """The slots that the index job writes to; None when it has nowhere to write."""
        if self.indexer is None or self.indexer.cache is None:
            return None
        return self.slot_mapping if self.indexer.slot_mapping is None else self.indexer.slot_mapping

    def with_q_out(self) -> "NormRopeInputs":
        """The same, `q_out` allocated where it was None."""
        return self if self.q_out is not None else replace(self, q_out=torch.empty_like(self.q))

    def check(self) -> None:
        """Raise ValueError, with the value, for a wrong shape, type or stride, on a CPU for a slot or position too."""
        tokens, width = (len(self.positions), self.q.shape[-1]) if self.q.ndim == 2 else (len(self.positions), "Lq")
        shapes = {
            "q": (tokens, width), "q_weight": (width,), "q_out": (tokens, width),
            "kv": (tokens, LATENT), "kv_weight": (LATENT,), "kv_out": (tokens, LATENT),
            "k_pe": (tokens, ROPE), "kpe_out": (tokens, ROPE),
            "cos_sin": (len(self.cos_sin), ROPE), "slot_mapping": (tokens,),
        }  # fmt: skip
        for name, shape in shapes.items():
            _check_shape(name, getattr(self, name), shape)
        if self.kv_cache is not None:
            check_latent_cache(self.kv_cache, self.cache_format, self.kv_scale)
            _check_rows(self.positions, self.slot_mapping, self.kv_cache, self.cos_sin)
        if self.indexer is not None:
            _check_indexer(self.indexer, self.positions, self.index_slots)
            if self.topk_indices is not None and (self.topk_indices.ndim != 2 or len(self.topk_indices) < tokens):
                raise ValueError(
                    f"topk_indices {tuple(self.topk_indices.shape)} needs a row for each of {tokens} tokens"
                )


def _check_indexer(indexer: IndexerInputs, positions: Tensor, slots: Tensor | None) -> None:
    _check_shape("indexer.k", indexer.k, (len(positions), INDEX_DIM))
    _check_shape("indexer.weight", indexer.weight, (INDEX_DIM,))
    _check_shape("indexer.bias", indexer.bias, (INDEX_DIM,))
    _check_shape("indexer.slot_mapping", indexer.slot_mapping, (len(positions),))
    rotated = indexer.cos_sin.shape[-1]
    if indexer.cos_sin.ndim != 2 or rotated % 2 or rotated > INDEX_DIM:
        raise ValueError(f"indexer.cos_sin {tuple(indexer.cos_sin.shape)} must be [max_pos, R], R even and <= 128")
    if indexer.cache is not None:
        check_index_cache(indexer.cache)
        _check_rows(positions, slots, indexer.cache, indexer.cos_sin)


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
