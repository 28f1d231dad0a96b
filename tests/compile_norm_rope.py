"""Compiles the fused kernel for Hopper without a GPU and prints {"format": {"ptx": ..., "ttir": ...}} as JSON; "many"
is fp8_ds_mla for as many tokens as take several rows a program.

A process of its own: where Triton interprets, there is nothing to compile. Arguments are those of the launcher itself.
"""

import json

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dcp_fix.kv_cache import CACHE_FORMATS, new_index_cache, new_latent_cache
from dcp_fix.norm_rope import IndexerInputs, NormRopeInputs
from dcp_fix.norm_rope import launcher as norm_rope_launcher

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
KERNEL = norm_rope_launcher.fused_norm_rope_kernel


class Recorder:
    """Stands in for the kernel and keeps the arguments of the launch."""

    def __getitem__(self, grid):
        return lambda **arguments: setattr(self, "arguments", arguments)


def launch_arguments(cache_format: str, tokens: int = 4) -> dict:
    def bf16(*shape):
        return torch.zeros(shape, dtype=torch.bfloat16)

    table, slots = torch.zeros(8, 64), torch.arange(tokens) % 8
    recorder = norm_rope_launcher.fused_norm_rope_kernel = Recorder()
    inputs = NormRopeInputs(
        slots, bf16(tokens, 1536), bf16(1536), bf16(tokens, 512), bf16(512), bf16(tokens, 64), table, 1e-5,
        slot_mapping=slots, kv_cache=new_latent_cache(1, cache_format), cache_format=cache_format,
        kv_scale=torch.ones(1) if cache_format == "fp8" else None, kv_out=bf16(tokens, 512), kpe_out=bf16(tokens, 64),
        indexer=IndexerInputs(bf16(tokens, 128), bf16(128), bf16(128), 1e-5, table, new_index_cache(1)),
        topk_indices=torch.zeros(tokens, 2048, dtype=torch.int32),
    )  # fmt: skip
    norm_rope_launcher.fused_norm_rope_triton(inputs)
    return recorder.arguments


def compiled(arguments: dict) -> dict:
    options = {name: arguments.pop(name) for name in ("num_warps", "enable_fp_fusion")}
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(KERNEL.arg_names):
        value = arguments.get(name)
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
        elif name.isupper() or value is None:
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0 and not name.isupper()):
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(KERNEL, signature, constexprs=constants, attrs=attributes)
    asm = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    return {"ptx": asm["ptx"], "ttir": str(asm["ttir"])}


if __name__ == "__main__":
    codes = {cache_format: compiled(launch_arguments(cache_format)) for cache_format in CACHE_FORMATS}
    codes["many"] = compiled(launch_arguments("fp8_ds_mla", norm_rope_launcher.MANY_TOKENS))
    print(json.dumps(codes))
