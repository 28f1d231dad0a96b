"""The repairs, and defects put back, on look-alikes: our launcher under upstream's signature, routing, refusal."""

import inspect
import logging
import types

import pytest
import torch

from dcp_fix.base.equality import close, same_bytes
from dcp_fix.kv_cache import new_index_cache, new_latent_cache
from dcp_fix.norm_rope import IndexerInputs, NormRopeInputs, fused_norm_rope
from dcp_fix.plugin import put_back
from dcp_fix.repairs import launcher, repairs

T, Q, TOPK = 5, 96, 40
SLOTS = [3, -1, 70, -1, 64]


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def upstream(
    positions, q_c, q_rms_norm_w, q_rms_eps, kv_c, kv_rms_norm_w, kv_rms_eps, k_pe, k_rope_cos_sin_cache, index_k,
    index_k_layer_norm_w, index_k_layer_norm_bias, index_k_layer_norm_eps, index_k_rope_cos_sin_cache,
    topk_indices_buffer, slot_mapping=None, indexer_slot_mapping=None, indexer_k_cache=None, mla_kv_cache=None,
    mla_kv_cache_dtype="auto", mla_k_scale=None, has_indexer=True, index_rope_interleave=False, q_c_out=None,
    kv_c_out=None, k_pe_out=None, index_k_out=None,
):  # fmt: skip
    """The parameters of one release; called only where ours hands a call on."""
    return "upstream"


OURS = launcher.launcher(upstream)


def table(length=16, width=64):
    angle = torch.arange(length)[:, None] * 10000 ** (-torch.arange(0, width, 2) / width)
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def call(cache_format="bf16", dtype=torch.float32, indexer=True, **changes):
    """Arguments of one call, as the attention layer makes them: rows are slices of wider ones."""
    return (
        dict(
            positions=torch.arange(T),
            q_c=rows(T, Q + 8, seed=1).to(dtype)[:, :Q],
            q_rms_norm_w=rows(Q, seed=2).to(dtype),
            q_rms_eps=1e-6,
            kv_c=rows(T, 512 + 64, seed=3).to(dtype)[:, :512],
            kv_rms_norm_w=rows(512, seed=4).to(dtype),
            kv_rms_eps=1e-6,
            k_pe=rows(T, 512 + 64, seed=5).to(dtype)[:, 512:],
            k_rope_cos_sin_cache=table(),
            index_k=rows(T, 128 + 32, seed=6).to(dtype)[:, :128] if indexer else None,
            index_k_layer_norm_w=rows(128, seed=7) if indexer else None,
            index_k_layer_norm_bias=rows(128, seed=8) if indexer else None,
            index_k_layer_norm_eps=1e-6,
            index_k_rope_cos_sin_cache=table() if indexer else None,
            topk_indices_buffer=torch.full((T + 3, TOPK), 7, dtype=torch.int32),
            slot_mapping=torch.tensor(SLOTS),
            indexer_k_cache=new_index_cache(2) if indexer else None,
            mla_kv_cache=new_latent_cache(2, cache_format).view(
                torch.bfloat16 if cache_format == "bf16" else torch.uint8
            ),
            mla_kv_cache_dtype={"bf16": "auto", "fp8": "fp8_e4m3"}.get(cache_format, cache_format),
            mla_k_scale=torch.tensor([0.5]),
            has_indexer=indexer,
        )
        | changes
    )


def directly(a, cache_format, kv_out=None, kpe_out=None):
    """The same through dcp_fix.norm_rope: (q_out, latent cache, indexer cache, top-k)."""
    latent, index = new_latent_cache(2, cache_format), new_index_cache(2)
    topk = torch.full((T + 3, TOPK), 7, dtype=torch.int32)
    indexer = a["has_indexer"] and IndexerInputs(
        a["index_k"],
        a["index_k_layer_norm_w"],
        a["index_k_layer_norm_bias"],
        a["index_k_layer_norm_eps"],
        a["index_k_rope_cos_sin_cache"],
        index,
        a.get("indexer_slot_mapping"),
        a.get("index_rope_interleave", False),
    )
    inputs = NormRopeInputs(
        a["positions"], a["q_c"], a["q_rms_norm_w"], a["kv_c"], a["kv_rms_norm_w"], a["k_pe"],
        a["k_rope_cos_sin_cache"], eps=1e-6, slot_mapping=a["slot_mapping"], kv_cache=latent,
        cache_format=cache_format, kv_scale=a["mla_k_scale"] if cache_format == "fp8" else None, kv_out=kv_out,
        kpe_out=kpe_out, indexer=indexer or None, topk_indices=topk,
    )  # fmt: skip
    return fused_norm_rope(inputs), latent, index, topk


