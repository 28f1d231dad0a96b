"""Six probes on look-alikes: each names what is broken in one, passes the healthy one and does not judge a new one."""

import pytest

from dcp_fix.doctor.attempt import NotRun
from dcp_fix.doctor.probes import (
    index_filter,
    kernel_run,
    layer,
    mtp_lengths,
    pcp_partition,
    query_preparation,
    routing,
    scale_contract,
    slot_mapping,
)
from dcp_fix.doctor.world import World
from tests import probe_targets

LOCALISES_FIRST = """def build(self, lengths):
        lengths = self._dcp_localize_decode_seq_lens(lengths, 1, True)
        return self._prepare_decode_tensors(lengths)

    def later(self, lengths):"""
SHIFTED = "(1, descending=True).values; slots += (slots >= 0) * (dcp_size > 1)"
SEGMENTS = (
    "    def _iter_rank_chunks(self, rank, num_scheduled_tokens, is_prefilling):",
    """    def _get_rank_segments(
        self, rank, num_scheduled_tokens, num_computed_tokens, is_prefilling, query_start_loc_np
    ):
        from types import SimpleNamespace

        for request, first, tokens in self.cut(rank, num_scheduled_tokens, is_prefilling):
            start = query_start_loc_np[request] + first
            yield SimpleNamespace(global_batch_req_idx=request, global_batch_slice=slice(start, start + tokens))

    def cut(self, rank, num_scheduled_tokens, is_prefilling):""",
)


def silent(case, control=False):
    pass


def judged(root, probe):
    """(verdict, evidence) of one probe on the look-alike at `root`, loaded as the doctor loads it."""
    collaborators = layer.Collaborators()
    stand_ins = query_preparation.stand_ins(collaborators) if probe == "query-preparation" else {}
    with World(root, ("vllm.v1.", "vllm.models."), stand_ins) as world:
        match probe:
            case "slot-mapping":
                return slot_mapping.slot_mapping(slot_mapping.load_kernel(world), "cpu", silent)
            case "index-filter":
                write = slot_mapping.load_kernel(world)
                return index_filter.index_filter(index_filter.load_filter(world), write, "cpu", silent)
            case "mtp-lengths":
                return mtp_lengths.mtp_lengths(mtp_lengths.load_builder(world), "cpu", silent)
            case "pcp-partition":
                return pcp_partition.pcp_partition(pcp_partition.load_manager(world), silent)
            case "query-preparation":
                attention = routing.load_attention(world)
                return query_preparation.query_preparation(attention, collaborators, "cpu", silent)
            case "scale-contract":
                launcher = kernel_run.load_kernel(world).fused_norm_rope
                return scale_contract.scale_contract(launcher, "cpu", silent)


@pytest.mark.parametrize("probe", probe_targets.FILES)
def test_a_healthy_target_is_ok(probe, tmp_path):
    verdict, evidence = judged(probe_targets.tree(tmp_path, probe), probe)
    assert verdict == "ok", evidence


BROKEN = [  # probe, what stands in its look-alike, what in its place, what the evidence says
    ("slot-mapping", "divmod(positions[token], CP_INTERLEAVE)", "(positions[token], 0)", "rank 0 of 3, interleave 2"),
    ("slot-mapping", "turn % ranks == rank", "turn % ranks == 0", "rank 1 of 2, interleave 1, blocks of 4: token"),
    ("slot-mapping", "turn // ranks * CP_INTERLEAVE", "turn * CP_INTERLEAVE", "rank 0 of 2, interleave 1, blocks of 4"),
    ("slot-mapping", "if dcp_sharded[group] else (1, 0)", "", "blocks of 4, not sharded"),
    ("slot-mapping", "state >= 0 and ", "", "blocks of 4: token 18 gets slot"),
    (
        "slot-mapping",
        "out[starts[-1] :] = PAD_ID",
        "pass",
        "rank 0 of 2, interleave 1, blocks of 4: token 21 gets slot 9999999 for -1",
    ),
    ("index-filter", "& (turn % dcp_size == dcp_rank)", "", "rank 0 of 2, interleave 1, 64 ids: counts"),
    ("index-filter", "turn // dcp_size * cp", "turn * cp", "column"),
    (
        "index-filter",
        "cp_kv_cache_interleave_size + within",
        "cp_kv_cache_interleave_size",
        "rank 0 of 4, interleave 4",
    ),
    (
        "index-filter",
        "return slots, counts",
        "return slots, counts.clamp(max=3) if dcp_size > 1 else counts",
        "counts [3, ",
    ),
    ("index-filter", "if compact_valid_to_front", "if dcp_size == 1", "packed: the owned slots do not stand in front"),
    ("index-filter", "(1, descending=True).values", SHIFTED, "the slots are not those that the write side has"),
    (
        "mtp-lengths",
        "return local(seq_lens,",
        "return seq_lens - seq_lens[-1:] + local(seq_lens[-1:],",
        "[3, 4, 5] for [4, 4, 5]",
    ),
    ("mtp-lengths", "- rank * interleave", "- rank", "rank 1 of 2, interleave 2"),
    ("mtp-lengths", "def build(self, lengths):", LOCALISES_FIRST, "build localises the lengths before it expands them"),
    (
        "pcp-partition",
        "(rank, pieces - 1 - rank)",
        "(rank, pieces - 2 - rank)",
        "a prefill of 16 tokens: one rank should",
    ),
    ("pcp-partition", "min(size, length - piece * size)", "size", "a prefill of 33 tokens: one rank should have each"),
    (
        "pcp-partition",
        "~is_prefilling | short",
        "~is_prefilling",
        "PCP2/DCP2: a prefill of 1 tokens: the ranks have [1, 0]",
    ),
    ("pcp-partition", "== rank else ()", "== rank else (0,)", "decodes shared out: a decode of 1 tokens: one rank"),
    (
        "query-preparation",
        "not self._use_sparse_mha(metadata) or",
        "",
        "sparse: attention gets 2 heads of 9 values for 2 of 10",
    ),
    ("query-preparation", "rotated[:] = q_pe", "rotated[1:] = q_pe[1:]", "sparse: query rows [0] are never written"),
    ("query-preparation", "ready.dtype != pe.dtype else ready", "False else ready", "dense, fp8, full graph: "),
    (
        "query-preparation",
        "[0] if ready.dtype != pe.dtype",
        "[0] * 2 if ready.dtype != pe.dtype",
        "full graph: query rows",
    ),
    (
        "query-preparation",
        "torch.cat([nope, rotated]",
        "torch.cat([latent, rotated]",
        "dense, full graph: attention gets",
    ),
    (
        "scale-contract",
        "scales = scales.log2().ceil().exp2()",
        "pass",
        "a tile of amax 336 gets scale 0.75: amax / 448",
    ),
    ("scale-contract", "ceil()", "floor()", "neither amax / 448 nor a power of two"),
    (
        "scale-contract",
        "tiles / scales[..., None]",
        "tiles * 448 / tiles.abs().amax(-1)[..., None]",
        "byte times scale gives",
    ),
]


