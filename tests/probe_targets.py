"""Tiny vLLM look-alikes for the probes of slots, ids, lengths, partitions, queries and scales: right, in plain torch.

A test replaces a line of one to break it. Kernels are objects that take a grid and keep the decorated function in `fn`,
as Triton's do.
"""

SLOTS = """
import ctypes


class Kernel:
    def __init__(self, fn):
        self.fn = fn

    def __getitem__(self, grid):
        return self.fn


@Kernel
def _compute_slot_mappings_kernel(
    max_num_tokens, idx_mapping, query_start_loc, pos, block_table_ptrs, block_table_strides, block_sizes,
    slot_mapping_enabled, dcp_sharded, slot_mappings_ptr, slot_mappings_stride, cp_rank, CP_SIZE, CP_INTERLEAVE, PAD_ID,
    TRITON_BLOCK_SIZE,
):
    starts, positions, pointers = query_start_loc.tolist(), pos.tolist(), block_table_ptrs.tolist()
    for group, block in enumerate(block_sizes.tolist()):
        ranks, rank = (CP_SIZE, cp_rank) if dcp_sharded[group] else (1, 0)
        stride, out = int(block_table_strides[group]), slot_mappings_ptr[group]
        out[starts[-1] :] = PAD_ID
        for request, state in enumerate(idx_mapping.tolist()):
            for token in range(starts[request], starts[request + 1]):
                turn, within = divmod(positions[token], CP_INTERLEAVE)
                held = turn // ranks * CP_INTERLEAVE + within
                mine = state >= 0 and bool(slot_mapping_enabled[group]) and turn % ranks == rank
                table = (ctypes.c_int32 * (stride * 3)).from_address(pointers[group])
                out[token] = table[state * stride + held // block] * block + held % block if mine else PAD_ID
"""

IDS = """
import torch


def triton_filter_and_convert_dcp_index(
    req_id, block_table, token_indices, dcp_size, dcp_rank, cp_kv_cache_interleave_size=1, BLOCK_SIZE=64,
    NUM_TOPK_TOKENS=2048, BLOCK_N=128, return_valid_counts=False, compact_valid_to_front=True,
):
    turn, within = token_indices // cp_kv_cache_interleave_size, token_indices % cp_kv_cache_interleave_size
    held = turn // dcp_size * cp_kv_cache_interleave_size + within
    mine = (token_indices >= 0) & (turn % dcp_size == dcp_rank)
    blocks = block_table[req_id.long()].gather(1, held.clamp(min=0).long() // BLOCK_SIZE)
    slots = torch.where(mine, blocks * BLOCK_SIZE + held % BLOCK_SIZE, -1)
    counts = mine.sum(1).to(torch.int32)
    if compact_valid_to_front:
        slots = slots.sort(1, descending=True).values
    return slots, counts
"""

LENGTHS = """
import torch


def local(lengths, ranks, rank, interleave):
    turns = lengths // (ranks * interleave)
    return turns * interleave + (lengths - turns * ranks * interleave - rank * interleave).clamp(0, interleave)


class DeepseekV32IndexerMetadataBuilder:
    def _prepare_global_decode_seq_lens(
        self, global_seq_lens, decode_lens, decode_lens_cpu, query_start_loc, num_decode_tokens, use_native,
        max_decode_len,
    ):
        return self.every(global_seq_lens, decode_lens)

    def _prepare_decode_tensors(
        self, seq_lens, block_table, decode_lens, decode_lens_cpu, query_start_loc, num_decodes, num_decode_tokens,
        use_native, next_n, max_decode_len,
    ):
        return self.every(seq_lens, decode_lens), block_table, decode_lens, num_decode_tokens, False

    def every(self, lengths, counts):
        pairs = zip(lengths.tolist(), counts.tolist())
        return torch.tensor([n - k + 1 + token for n, k in pairs for token in range(k)], dtype=torch.int32)

    def _dcp_localize_decode_seq_lens(self, seq_lens, num_decodes, seq_lens_is_buffer_view):
        return local(seq_lens, self.dcp_world_size, self.dcp_rank, self.cp_kv_cache_interleave_size)

    def build(self, lengths):
        lengths = self._prepare_decode_tensors(lengths)[0]
        return self._dcp_localize_decode_seq_lens(lengths, 1, True)
"""

PARTITION = """
class PCPManager:
    def __init__(self, pcp_world_size, dcp_world_size, shard_decode_requests):
        raise NotImplementedError

    def replicated_requests(self, num_scheduled_tokens, is_prefilling):
        pieces = 2 * self.pcp_world_size
        sizes = -(-num_scheduled_tokens // pieces)
        short = (self.dcp_world_size > 1) & ((pieces - 1) * sizes >= num_scheduled_tokens)
        return ~is_prefilling | short

    def _iter_rank_chunks(self, rank, num_scheduled_tokens, is_prefilling):
        pieces, decodes = 2 * self.pcp_world_size, 0
        everywhere = self.replicated_requests(num_scheduled_tokens, is_prefilling)
        for request, length in enumerate(num_scheduled_tokens.tolist()):
            size, mine = length, (0,)
            if not everywhere[request]:
                size, mine = -(-length // pieces), (rank, pieces - 1 - rank)
            elif self.shard_decode_requests:
                mine, decodes = (0,) if decodes % self.pcp_world_size == rank else (), decodes + 1
            for piece in mine:
                if piece * size < length:
                    yield request, piece * size, min(size, length - piece * size)
"""

