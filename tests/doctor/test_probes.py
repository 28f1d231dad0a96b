"""Three probes on small collaborators written here (merge, communicator, attention layer), right and broken."""

import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from dcp_fix.doctor.attempt import NotRun
from dcp_fix.doctor.probes import collective, layer, merge, nccl, routing, workspace
from dcp_fix.doctor.stand_ins import Missing, StandInReached
from dcp_fix.doctor.unwritten import poison, unwritten_memory_is_nan
from dcp_fix.doctor.world import World


def silent(*args, **kwargs):
    """Nobody listens to the progress."""


# --- merge ------------------------------------------------------------------------------------------------------------


def ag_rs(clean=True, select=True):
    """A merge in torch with the signature of vLLM's, its two precautions optional."""

    def cp_lse_ag_out_rs(cp_attn_out, cp_attn_lse, cp_group, ctx=None, return_lse=False, is_lse_base_on_e=True):
        base = torch.e if is_lse_base_on_e else 2.0
        lses = cp_group.all_gather(cp_attn_lse, dim=0).reshape(cp_group.world_size, *cp_attn_lse.shape)
        if clean:
            lses = torch.where(lses.isnan() | (lses == torch.inf), -torch.inf, lses)
        top = lses.amax(0).clamp(min=-1e30)
        total = (base ** (lses - top)).sum(0)
        lse = top + (total.log() if is_lse_base_on_e else total.log2())
        weight = (base ** (lses[cp_group.rank_in_group] - top) / total.clamp(min=1e-30)).unsqueeze(-1)
        out = torch.where(weight == 0, 0.0, cp_attn_out * weight) if select else cp_attn_out * weight
        cp_group.reduce_scatter(out, dim=1)
        mine = lse.chunk(cp_group.world_size, dim=1)[cp_group.rank_in_group]
        return out, torch.where(total.chunk(2, 1)[cp_group.rank_in_group] == 0, -torch.inf, mine)

    return {"cp_lse_ag_out_rs": (cp_lse_ag_out_rs, merge.merge_ag_rs)}


def test_a_careful_merge_is_ok_and_a_careless_one_is_not():
    assert merge.empty_rows(ag_rs(), "cpu", silent)[0] == "ok"
    verdict, evidence = merge.empty_rows(ag_rs(clean=False), "cpu", silent)
    assert verdict == "defect" and "+inf and NaN gives nan for 3" in evidence
    verdict, evidence = merge.empty_rows(ag_rs(select=False), "cpu", silent)
    assert verdict == "defect" and "-inf and NaN gives nan for 3" in evidence


@pytest.mark.parametrize("natural", [True, False])
def test_a_right_output_with_a_wrong_lse_is_a_defect(natural):
    """Whoever merges the result once more, as a cached context does, weighs it by that."""
    function, run = ag_rs()["cp_lse_ag_out_rs"]

    def off_by_a_bit(*args, is_lse_base_on_e=True, **kwargs):
        out, lse = function(*args, is_lse_base_on_e=is_lse_base_on_e, **kwargs)
        return out, lse + 0.01 if is_lse_base_on_e is natural else lse

    verdict, evidence = merge.empty_rows({"cp_lse_ag_out_rs": (off_by_a_bit, run)}, "cpu", silent)
    assert verdict == "defect" and " gives lse " in evidence
    assert ("(natural log)" in evidence, "(base 2)" in evidence) == (natural, not natural)


def test_a_merge_in_the_wrong_base_is_a_defect():
    function, run = ag_rs()["cp_lse_ag_out_rs"]

    def always_natural(*args, is_lse_base_on_e=True, **kwargs):
        return function(*args, is_lse_base_on_e=True, **kwargs)

    verdict, evidence = merge.empty_rows({"cp_lse_ag_out_rs": (always_natural, run)}, "cpu", silent)
    assert verdict == "defect" and "(base 2): two ranks with keys gives 8.808 for 8" in evidence


# --- communicator -----------------------------------------------------------------------------------------------------

SYMBOLS = ("ncclAllReduce", "ncclCommSuspend", "ncclOptional")


def communicators(reduce_scatter, on_refusal="disable"):
    """(pynccl, its wrapper, the CUDA communicator) of a target."""
    pynccl = SimpleNamespace(NCCLLibrary=None)

    class PyNcclCommunicator:
        def __init__(self, group, device):
            self.world_size, self.disabled = group.world_size, False
            try:
                pynccl.NCCLLibrary(None)
            except OSError:
                if on_refusal == "raise":
                    raise
                self.disabled = True

        def reduce_scatter(self, output, x):
            assert self.disabled

    class NCCLLibrary:
        exported_functions = [SimpleNamespace(name=name) for name in SYMBOLS]

        def __init__(self, path):
            library = wrapper.ctypes.CDLL(path)
            for function in self.exported_functions:
                if not hasattr(library, function.name) and function.name != "ncclOptional":
                    raise AttributeError(function.name)

    pynccl.PyNcclCommunicator = PyNcclCommunicator
    wrapper = SimpleNamespace(NCCLLibrary=NCCLLibrary, ctypes=None)
    cuda = type("CudaCommunicator", (), {"reduce_scatter": reduce_scatter})
    return pynccl, wrapper, SimpleNamespace(CudaCommunicator=cuda)


