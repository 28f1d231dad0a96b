"""Copies of a release with one line of its own broken: the six probes of slots, ids, lengths, partitions, queries and
scales name it, each in its column and in no other.

The edits find their place by a few words of the release's source.
"""

import pytest

from dcp_fix.doctor import runner
from dcp_fix.doctor.opening import folder
from dcp_fix.doctor.probes import PROBES
from tests.upstream.test_guards import edit

KERNEL = "vllm/models/deepseek_v32/common/kernels.py"
ATTENTION = "vllm/models/deepseek_v32/attention.py"
SLOTS = "vllm/v1/worker/gpu/block_table.py"
IDS = "vllm/v1/attention/backends/mla/sparse_utils.py"
INDEXER = "vllm/v1/attention/backends/mla/indexer.py"
PCP = "vllm/v1/worker/gpu/pcp_manager.py"
RELEASE = "0.33.0"
NEW = ("scale-contract", "slot-mapping", "index-filter", "mtp-lengths", "pcp-partition", "query-preparation")

# what is broken: (file, pattern, replacement, the probe that must say so)
BROKEN = {
    "no power of two": (KERNEL, r"tile_scale = tl\.math\.exp2\([^\n]*", "pass", "scale-contract"),
    "owner without interleave": (
        SLOTS,
        r"offsets // CP_INTERLEAVE % CP_SIZE ==",
        "offsets % CP_SIZE ==",
        "slot-mapping",
    ),
    "replicated groups": (SLOTS, r"local_positions = tl\.where\(sharded,[^\n]*", "pass", "slot-mapping"),
    "padding": (SLOTS, r"range\(actual_num_tokens,", "range(max_num_tokens,", "slot-mapping"),
    "filter without interleave": (IDS, r"\(tok // DCP_INTERLEAVE\) % DCP_SIZE", "tok % DCP_SIZE", "index-filter"),
    "every id": (IDS, r"is_remote = owning_rank != DCP_RANK", "is_remote = owning_rank < 0", "index-filter"),
    "subtraction after localisation": (
        INDEXER,
        r"local_seq_lens = get_dcp_local_seq_lens\(\s+seq_lens,",
        "local_seq_lens = seq_lens - seq_lens[-1:] + get_dcp_local_seq_lens(seq_lens[-1:],",
        "mtp-lengths",
    ),
    "last piece": (PCP, r"\(rank, num_chunks - 1 - rank\)", "(rank, num_chunks - 2 - rank)", "pcp-partition"),
    "short prefills": (PCP, r"replicated \|= drops_a_chunk", "pass", "pcp-partition"),
    "absorbed query": (ATTENTION, r"or not self\._use_sparse_mha\(attn_metadata\)\n", "\n", "query-preparation"),
    "rotated query": (KERNEL, r"tl\.store\(q_pe_dst \+ rot_off \* 2, [^\n]*", "pass", "query-preparation"),
}


@pytest.fixture
def defects(copy_of, monkeypatch):
    """Those of the new probes that find one in a copy of the release, edited or not."""

    def examine(wanted=NEW, **change):
        root = copy_of(RELEASE)
        if change:
            edit(root, **change)
        monkeypatch.setattr(runner, "PROBES", tuple(p for p in PROBES if p.id in wanted))
        found = runner.probe_target(folder(root), on_cpu=True)
        assert not [f for f in found if f.verdict == "not-run"]
        return {f.id for f in found if f.verdict == "defect"}

    return examine


def test_the_release_is_healthy(defects):
    assert defects() == set()


@pytest.mark.parametrize("what", BROKEN)
def test_one_broken_line_is_named(what, defects):
    path, pattern, replacement, probe = BROKEN[what]
    assert defects([probe], path=path, pattern=pattern, replacement=replacement) == {probe}