@pytest.mark.parametrize(("probe", "old", "new", "says"), BROKEN)
def test_what_is_broken_in_one_is_named(probe, old, new, says, tmp_path):
    verdict, evidence = judged(probe_targets.tree(tmp_path, probe, old, new), probe)
    assert verdict == "defect" and says in evidence, evidence


NEW = [  # a name that is gone, a parameter more, a control that fails
    ("slot-mapping", "def _compute_slot_mappings_kernel", "def renamed", "has no _compute_slot_mappings_kernel"),
    ("slot-mapping", "    max_num_tokens,", "    plan, max_num_tokens,", "new ['plan'], gone nothing"),
    ("slot-mapping", " % block if mine", " % block + 1 if mine", "the control, no DCP, fails"),
    ("index-filter", "def triton_filter_and", "def renamed_and", "has no triton_filter_and_convert_dcp_index"),
    ("index-filter", "def _compute_slot_mappings_kernel", "def renamed", "has no _compute_slot_mappings_kernel"),
    ("index-filter", "    req_id, block", "    plan, req_id, block", "new ['plan'], gone nothing"),
    ("index-filter", "held % BLOCK_SIZE, -1", "0, -1", "the control, no DCP, fails"),
    ("mtp-lengths", "def _dcp_localize_decode_seq_lens", "def renamed", "Builder._dcp_localize_decode_seq_lens"),
    (
        "mtp-lengths",
        "seq_lens, num_decodes, seq_lens_is",
        "seq_lens, plan, seq_lens_is",
        "new ['plan'], gone ['num_decodes']",
    ),
    (
        "mtp-lengths",
        "lengths = self._prepare_decode_tensors(lengths)[0]",
        "pass",
        "build no longer calls _prepare_decode",
    ),
    ("mtp-lengths", "n - k + 1", "n - k", "lengths 10 and 7 become [[7, 8, 9, 6]"),
    ("pcp-partition", "def _iter_rank_chunks", "def renamed", "has neither _iter_rank_chunks nor _get_rank_segments"),
    ("pcp-partition", "(self, rank, num", "(self, plan, rank, num", "new ['plan'], gone nothing"),
    ("pcp-partition", "if piece * size < length", "if piece * size > length", "the control, one decode, fails"),
    ("query-preparation", "class DeepseekV32Attention", "class Renamed", "no longer has both"),
    (
        "query-preparation",
        "context.attn_metadata[",
        "self.plan[",
        "the control, a plain query in the sparse branch, fails",
    ),
    ("query-preparation", "return self.forward_impl(", "return self.plan(", "asks its collaborators for something new"),
    ("scale-contract", "    positions, q_c", "    plan, positions, q_c", "new ['plan']"),
    (
        "scale-contract",
        "scales = tiles.abs().amax(-1) / 448",
        "scales = tiles.abs().amax(-1) / 240",
        "the control, tiles whose",
    ),
]


@pytest.mark.parametrize(("probe", "old", "new", "says"), NEW)
def test_what_is_new_is_not_judged(probe, old, new, says, tmp_path):
    with pytest.raises(NotRun) as reason:
        judged(probe_targets.tree(tmp_path, probe, old, new), probe)
    assert says in str(reason.value)


@pytest.mark.parametrize("probe", ["slot-mapping", "index-filter", "mtp-lengths", "pcp-partition"])
def test_a_target_without_the_module_is_not_judged(probe, tmp_path):
    with pytest.raises(NotRun, match="this vLLM has no vllm.v1."):
        judged(tmp_path, probe)


@pytest.mark.parametrize(("major", "verdict"), [(None, "defect"), (9, "ok"), (10, "defect"), (12, "defect")])
def test_the_old_scale_is_judged_for_the_gpu_that_is_there(major, verdict):
    found, evidence = scale_contract.verdict(scale_contract.PER_AMAX, "measured", major)
    assert found == verdict and "Hopper (SM90): ok. Blackwell" in evidence


def test_an_older_manager_is_asked_for_its_segments(tmp_path):
    root = probe_targets.tree(tmp_path, "pcp-partition", *SEGMENTS)
    assert judged(root, "pcp-partition")[0] == "ok"
