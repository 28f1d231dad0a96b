"""Who reaches the defective module, FlashInfer's workspace, the direct all-to-all: look-alikes, right and wrong."""

from types import SimpleNamespace

import pytest
import torch

from dcp_fix.doctor.attempt import NotRun
from dcp_fix.doctor.probes import dcp_layout, flashinfer
from dcp_fix.doctor.reach import reach
from dcp_fix.doctor.world import World


def silent(case, control=False):
    pass


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# --- who is affected --------------------------------------------------------------------------------------------------

REGISTRY = "vllm/model_executor/models/registry.py"
MODULE = {"vllm/models/deepseek_v32/__init__.py": ""}
TABLE = """
raise RuntimeError("imported")
_MODELS = {{
    "Other": ("llama", "Llama"),
    "DeepseekV32ForCausalLM": ({0!r}, "A"),
    "GlmMoeDsaForCausalLM": ({0!r}, "B"),
}}
"""
FLASHMLA = "vllm/v1/attention/backends/mla/flashmla_sparse.py"
LSE = {FLASHMLA: "class Impl:\n    can_return_lse_for_decode: bool = True\n"}
OVERRIDES = "--model-class-overrides"


def test_a_module_that_models_are_served_by_is_reached_by_default(tmp_path):
    found = reach(write(tmp_path, {**MODULE, REGISTRY: TABLE.format("vllm.models.deepseek_v32")}))
    assert found.default is True and found.short == "by default"
    assert found.how == "reached by default: DeepseekV32ForCausalLM and GlmMoeDsaForCausalLM are served by it"


@pytest.mark.parametrize(("option", "way"), [(OVERRIDES, OVERRIDES), ("", "code that names it")])
def test_a_module_that_no_model_is_served_by_is_present_and_no_more(tmp_path, option, way):
    files = {**MODULE, **LSE, REGISTRY: TABLE.format("deepseek_v2"), "vllm/engine/arg_utils.py": f"x = {option!r}"}
    found = reach(write(tmp_path, files))
    assert found.default is False and f"present, reached only by {way}" in found.how
    assert "GlmMoeDsaForCausalLM is served by deepseek_v2" in found.how and "Hopper" not in found.how
    (tmp_path / FLASHMLA).write_text("class Impl: pass")
    assert reach(tmp_path).how.endswith("on Hopper FLASHMLA_SPARSE returns no LSE, and DCP is refused")


@pytest.mark.parametrize("registry", ["x = 1", "x = {'GlmMoeDsaForCausalLM': 3}"])
def test_a_registry_that_lists_no_such_model_leaves_it_open(tmp_path, registry):
    assert reach(write(tmp_path, {**MODULE, REGISTRY: registry})).default is None
    assert reach(write(tmp_path / "other", {"vllm/__init__.py": ""})).short == "no such module"


# --- FlashInfer's workspace -------------------------------------------------------------------------------------------

LAZY = """
import torch
import vllm.envs as envs
def _get_workspace_buffer(device, required=None):
    return torch.zeros(required or envs.VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE, dtype=torch.int8, device=device)
class FlashInferMLASparseImpl:
    can_return_lse_for_decode: bool = True
"""
GROWN = """
def _required_workspace_bytes(dcp, heads, tokens):
    return 394 * 1024 * 1024 + {slab}
class Builder:
    def __init__(self):
        {call}
"""
ENVS = "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE = 394 * 1024 * 1024\n"
RIGHT = "8 * heads * dcp * tokens * 256 + (1 << 20)"
CALLED = "_get_workspace_buffer('cuda', _required_workspace_bytes(4, 1, 1))"


def workspace(tmp_path, source):
    name = flashinfer.MODULE.replace(".", "/") + ".py"
    with World(write(tmp_path, {name: source, "vllm/envs.py": ENVS}), flashinfer.REAL, flashinfer.STAND_INS) as world:
        return flashinfer.flashinfer_workspace(world, silent)


