"""Fused norm and RoPE, the Triton launcher: result and errors of reference.py, one launch of kernel.py.

Byte layouts: `latent_views` and `index_views` of kv_cache.py cut the caches into typed fields, and the kernel sees only
those. TRITON_INTERPRET=1 must be set before this module is imported.
Not here: the jobs themselves.
"""

import triton
from torch import Tensor

from dcp_fix.kv_cache import index_views, latent_views
from dcp_fix.norm_rope.inputs import NormRopeInputs
from dcp_fix.norm_rope.kernel import fused_norm_rope_kernel

MANY_TOKENS = 512  # from here on a program of the latent and index jobs takes several rows
KEPT_LAUNCHES = 256  # signatures of arguments that are remembered


def fused_norm_rope_triton(inputs: NormRopeInputs) -> Tensor:
    """`fused_norm_rope` as one launch; result and errors as there. Never waits for the device."""
    key = signature_of(inputs)
    launch = LAUNCHES.get(key)
    if launch is None or not inputs.q.is_cuda:  # what a GPU's tensors hold is not looked at: their signatures decide
        inputs.check()
    inputs = inputs.with_q_out()
    if len(inputs.q) == 0:
        return inputs.q_out
    tensors = kernel_tensors(inputs)
    if launch is None:
        if len(LAUNCHES) >= KEPT_LAUNCHES:
            LAUNCHES.clear()
        launch = LAUNCHES[key] = Launch(numbers(inputs, tensors, rows_each(inputs)))
    launch.run(tensors)
    return inputs.q_out


def rows_each(inputs: NormRopeInputs) -> int:
    """Rows that a program of the latent and index jobs takes."""
    return 4 if len(inputs.q) >= MANY_TOKENS else 1


def kernel_tensors(x: NormRopeInputs) -> dict[str, Tensor | None]:
    """The tensors under the kernel's own names, the caches cut into their fields."""
    tensors = {
        "positions": x.positions, "q": x.q, "q_weight": x.q_weight, "q_out": x.q_out, "kv": x.kv,
        "kv_weight": x.kv_weight, "k_pe": x.k_pe, "cos_sin": x.cos_sin, "kv_out": x.kv_out, "kpe_out": x.kpe_out,
    }  # fmt: skip
    if x.kv_cache is not None and x.slot_mapping is not None:  # a profiling run has no slots
        latent, rope, scales = latent_views(x.kv_cache, x.cache_format)
        tensors |= {"slot_mapping": x.slot_mapping, "cache_latent": latent, "cache_rope": rope, "tile_scales": scales}
        tensors["kv_scale"] = x.kv_scale
    if (slots := x.index_slots) is not None:
        keys, scales = index_views(x.indexer.cache)
        tensors |= {
            "index_slots": slots, "index_k": x.indexer.k, "index_weight": x.indexer.weight,
            "index_bias": x.indexer.bias, "index_cos_sin": x.indexer.cos_sin, "index_keys": keys,
            "index_scales": scales,
        }  # fmt: skip
    if x.indexer is not None:
        tensors["topk_indices"] = x.topk_indices
    return tensors


class Launch:
    """A launch whose tensors alone change: the grid, the numbers and, once compiled, the kernel itself.

    Binding its sixty arguments anew each time takes Triton longer than one token takes the kernel.
    """

    def __init__(self, numbers: dict) -> None:
        self.kernel, self.numbers, self.compiled, rows = fused_norm_rope_kernel, numbers, None, numbers["ROWS"]
        jobs = rows + 2 if "INDEX_HALF" in numbers else rows + 1
        self.grid = (jobs, triton.cdiv(numbers["tokens"], rows), 1)

    def run(self, tensors: dict) -> None:
        """Launch with these tensors, which have the signatures of the first call's."""
        if self.compiled is not None and self.kernel is fused_norm_rope_kernel:
            arguments = self.numbers | tensors
            self.compiled[self.grid](*map(arguments.get, self.kernel.arg_names))
            return
        self.kernel = fused_norm_rope_kernel
        self.compiled = self.kernel[self.grid](  # None under the interpreter
            **tensors, **self.numbers, num_warps=4 if self.numbers["ROWS"] > 1 else 2, enable_fp_fusion=False
        )


LAUNCHES: dict[tuple, Launch] = {}


def signature_of(inputs: NormRopeInputs) -> tuple:
    """What the check and the compiled kernel depend on."""
    indexer = () if inputs.indexer is None else vars(inputs.indexer).values()
    return *map(signature, (vars(inputs) | {"indexer": None}).values()), *map(signature, indexer), rows_each(inputs)


def signature(x: object) -> object:
    """The same of one value: of a tensor its layout, anything else is its own."""
    return (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16) if isinstance(x, Tensor) else x


def numbers(inputs: NormRopeInputs, tensors: dict[str, Tensor | None], rows: int) -> dict:
    """Everything else that the kernel takes: sizes, strides and what is known when compiling."""
    stride = lambda name, dim=0: None if (x := tensors.get(name)) is None else x.stride(dim)  # noqa: E731
    (tokens, width), table = tensors["q"].shape, tensors["cos_sin"]
    given = {
        "eps": inputs.eps, "tokens": tokens, "table_rows": len(table), "ROWS": rows,
        "Q_DIM": width, "Q_BLOCK": triton.next_power_of_2(width),
    }  # fmt: skip
    given |= {f"{name}_stride": stride(name) for name in ("q", "q_out", "kv", "k_pe", "cos_sin", "kv_out", "kpe_out")}
    if "slot_mapping" in tensors:
        given |= {
            "BLOCK_SIZE": inputs.kv_cache.shape[1],
            "latent_block": stride("cache_latent"), "latent_entry": stride("cache_latent", 1),
            "rope_block": stride("cache_rope"), "rope_entry": stride("cache_rope", 1),
            "scales_block": stride("tile_scales"), "scales_entry": stride("tile_scales", 1),
        }  # fmt: skip
    if "index_slots" in tensors:
        indexer, table = inputs.indexer, inputs.indexer.cos_sin
        given |= {
            "index_eps": indexer.eps, "index_k_stride": stride("index_k"),
            "index_cos_sin_stride": stride("index_cos_sin"), "index_table_rows": len(table),
            "index_keys_block": stride("index_keys"),
            "index_scales_block": stride("index_scales"), "INDEX_BLOCK_SIZE": indexer.cache.shape[1],
            "INDEX_HALF": table.shape[1] // 2, "INDEX_INTERLEAVED": indexer.interleaved,
        }  # fmt: skip
    if (topk := tensors.get("topk_indices")) is not None:
        width = topk.shape[1]
        given |= {"topk_stride": topk.stride(0), "TOPK": width, "TOPK_BLOCK": triton.next_power_of_2(width)}
    return given