QUERY_KERNELS = """
import torch


def fused_norm_rope(*arguments, **options):
    raise NotImplementedError


def fused_q(positions, q_pe, cos_sin, ql_nope, quantize):
    rotated = torch.empty_like(q_pe)
    rotated[:] = q_pe
    packed = torch.empty(*q_pe.shape[:2], q_pe.shape[2] + ql_nope.shape[2], dtype=torch.float8_e4m3fn)
    packed[:] = torch.cat([ql_nope, rotated], dim=-1).to(torch.float8_e4m3fn)
    return packed if quantize else rotated
"""

QUERY = """
import torch

from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v32.common.kernels import fused_norm_rope, fused_q


class DeepseekV32Attention:
    def _should_prepare_mqa_query(self, metadata, mode):
        return not self._use_sparse_mha(metadata) or mode == CUDAGraphMode.FULL or self.recording()

    def recording(self):
        return torch.cuda.is_current_stream_capturing()

    def forward(self, positions, hidden_states):
        context = get_forward_context()
        metadata = context.attn_metadata[self.layer_name]
        prepare = self._should_prepare_mqa_query(metadata, context.cudagraph_runtime_mode)
        query = self.q_b_proj(fused_norm_rope(positions, hidden_states))[0]
        query = query.view(len(positions), self.num_local_heads, self.qk_head_dim)
        nope, pe = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        latent = torch.einsum("thn,hnl->thl", nope, self.W_UK_T) if prepare else nope
        ready = fused_q(positions, pe, self.rotary_emb.cos_sin_cache, latent, self._fp8_query and prepare)
        rows = metadata.num_actual_tokens
        if self._use_sparse_mha(metadata):
            rotated = self.rotary_emb(positions, pe)[0] if ready.dtype != pe.dtype else ready
            return self.forward_impl(torch.cat([nope, rotated], dim=-1), None)
        ready = ready[:rows] if self._fp8_query else (latent[:rows], ready[:rows])
        return self.impl.forward_mqa(ready, self.kv_cache, metadata, self)
"""

SCALES = """
import torch

def fused_norm_rope(
    positions, q_c, q_rms_norm_w, q_rms_eps, kv_c, kv_rms_norm_w, kv_rms_eps, k_pe, k_rope_cos_sin_cache, index_k,
    index_k_layer_norm_w, index_k_layer_norm_bias, index_k_layer_norm_eps, index_k_rope_cos_sin_cache,
    topk_indices_buffer, slot_mapping, indexer_k_cache, mla_kv_cache, mla_kv_cache_dtype, mla_k_scale, has_indexer,
    index_rope_interleave, q_c_out=None,
):
    x = kv_c.float()
    latent = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + kv_rms_eps) * kv_rms_norm_w.float()
    tiles = latent.view(-1, 4, 128)
    scales = tiles.abs().amax(-1) / 448
    scales = scales.log2().ceil().exp2()
    values = (tiles / scales[..., None]).to(torch.float8_e4m3fn).view(len(x), 512).view(torch.uint8)
    entries = torch.cat([values, scales.contiguous().view(torch.uint8)], dim=1)
    for token, slot in enumerate(slot_mapping.tolist()):
        mla_kv_cache.view(torch.uint8)[slot // 64, slot % 64, :528] = entries[token]
    return q_c_out
"""

COMMON = "vllm/models/deepseek_v32/common/kernels.py"
FILES = {
    "slot-mapping": {"vllm/v1/worker/gpu/block_table.py": SLOTS},
    "index-filter": {
        "vllm/v1/attention/backends/mla/sparse_utils.py": IDS,
        "vllm/v1/worker/gpu/block_table.py": SLOTS,
    },
    "mtp-lengths": {"vllm/v1/attention/backends/mla/indexer.py": LENGTHS},
    "pcp-partition": {"vllm/v1/worker/gpu/pcp_manager.py": PARTITION},
    "query-preparation": {"vllm/models/deepseek_v32/attention.py": QUERY, COMMON: QUERY_KERNELS},
    "scale-contract": {COMMON: SCALES},
}


def tree(root, probe: str, old: str = "", new: str = ""):
    """The look-alike of a probe below `root`, with `old`, which one of its files has once, replaced."""
    assert not old or sum(text.count(old) for text in FILES[probe].values()) == 1, old
    for name, text in FILES[probe].items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text.replace(old, new) if old else text)
    return root
