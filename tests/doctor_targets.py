"""Tiny vLLM look-alikes for the doctor's tests: folders and wheels with a fused kernel in torch, right or wrong.

`SOUND` does what the probes ask for, with a few lines of torch instead of a kernel. A test replaces a line to break it.
"""

import zipfile

METADATA = "Metadata-Version: 2.4\nName: vllm\nVersion: 9.9.9\n"
KERNELS = "vllm/models/deepseek_v32/common/kernels.py"

SOUND = """
import torch

def norm(x, w, eps):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w.float()

def fused_norm_rope(
    positions, q_c, q_rms_norm_w, q_rms_eps, kv_c, kv_rms_norm_w, kv_rms_eps, k_pe, k_rope_cos_sin_cache, index_k,
    index_k_layer_norm_w, index_k_layer_norm_bias, index_k_layer_norm_eps, index_k_rope_cos_sin_cache,
    topk_indices_buffer, slot_mapping=None, indexer_k_cache=None, mla_kv_cache=None, mla_kv_cache_dtype="auto",
    mla_k_scale=None, has_indexer=True, index_rope_interleave=False, q_c_out=None, kv_c_out=None, k_pe_out=None,
):
    slots = [-1] * len(positions) if slot_mapping is None else slot_mapping.tolist()
    # BEFORE
    q_c_out.copy_(norm(q_c, q_rms_norm_w, q_rms_eps))
    if kv_c_out is not None:
        cos, sin = k_rope_cos_sin_cache[positions].chunk(2, dim=-1)
        a, b = k_pe.float()[:, 0::2], k_pe.float()[:, 1::2]
        kv_c_out.copy_(norm(kv_c, kv_rms_norm_w, kv_rms_eps))
        k_pe_out.copy_(torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(1))
    if has_indexer:
        topk_indices_buffer[: len(slots)] = -1
    tiles = norm(kv_c, kv_rms_norm_w, kv_rms_eps).view(-1, 4, 128)
    scales = (tiles.abs().amax(-1) / 448).log2().ceil().exp2()
    values = (tiles / scales[..., None]).to(torch.float8_e4m3fn).view(-1, 512).view(torch.uint8)
    entries = torch.cat([values, scales.view(torch.uint8)], dim=1)
    for token, slot in enumerate(slots):
        if slot >= 0:
            if mla_kv_cache is not None:
                mla_kv_cache.view(torch.uint8)[slot // 64, slot % 64] = 1
                if mla_kv_cache_dtype == "fp8_ds_mla":
                    mla_kv_cache.view(torch.uint8)[slot // 64, slot % 64, :528] = entries[token]
            if indexer_k_cache is not None:
                indexer_k_cache.view(indexer_k_cache.shape[0], -1)[slot // 64, slot % 64 * 128] = 1
    return q_c_out
"""


def folder(path, kernels=SOUND, files=None):
    """A folder that the doctor takes for site-packages; `kernels` None leaves that file out."""
    contents = {"vllm/__init__.py": "raise RuntimeError('executed')", **({KERNELS: kernels} if kernels else {})}
    contents |= {"vllm-9.9.9.dist-info/METADATA": METADATA, **(files or {})}
    for name, text in contents.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def wheel(path, kernels=SOUND, files=None, members=()):
    """The same as a wheel; `members` are (ZipInfo or name, text) that are added as they are."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("vllm/__init__.py", "raise RuntimeError('executed')")
        archive.writestr(KERNELS, kernels)
        for name, text in [*(files or {"vllm-9.9.9.dist-info/METADATA": METADATA}).items(), *members]:
            archive.writestr(name, text)
    return path