@pytest.mark.parametrize(
    ("source", "verdict", "says"),
    [
        (LAZY, "defect", "does not grow with DCP: 394 MiB"),
        (LAZY + GROWN.format(slab=RIGHT, call=CALLED), "ok", "1419 MiB for DCP 4"),
        (LAZY + GROWN.format(slab=RIGHT.replace(" * dcp", ""), call=CALLED), "defect", "the kernel takes 1025 MiB"),
        (LAZY + GROWN.format(slab=RIGHT, call="pass"), "defect", "394 MiB"),  # there, and used by nobody
        (LAZY.replace("True", "False"), "not-applicable", "returns no LSE"),
    ],
)
def test_the_workspace_grows_with_dcp_or_the_backend_takes_no_part(tmp_path, source, verdict, says):
    found, evidence = workspace(tmp_path, source)
    assert (found, says in evidence) == (verdict, True), evidence


def test_a_backend_that_is_new_or_absent_is_not_judged(tmp_path):
    with pytest.raises(NotRun, match="cannot be asked for"):
        workspace(tmp_path, LAZY.replace("def _get", "def _other"))
    with World(tmp_path / "empty", flashinfer.REAL) as world:
        assert flashinfer.flashinfer_workspace(world, silent)[0] == "not-applicable"


# --- the direct all-to-all --------------------------------------------------------------------------------------------


def manager(send):
    """A module whose manager sends a partial result with `send(module, workspace, output, lse)`."""
    module = SimpleNamespace(get_direct_dcp_a2a_workspace=None, dcp_a2a_lse_reduce=None)

    class MLADCPManager:
        def _init_combine(self, heads, dim, dtype, base_e, use_pcp):
            workspace = module.get_direct_dcp_a2a_workspace(self.group, self.device) if self.use_a2a else None
            return lambda output, lse, seq_lens, query_start_loc: send(module, workspace, output, lse)

    module.MLADCPManager = MLADCPManager
    return module


def as_it_is(module, workspace, output, lse):
    return workspace.lse_reduce(output, lse)


def packing(module, workspace, output, lse):
    return workspace.lse_reduce(output.contiguous(), lse.contiguous())


def packing_output_only(module, workspace, output, lse):
    return workspace.lse_reduce(output.contiguous(), lse)


def falling_back(module, workspace, output, lse):
    packed = output.is_contiguous() and lse.is_contiguous()
    return workspace.lse_reduce(output, lse) if packed else module.dcp_a2a_lse_reduce(output, lse)


@pytest.mark.parametrize(
    ("send", "verdict", "says"),
    [
        (as_it_is, "defect", "as it is, whose op wants packed heads"),
        (packing_output_only, "defect", "as it is"),
        (packing, "ok", "'direct, packed'"),
        (falling_back, "ok", "'plain'"),
    ],
)
def test_where_a_strided_output_goes(send, verdict, says):
    found, evidence = dcp_layout.direct_a2a_layout(manager(send), silent)
    assert (found, says in evidence) == (verdict, True), evidence


def test_a_row_that_skips_is_packed_and_a_head_that_skips_is_not():
    wide = torch.zeros(3, 8, 8)
    assert dcp_layout.packed(wide[:, :4], 2) and not dcp_layout.packed(wide[:, ::2], 2)
    assert not dcp_layout.packed(torch.zeros(4, 3).T, 1) and dcp_layout.packed(torch.zeros(3, 4), 1)


def test_a_manager_that_is_new_is_not_judged_and_one_without_the_path_is_not_concerned():
    def never_direct(module, workspace, output, lse):
        return module.dcp_a2a_lse_reduce(output, lse)

    def raising(module, workspace, output, lse):
        raise AttributeError("plan")

    for send, says in ((never_direct, "takes the way 'plain'"), (raising, "plan")):
        with pytest.raises(NotRun, match=says):
            dcp_layout.direct_a2a_layout(manager(send), silent)
    assert dcp_layout.direct_a2a_layout(None, silent)[0] == "not-applicable"
    assert dcp_layout.direct_a2a_layout(SimpleNamespace(MLADCPManager=object), silent)[0] == "not-applicable"