# --- the launcher -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_format", ["bf16", "fp8", "fp8_ds_mla"])
def test_every_format_and_rope_style_reaches_our_kernel(cache_format, dtype, interleaved):
    a = call(
        cache_format, dtype, index_rope_interleave=interleaved, indexer_slot_mapping=torch.tensor([65, -1, 1, -1, 9])
    )
    dense = dict(
        kv_c_out=torch.full((T, 512), torch.nan, dtype=dtype), k_pe_out=torch.full((T, 64), torch.nan, dtype=dtype)
    )
    q_out = torch.full((T, Q), torch.nan, dtype=dtype)
    assert OURS(**a, **dense, q_c_out=q_out) is q_out
    kv_out, kpe_out = torch.zeros(T, 512, dtype=dtype), torch.zeros(T, 64, dtype=dtype)
    want_q, want_latent, want_index, want_topk = directly(a, cache_format, kv_out, kpe_out)
    assert same_bytes(q_out, want_q)
    assert same_bytes(dense["kv_c_out"], kv_out) and same_bytes(dense["k_pe_out"], kpe_out)
    assert same_bytes(a["mla_kv_cache"].view(torch.uint8), want_latent.view(torch.uint8)) and want_latent.any()
    assert same_bytes(a["indexer_k_cache"], want_index) and want_index.any()
    assert torch.equal(a["topk_indices_buffer"], want_topk)


def test_a_shared_layer_leaves_the_selection_alone():
    a = call(indexer=False)
    OURS(**a)
    assert (a["topk_indices_buffer"] == 7).all()
    assert a["mla_kv_cache"].any()


def test_caches_written_by_the_caller():
    """PCP: no cache is given, every row is handed out, the indexer's too; the slot mapping plays no part."""
    a = call(mla_kv_cache=None, indexer_k_cache=None, index_rope_interleave=True)
    outs = dict(kv_c_out=torch.full((T, 512), torch.nan), k_pe_out=torch.full((T, 64), torch.nan))
    index_k_out = torch.full((T, 128), torch.nan)
    OURS(**a, **outs, index_k_out=index_k_out)
    assert not any(x.isnan().any() for x in (*outs.values(), index_k_out))
    b = call(slot_mapping=torch.arange(T), index_rope_interleave=True)
    OURS(**b)
    cached = b["indexer_k_cache"].view(2, -1)[0, : T * 128].view(torch.float8_e4m3fn).float().view(T, 128)
    scales = b["indexer_k_cache"].view(2, -1)[0, 64 * 128 :].view(torch.float32)[:T, None]
    assert ((index_k_out - cached * scales).abs() <= index_k_out.abs() / 16 + scales).all()


def test_a_profiling_run_fills_dense_rows_and_resets_the_selection():
    a = call(mla_kv_cache=None, indexer_k_cache=None, slot_mapping=None)
    kv_c_out = torch.full((T, 512), torch.nan)
    assert not OURS(**a, kv_c_out=kv_c_out).isnan().any()
    assert not kv_c_out.isnan().any()
    assert (a["topk_indices_buffer"][:T] == -1).all() and (a["topk_indices_buffer"][T:] == 7).all()


def test_two_epsilons():
    got = OURS(**call(q_rms_eps=0.5))
    a = call()
    want = a["q_c"] * torch.rsqrt(a["q_c"].square().mean(-1, keepdim=True) + 0.5) * a["q_rms_norm_w"]
    assert close(got, want, ulps=4)


