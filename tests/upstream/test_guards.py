"""A copy of 0.30.0 with one guard taken out is named for that guard, and for nothing else.

The edits find their place by a few words of the release's source and break one condition each.
"""

import re

import pytest

from dcp_fix.doctor import runner
from dcp_fix.doctor.opening import folder
from dcp_fix.doctor.probes import PROBES

KERNEL = "vllm/models/deepseek_v32/common/kernels.py"
ATTENTION = "vllm/models/deepseek_v32/attention.py"
MERGE = "vllm/v1/attention/ops/dcp.py"
COMMUNICATOR, SCALES = "silent-collective", "scale-contract"  # 0.30.0 has these untouched

# what is taken out: (file, pattern, replacement, the probe that must say so)
GUARDS = {
    "query job outside the slot guard": (
        KERNEL,
        r"(\n    if pid == 2:\n)",
        r"\n    if pid == 2 and (slot_mapping_ptr is None or tl.load(slot_mapping_ptr + tok_idx) >= 0):\n",
        "query-rows",
    ),
    "dense rows outside the slot guard": (KERNEL, r"pid != 1 or \(kv_out_ptr is None[^)]*\)", "True", "k-rows"),
    "dense rows of a profiling run": (
        KERNEL,
        r"if kv_out_ptr is None and kpe_out_ptr is None and index_k_out_ptr is None:",
        "if True:",
        "k-rows",
    ),
    "no latent entry at a negative slot": (KERNEL, r"if slot_idx < 0:\n +return", "", "owner-only-writes"),
    "no indexer entry at a negative slot": (
        KERNEL,
        r"elif (tl\.load\(slot_mapping_ptr \+ tok_idx\) < 0 and \(\s*)pid != 1",
        r"elif \1pid == 1 and pid != 1",
        "owner-only-writes",
    ),
    "no latent entry without a cache": (KERNEL, r"if mla_cache_entry_stride == 0:\n +return", "", "owner-only-writes"),
    "no indexer entry without a cache": (KERNEL, r"indexer_cache_ptr is not None and ", "", "owner-only-writes"),
    "shared layers keep the selection": (
        KERNEL,
        r"(if pid == 3:\n +)if not HAS_INDEXER:",
        r"\1if False:",
        "owner-only-writes",
    ),
    "top-k reset": (KERNEL, r"(if pid == 3:\n +)if not HAS_INDEXER:", r"\1if True:", "owner-only-writes"),
    "query gather under pure DCP": (
        ATTENTION,
        r"elif not self\.use_pcp and self",
        "elif False and self",
        "combine-routing",
    ),
    "combine under pure DCP": (
        ATTENTION,
        r"if (self\.impl\.dcp_world_size > 1:\n +assert lse)",
        r"if self.use_pcp and \1",
        "combine-routing",
    ),
    "query gather under PCP+DCP": (
        ATTENTION,
        r"if self\.use_pcp and self\.impl\.dcp_world_size >",
        "if False and 0 >",
        "combine-routing",
    ),
    "merge drops +inf": (MERGE, r"lse = tl\.where\(\(lse != lse\)[^\n]*\n", "pass\n", "empty-rows"),
    "merge selects instead of multiplying": (
        MERGE,
        r"output = tl\.where\(factor == 0\.0, 0\.0, output\)",
        "pass",
        "empty-rows",
    ),
    "all-to-all merge selects": (MERGE, r"partial = tl\.where\(weight == 0\.0, 0\.0, partial\)", "pass", "empty-rows"),
}


REPAIRED_BY_THE_PLUGIN = {"query job outside the slot guard", "query gather under pure DCP", "combine under pure DCP"}


def defects(root, fixes=()):
    return {found.id for found in runner.probe_target(folder(root), fixes=fixes) if found.verdict == "defect"}


def edit(root, path, pattern, replacement):
    """Replace the first match of `pattern`; the file is a hard link, so it is written anew."""
    source = (root / path).read_text()
    edited, count = re.subn(pattern, replacement, source, count=1)
    assert count == 1, f"{pattern!r} no longer matches {path}"
    (root / path).unlink()
    (root / path).write_text(edited)


def test_the_untouched_copy_has_no_defect_but_those_of_the_release(copy_of):
    assert defects(copy_of("0.30.0")) == {COMMUNICATOR, "direct-a2a-layout", SCALES}


@pytest.mark.parametrize("guard", GUARDS)
def test_one_guard_taken_out_is_named(guard, copy_of, monkeypatch):
    path, pattern, replacement, probe = GUARDS[guard]
    root = copy_of("0.30.0")
    edit(root, path, pattern, replacement)
    # Only the probes that load the edited file: the others see the untouched copy, and each child costs seconds.
    code = next(p.code for p in PROBES if p.id == probe)
    monkeypatch.setattr(runner, "PROBES", tuple(p for p in PROBES if p.code == code or p.needs))
    assert defects(root) - {SCALES} == {probe}
    if guard in REPAIRED_BY_THE_PLUGIN:
        assert defects(root, fixes=[probe]) - {SCALES} == set()
