"""The plugin on published wheels: the doctor's verdicts turn, and our launcher writes what upstream's kernel writes.

The comparison runs upstream's kernel under the interpreter in this process, in fp32, where its row arithmetic is exact;
bytes of fp8 entries are compared on a GPU only (the interpreter casts fp8 wrongly).
"""

import contextlib
import inspect
from types import SimpleNamespace

import pytest
import torch

from dcp_fix.base.equality import close
from dcp_fix.doctor.probes import kernel, layer, routing
from dcp_fix.doctor.probes.kernel_run import KERNELS, load_kernel
from dcp_fix.doctor.report import examine
from dcp_fix.doctor.stand_ins import module
from dcp_fix.doctor.world import World
from dcp_fix.kv_cache import index_views, new_index_cache, read_index
from dcp_fix.plugin import put_back
from dcp_fix.repairs.launcher import launcher

T, Q = 6, 192
OWNED = [3, 70, 2, 64, 5, 1]


@pytest.mark.parametrize("version", ["0.28.0", "0.29.0", "0.30.0"])
def test_with_the_plugin_every_repaired_probe_is_ok(version, release_wheel):
    report = examine(str(release_wheel(version)), with_plugin=True)
    verdicts = {probe.id: probe.verdict for probe in report.probes}
    assert verdicts["k-rows"] == ("not-applicable" if version == "0.28.0" else "ok")
    assert {verdicts[name] for name in ("query-rows", "combine-routing", "owner-only-writes")} == {"ok"}
    assert verdicts["silent-collective"] == "ok"
    said = report.notes[-1]
    assert ("k-rows" in said, "query-rows" in said) == (version == "0.29.0", version == "0.28.0")


@contextlib.contextmanager
def upstream_kernel(root):
    quantised = module(is_quantized_kv_cache=lambda dtype: dtype.startswith("fp8"))
    with World(root, real=KERNELS, stand_ins={"vllm.utils.torch_utils": quantised}) as world:
        yield load_kernel(world).fused_norm_rope


def arguments(upstream, *, indexer, interleaved, slots):
    """One call in fp32 with a plain cache; outputs are poisoned."""
    names = inspect.signature(upstream).parameters
    make = torch.Generator().manual_seed(3)

    def rows(*shape):
        return torch.randn(*shape, generator=make)

    angle = torch.arange(16)[:, None] * 10000 ** (-torch.arange(0, 64, 2) / 64)
    table = torch.cat([angle.cos(), angle.sin()], dim=1)
    everything = dict(
        positions=torch.arange(T) * 2,
        q_c=rows(T, Q + 8)[:, :Q],
        q_rms_norm_w=rows(Q),
        q_rms_eps=1e-5,
        kv_c=rows(T, 576)[:, :512],
        kv_rms_norm_w=rows(512),
        kv_rms_eps=1e-5,
        k_pe=rows(T, 576)[:, 512:],
        k_rope_cos_sin_cache=table,
        index_k=rows(T, 160)[:, :128] if indexer else None,
        index_k_layer_norm_w=rows(128) if indexer else None,
        index_k_layer_norm_bias=rows(128) if indexer else None,
        index_k_layer_norm_eps=1e-6,
        index_k_rope_cos_sin_cache=table if indexer else None,
        topk_indices_buffer=torch.full((T + 1, 24), 9, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        indexer_slot_mapping=torch.tensor(slots).flip(0),
        indexer_k_cache=new_index_cache(2) if indexer else None,
        mla_kv_cache=torch.full((2, 64, 576), -7.0),
        mla_kv_cache_dtype="auto",
        mla_k_scale=torch.ones(1),
        has_indexer=indexer,
        index_rope_interleave=interleaved,
        q_c_out=torch.full((T, Q), torch.nan),
        kv_c_out=torch.full((T, 512), torch.nan),
        k_pe_out=torch.full((T, 64), torch.nan),
        index_k_out=torch.full((T, 128), torch.nan) if indexer else None,
    )
    return {name: value for name, value in everything.items() if name in names}


@pytest.mark.parametrize(("indexer", "interleaved"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("version", ["0.28.0", "0.29.0", "0.30.0"])
def test_ours_writes_what_upstreams_kernel_writes(version, indexer, interleaved, unpacked):
    with upstream_kernel(unpacked(version)) as upstream:
        theirs, ours = (arguments(upstream, indexer=indexer, interleaved=interleaved, slots=OWNED) for _ in range(2))
        upstream(**theirs)
        launcher(upstream)(**ours)
    for name in ("q_c_out", "kv_c_out", "k_pe_out", "index_k_out", "mla_kv_cache"):
        if ours.get(name) is not None:
            assert (ours[name] - theirs[name]).abs().max() < 1e-5, name
            assert not ours[name].isnan().any(), name
    assert torch.equal(ours["topk_indices_buffer"], theirs["topk_indices_buffer"])
    if indexer:
        scales = [index_views(a["indexer_k_cache"])[1] for a in (ours, theirs)]
        assert close(*scales, ulps=0)  # powers of two; the fp8 codes are the interpreter's
        assert read_index(ours["indexer_k_cache"], torch.tensor(OWNED)).any()


# --- defects put back -------------------------------------------------------------------------------------------------

KERNEL_PROBES = {"query-norm": kernel.query_rows, "k-rows": kernel.k_rows, None: kernel.owner_only_writes}


def silent(case, control=False):
    """The probes report their progress to it."""


@pytest.mark.parametrize("defects", [(), ("query-norm",), ("k-rows",), ("query-norm", "k-rows")])
@pytest.mark.parametrize("version", ["0.29.0", "0.30.0"])
def test_the_kernels_probes_find_what_was_put_back_and_nothing_else(version, defects, unpacked):
    with upstream_kernel(unpacked(version)) as upstream:
        loaded = SimpleNamespace(fused_norm_rope=launcher(upstream))
        for defect in (*defects, *defects):  # the attention module has it too: once is enough
            put_back.FUNCTIONS[defect](loaded)
        verdicts = {name: probe(loaded.fused_norm_rope, "cpu", silent)[0] for name, probe in KERNEL_PROBES.items()}
    assert {name for name, verdict in verdicts.items() if verdict == "defect"} == set(defects)
    assert set(verdicts.values()) <= {"ok", "defect"}


@pytest.mark.parametrize("version", ["0.29.0", "0.30.0"])
def test_the_layer_of_a_release_without_its_routing(version, unpacked):
    """Made by a constructor, as in vLLM: the manager that it finds is the one whose collectives are gone."""
    collaborators = layer.Collaborators()
    with World(unpacked(version), routing.ATTENTION, collaborators.stand_ins()) as world:
        loaded = routing.load_attention(world)
        loaded.DeepseekV32Attention.__init__ = lambda layer, run: vars(layer).update(run._attributes(), use_pcp=False)
        assert routed(loaded, collaborators).faults() == []
        put_back.combine_routing_put_back(loaded)
        run = routed(loaded, collaborators)
    assert run.backend.query.shape[1] == layer.HEADS and run.manager.gathered is run.manager.combined is None


def routed(loaded, collaborators):
    """One decode step of a layer at DCP4."""
    run = collaborators.run = layer.Run(dcp=4, tp=4)
    attention = type("Dense", (loaded.DeepseekV32Attention,), {"_use_sparse_mha": lambda self, metadata: False})
    attention(run).forward(torch.arange(layer.PADDED), torch.ones(layer.PADDED, 8))
    return run