def test_the_signature_is_upstreams_and_so_are_its_errors():
    assert inspect.signature(OURS) == inspect.signature(upstream)
    a = call()
    positional = list(a.values())[:15]
    keyword = dict(list(a.items())[15:])
    assert same_bytes(OURS(*positional, **keyword), OURS(**call()))
    with pytest.raises(TypeError, match="positions"):
        OURS(*positional, positions=a["positions"], **keyword)
    with pytest.raises(TypeError, match="dcp_plan"):
        OURS(**a, dcp_plan=1)
    with pytest.raises(TypeError, match="q_c"):
        OURS(a["positions"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(mla_kv_cache_dtype="nvfp4_ds_mla"), "nvfp4_ds_mla"),
        (dict(kv_c=rows(T, 256), kv_rms_norm_w=rows(256)), "latent of 256 instead of 512"),
        (dict(index_k=rows(T, 64)), "index key of 64 instead of 128"),
    ],
)
def test_what_is_not_ours_goes_to_upstream_and_is_said(changes, says, caplog):
    launcher.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "vllm.dcp_fix"):
        assert OURS(**call(**changes)) == "upstream"
        assert OURS(**call(**changes)) == "upstream"
    (record,) = caplog.records  # once
    assert says in record.message and "upstream's own launcher" in record.message


def test_a_release_that_we_do_not_know_is_refused():
    def newer(positions, q_c, dcp_plan):
        pass

    with pytest.raises(launcher.UnsupportedRelease, match="dcp_plan"):
        launcher.launcher(newer)

    parameters = [*inspect.signature(upstream).parameters.values()]
    shuffled = inspect.Parameter("indexer_cache_shuffled", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=False)

    def later(*args, **kwargs):
        pass

    later.__signature__ = inspect.Signature([*parameters, shuffled])
    with pytest.raises(launcher.UnsupportedRelease, match="power-of-two"):
        launcher.launcher(later)


# --- routing ----------------------------------------------------------------------------------------------------------


class Layer:
    """An attention layer on a rank of four with two heads, which gathers and combines, or not."""

    gathers = combines = use_pcp = False
    lse = True

    def __init__(self, dcp=4):
        layer, self.log = self, []

        class Backend:
            dcp_world_size = dcp

            def forward_mqa(self, query, kv_cache, metadata, layer_):
                layer.log.append(f"attend {query.shape[1]}")
                return query[..., :512] * 2, query[..., 0] if layer.lse else None

        class Manager:
            def query_gather(self, query):
                layer.log.append("gather")
                return query.repeat(1, 4, 1)

            def combine(self, out, lse, *, seq_lens, query_start_loc):
                layer.log.append(f"combine {out.shape[1]}")
                return out[:, :2] + 1

        self.impl, self.dcp_manager = Backend(), Manager() if dcp > 1 else None

    def forward(self, query):
        q = self.dcp_manager.query_gather(torch.cat(query, -1)) if self.gathers else query
        q = torch.cat(q, -1) if isinstance(q, tuple) and self.impl.dcp_world_size == 1 else q
        out, lse = self.impl.forward_mqa(q, None, None, self)
        if self.combines:
            out = self.dcp_manager.combine(out, lse, seq_lens=None, query_start_loc=None)
        return out


QUERY = (torch.ones(3, 2, 512), torch.ones(3, 2, 64))


def routed(**attributes):
    attention = type("Attention", (Layer,), attributes)
    repairs.route_attention(types.SimpleNamespace(DeepseekV32Attention=attention))
    return attention


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("combines", [False, True])
def test_gather_and_combine_happen_once_whatever_the_layer_does(gathers, combines):
    layer = routed(gathers=gathers, combines=combines)()
    for _ in range(2):  # the second pass finds the routing in place
        layer.log.clear()
        assert torch.equal(layer.forward(QUERY), torch.full((3, 2, 512), 3.0))
        assert layer.log == ["gather", "attend 8", "combine 8"]
    routing = layer.impl.dcp_fix_routing
    assert routing.gathered() is routing.combined() is None  # nothing is kept alive between passes


def test_one_rank_and_pcp_are_left_alone():
    one = routed()(dcp=1)
    assert one.forward(QUERY).shape == (3, 2, 512) and one.log == ["attend 2"]
    pcp = routed(use_pcp=True, gathers=True, combines=True)()
    pcp.forward(QUERY)
    assert not hasattr(pcp.impl, "dcp_fix_routing")


def test_a_backend_without_lse_and_a_release_without_manager_are_refused():
    with pytest.raises(launcher.UnsupportedRelease, match="returns no LSE"):
        routed(lse=False)().forward(QUERY)
    layer = routed()()
    del layer.dcp_manager
    with pytest.raises(launcher.UnsupportedRelease, match="0.28.0 or newer"):
        layer.forward(QUERY)