def unwritten(self, x, dim):
    output = torch.empty(x.shape[0] // self.world_size, x.shape[1])
    self.pynccl_comm.reduce_scatter(output, x)
    return output


def through_torch(self, x, dim):
    output = torch.empty(x.shape[0] // self.world_size, x.shape[1])
    torch.distributed.reduce_scatter_tensor(output, x, group=self.device_group)
    return output


def refusing(self, x, dim):
    raise RuntimeError("no NCCL")


@pytest.mark.parametrize(
    ("reduce_scatter", "on_refusal", "verdict", "says"),
    [
        (unwritten, "disable", "defect", "returns unwritten memory"),
        (unwritten, "raise", "ok", "a communicator without NCCL raises OSError"),
        (through_torch, "disable", "ok", "gives the right sum"),
        (refusing, "disable", "ok", "raises RuntimeError: no NCCL"),
    ],
)
def test_a_disabled_communicator(reduce_scatter, on_refusal, verdict, says, monkeypatch):
    monkeypatch.setattr(nccl, "loaded_nccl", lambda environment: None)
    found, evidence = collective.silent_collective(communicators(reduce_scatter, on_refusal), {}, silent)
    assert (found, says in evidence) == (verdict, True), evidence
    assert "it needs NCCL 2.29.7 or newer" in evidence  # of the symbols that are not optional


def test_a_communicator_that_needs_more_than_we_know_is_not_judged():
    def newer(self, x, dim):
        return self.symmetric_memory.reduce(x)

    with pytest.raises(NotRun, match="symmetric_memory"):
        collective.silent_collective(communicators(newer), {}, silent)


@pytest.mark.parametrize("value", ["1", "true", "True", "TRUE"])
def test_an_environment_that_disables_nccl_is_said(value):
    found = collective.silent_collective(communicators(through_torch), {"VLLM_DISABLE_PYNCCL": value}, silent)
    assert found[0] == "defect" and f"VLLM_DISABLE_PYNCCL={value} disables it" in found[1]


@pytest.mark.parametrize("value", ["", "0", "False", "false", "no", "off", "yes", "2"])
def test_what_upstream_does_not_take_for_yes_disables_nothing(value, monkeypatch):
    monkeypatch.setattr(nccl, "loaded_nccl", lambda environment: None)
    found = collective.silent_collective(communicators(through_torch), {"VLLM_DISABLE_PYNCCL": value}, silent)
    assert found[0] == "ok" and "disables" not in found[1]


def test_the_library_that_loads_and_the_one_that_is_installed_are_both_named(monkeypatch, tmp_path):
    old = SimpleNamespace(ncclAllReduce=1)
    newer = tmp_path / "nvidia/nccl/lib/libnccl.so.2"
    monkeypatch.setattr(nccl, "loaded_nccl", lambda environment: nccl.Nccl("/usr/lib/libnccl.so.2", "2.28.9", old))
    monkeypatch.setattr(nccl, "installed_nccl", lambda: [newer])
    found = collective.silent_collective(communicators(through_torch), {}, silent)
    assert found[0] == "defect"
    assert "NCCL 2.28.9 here (/usr/lib/libnccl.so.2) lacks ncclCommSuspend: it will be disabled" in found[1]
    assert f"installed, and not the one that loads: {newer}" in found[1]


@pytest.fixture
def built(tmp_path):
    """A shared library that says it is NCCL 2.29.7, and has no other symbol."""
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text("int ncclGetVersion(int *v) { *v = 22907; return 0; }")
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def test_a_library_says_its_version_and_its_file(built):
    loaded = nccl.loaded_nccl({"VLLM_NCCL_SO_PATH": str(built)})
    assert (loaded.path, loaded.version) == (str(built), "2.29.7")
    assert nccl.loaded_nccl({"VLLM_NCCL_SO_PATH": str(built) + ".no"}) is None  # vLLM looks nowhere else then
    found = collective.silent_collective(communicators(through_torch), {"VLLM_NCCL_SO_PATH": str(built)}, silent)
    assert found[0] == "defect" and f"({built}) lacks ncclAllReduce, ncclCommSuspend" in found[1]


# --- split workspace --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "heads", "healthy_mib", "broken_mib"), [(132, 64, 8.28, 42.35), (8192, 64, 514.0, 2567.0)]
)
def test_a_peak_says_whether_accumulators_are_always_allocated(rows, heads, healthy_mib, broken_mib):
    """Peaks that an H200 had, without and with the fix; the line lies half way between them."""
    healthy, broken = (round(mib * workspace.MIB) for mib in (healthy_mib, broken_mib))
    assert workspace.allocates_always(broken, rows, heads) and not workspace.allocates_always(healthy, rows, heads)
    middle = workspace.result_bytes(rows, heads) + (broken - healthy) // 2
    assert workspace.allocates_always(middle + middle // 8, rows, heads)
    assert not workspace.allocates_always(middle - middle // 8, rows, heads)


# --- attention layer --------------------------------------------------------------------------------------------------


def attention(gathers=True, combines=True):
    """A layer that does what the real one does with its collaborators, and no more."""

    class DeepseekV32Attention:
        def forward(self, positions, hidden_states):
            rows, heads = self_rows(self), self.num_local_heads
            query = torch.ones(rows, heads, self.kv_lora_rank + self.qk_rope_head_dim)
            dcp = self.impl.dcp_world_size > 1
            if dcp and gathers:
                query = self.dcp_manager.query_gather(query)
            out, lse = self.impl.forward_mqa(query, self.kv_cache, None, self)
            if dcp and combines:
                out = self.dcp_manager.combine(out, lse, seq_lens=None, query_start_loc=None)
            return self.o_proj(torch.einsum("thl,hlv->thv", out[:, :heads], self.W_UV).flatten(1))[0]

    return SimpleNamespace(DeepseekV32Attention=DeepseekV32Attention)


def self_rows(attention_layer):
    return layer.TOKENS


@pytest.mark.parametrize(
    ("gathers", "combines", "says"),
    [
        (False, True, "gets 2 query heads of the group's 8"),
        (True, False, "never combined"),
        (False, False, "2 query heads of the group's 8 and its partial result is never combined"),
    ],
)
def test_a_layer_that_leaves_out_a_step_is_named_for_it(gathers, combines, says):
    verdict, evidence = routing.combine_routing(attention(gathers, combines), layer.Collaborators(), silent)
    assert verdict == "defect" and says in evidence


def test_a_layer_that_does_both_is_ok_and_a_new_one_is_not_judged():
    verdict, evidence = routing.combine_routing(attention(), layer.Collaborators(), silent)
    assert verdict == "ok" and "does not know PCP" in evidence
    with pytest.raises(NotRun, match="no longer defines"):
        routing.combine_routing(SimpleNamespace(), layer.Collaborators(), silent)
    newer = attention()
    newer.DeepseekV32Attention.forward = lambda self, positions, hidden: self.plan.run()
    with pytest.raises(NotRun, match="plan"):
        routing.combine_routing(newer, layer.Collaborators(), silent)


# --- the world --------------------------------------------------------------------------------------------------------


def test_a_missing_name_may_stand_in_annotations_and_bases_and_nothing_else():
    missing = Missing("vllm.config")
    assert eval("missing.VllmConfig | None", {"missing": missing}) is not None

    class Derived(missing.Base):
        pass

    assert Derived.__mro__ == (Derived, object)
    for use in (
        lambda: missing.f(1),
        lambda: bool(missing.FLAG),
        lambda: missing == 1,
        lambda: [*missing],
        lambda: len(missing),
        lambda: isinstance(1, missing.T),
        lambda: missing.x + 1,
    ):
        with pytest.raises(StandInReached, match="vllm.config"):
            use()


def test_modules_run_without_their_package_and_leave_no_trace(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", "imported before")
    files = {
        "__init__.py": "raise RuntimeError('executed')",
        "a/__init__.py": "raise RuntimeError('executed')",
        "a/b.py": "import vllm.c as c\nfrom vllm import d, logger\nfrom .e import f\nvalue = c.value + 1\n",
        "c.py": "value = 41\n",
        "d.py": "value = 1\n",
    }
    for name, text in files.items():
        (tmp_path / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm" / name).write_text(text)
    before = dict(sys.modules)
    with World(tmp_path, real=("vllm.a.b", "vllm.c")) as world:
        loaded = world.load("vllm.a.b")
        assert loaded.value == 42  # c is real
        with pytest.raises(StandInReached, match="vllm.a.e.f"):
            loaded.f()
        with pytest.raises(StandInReached, match="vllm.d.value"):  # d is not on the list of real modules
            loaded.d.value()
    assert not [name for name in sys.modules if name.startswith("vllm") and sys.modules[name] is not before.get(name)]
    assert sys.modules["vllm"] == "imported before"
    assert not list(tmp_path.rglob("*.pyc"))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.float8_e4m3fn]
)
def test_unwritten_memory_is_poisoned(dtype):
    with unwritten_memory_is_nan():
        fresh = (torch.empty(3, 2, dtype=dtype), torch.empty_like(torch.zeros(2, dtype=dtype)))
    for x in fresh:
        assert x.float().isnan().all() or (x.float() == poison(torch.zeros(1, dtype=dtype)).float()).all()
        assert (x.view(torch.uint8) != 0).any()
