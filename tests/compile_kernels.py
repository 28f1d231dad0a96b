"""Compiles the kernels for Hopper without a GPU and prints {name: what tests/test_hopper.py looks at} as JSON.

A process of its own: where Triton interprets, there is nothing to compile. Arguments are those of the launchers.
"""

import json

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dcp_fix.attention import kernel as attention
from dcp_fix.exact import kernel as exact
from dcp_fix.kv_cache import new_index_cache, new_latent_cache
from dcp_fix.norm_rope import IndexerInputs, NormRopeInputs, launcher

BF16, INT32, FP32 = (torch.empty(0, dtype=dtype) for dtype in (torch.bfloat16, torch.int32, torch.float32))
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float8_e4m3fn: "*fp8e4nv", torch.int32: "*i32",
    torch.int64: "*i64", torch.int16: "*i16",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


def compiled(kernel, given: dict):
    """`given` by name: tensors, numbers, constants and options; what is not given is the int 16."""
    options = {name: given.pop(name) for name in OPTIONS if name in given}
    signature, constants, aligned = {}, {}, {}
    for at, name in enumerate(kernel.arg_names):
        value = given.get(name, None if kernel.params[at].has_default else 16)
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
        elif name.isupper() or value is None:
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0 and not name.isupper()):
            aligned[at,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def code(kernel, given: dict) -> dict:
    made = compiled(kernel, given)
    return {"ptx": made.asm["ptx"], "ttir": str(made.asm["ttir"]), "shared": made.metadata.shared}


# --- norm and RoPE ----------------------------------------------------------------------------------------------------


class Recorder:
    """Stands in for the kernel and keeps the arguments of the launch."""

    def __getitem__(self, grid):
        return lambda **arguments: setattr(self, "arguments", arguments)


def norm_rope(cache_format: str, tokens: int) -> dict:
    def bf16(*shape):
        return torch.zeros(shape, dtype=torch.bfloat16)

    table, slots, kernel = torch.zeros(8, 64), torch.arange(tokens) % 8, launcher.fused_norm_rope_kernel
    inputs = NormRopeInputs(
        slots, bf16(tokens, 1536), bf16(1536), bf16(tokens, 512), bf16(512), bf16(tokens, 64), table, 1e-5,
        slot_mapping=slots, kv_cache=new_latent_cache(1, cache_format), cache_format=cache_format,
        kv_out=bf16(tokens, 512), kpe_out=bf16(tokens, 64),
        indexer=IndexerInputs(bf16(tokens, 128), bf16(128), bf16(128), 1e-5, table, new_index_cache(1)),
        topk_indices=torch.zeros(tokens, 2048, dtype=torch.int32),
    )  # fmt: skip
    launcher.fused_norm_rope_kernel = recorder = Recorder()
    launcher.fused_norm_rope_triton(inputs)
    launcher.fused_norm_rope_kernel = kernel
    return code(kernel, recorder.arguments)


# --- attention and exact mode -----------------------------------------------------------------------------------------


def common(cache_format: str) -> dict:
    given = attention.cache_arguments(new_latent_cache(1, cache_format), cache_format)
    given |= {"q": BF16, "TYPE": attention.TYPES[torch.bfloat16], "scale": 1.0, "value_scale": 1.0}
    return given | dict.fromkeys(("packed", "counts", "ends"), INT32) | dict.fromkeys(("out", "lse"), FP32)


def attend(cache_format: str, heads: int, holes: bool = False, piece: int = 0) -> dict:
    blocks = attention.block_sizes(heads, torch.bfloat16, cache_format == "bf16", piece=piece)
    return code(attention._attend, common(cache_format) | blocks | {"SPLITS": 2, "HOLES": holes})


def leaf() -> dict:
    blocks = attention.block_sizes(exact.HEADS, torch.bfloat16) | {"enable_fp_fusion": False}
    return code(exact._attend_leaf, common("fp8_ds_mla") | blocks)


def merge(nodes: int) -> dict:
    given = dict.fromkeys(("parts", "logs", "out", "lse"), FP32) | {"NODES": nodes, "enable_fp_fusion": False}
    return code(exact._merge_node, given)


if __name__ == "__main__":
    codes = {
        "norm, fp8_ds_mla": norm_rope("fp8_ds_mla", 4),
        "norm, bf16": norm_rope("bf16", 4),
        "norm, many": norm_rope("fp8_ds_mla", launcher.MANY_TOKENS),
        "attend, fp8_ds_mla": attend("fp8_ds_mla", 64),
        "attend, long": attend("fp8_ds_mla", 64, piece=2048),
        "attend, bf16": attend("bf16", 128),
        "attend, holes": attend("fp8_ds_mla", 16, holes=True),
        "leaf": leaf(),
        "merge of 2": merge(2),
        "merge of 8": merge(8),
    }
    print(json.dumps(codes))