# --- the communicator -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("comm", [None, types.SimpleNamespace(disabled=True), types.SimpleNamespace(disabled=False)])
def test_reduce_scatter_without_nccl_raises(comm):
    class CudaCommunicator:
        pynccl_comm = comm

        def reduce_scatter(self, x, dim=-1):
            return x

    module = types.SimpleNamespace(CudaCommunicator=CudaCommunicator)
    repairs.refuse_disabled(module)
    repairs.refuse_disabled(module)
    if comm is not None and not comm.disabled:
        assert CudaCommunicator().reduce_scatter(1) == 1
    else:
        with pytest.raises(RuntimeError, match="VLLM_DISABLE_PYNCCL"):
            CudaCommunicator().reduce_scatter(1)


# --- defects put back -------------------------------------------------------------------------------------------------


def dense_outputs():
    return dict(kv_c_out=torch.full((T, 512), 7.0), k_pe_out=torch.full((T, 64), 7.0), q_c_out=torch.full((T, Q), 7.0))


@pytest.mark.parametrize(
    ("defects", "lost"),
    [
        (("query-norm",), {"q_c_out"}),
        (("k-rows",), {"kv_c_out", "k_pe_out"}),
        (("query-norm", "k-rows"), {"q_c_out", "kv_c_out", "k_pe_out"}),
    ],
)
def test_rows_of_other_owners_keep_their_memory_and_nothing_else_changes(defects, lost):
    module = types.SimpleNamespace(fused_norm_rope=OURS)
    for name in (*defects, *defects):  # the attention module has it too: once is enough
        put_back.FUNCTIONS[name](module)
    a, b = call("fp8_ds_mla") | dense_outputs(), call("fp8_ds_mla") | dense_outputs()
    OURS(**a)
    positional = list(b.values())[:9]
    assert module.fused_norm_rope(*positional, **dict(list(b.items())[9:])) is b["q_c_out"]
    owned = torch.tensor(SLOTS) >= 0
    for name in dense_outputs():
        assert same_bytes(b[name][owned], a[name][owned])
        assert (b[name][~owned] == 7.0).all() == (name in lost)
    assert same_bytes(a["mla_kv_cache"], b["mla_kv_cache"]) and same_bytes(a["indexer_k_cache"], b["indexer_k_cache"])
    assert torch.equal(a["topk_indices_buffer"], b["topk_indices_buffer"])
    assert inspect.signature(module.fused_norm_rope) == inspect.signature(upstream)


def test_a_query_that_the_launcher_allocates_holds_what_nobody_wrote(monkeypatch):
    monkeypatch.setattr(put_back, "unwritten", lambda like: torch.full(like.shape, torch.nan))
    q = put_back.forgetting(OURS, "q_c_out")(**call())
    assert q.isnan().any(dim=1).tolist() == [slot < 0 for slot in SLOTS]
    whole = put_back.forgetting(OURS, "q_c_out")(**call(slot_mapping=None, mla_kv_cache=None, indexer_k_cache=None))
    assert not whole.isnan().any()  # a profiling run


@pytest.mark.parametrize("repaired", [False, True])
@pytest.mark.parametrize("gathers", [False, True])
def test_routing_put_back_wins_over_the_layer_and_over_the_repair(gathers, repaired):
    class Made(Layer):
        combines = True

    Made.gathers = gathers
    module = types.SimpleNamespace(DeepseekV32Attention=Made)
    for function in (repairs.route_attention,) * repaired + (put_back.combine_routing_put_back,) * 2:
        function(module)
    layer = Made()
    query = QUERY if gathers or repaired else torch.cat(QUERY, -1)
    assert torch.equal(layer.forward(query), torch.full((3, 2, 512), 2.0))
    assert layer.log == ["attend 2"]


def test_pcp_and_one_rank_keep_their_routing():
    class Made(Layer):
        use_pcp = gathers = combines = True

    put_back.combine_routing_put_back(types.SimpleNamespace(DeepseekV32Attention=Made))
    layer = Made()
    layer.forward(QUERY)
    assert layer.log == ["gather", "attend 8", "combine 8"]
    assert Made(dcp=1).dcp_manager is None
