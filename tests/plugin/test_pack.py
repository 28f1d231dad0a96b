"""pack.py on a look-alike of the backend's module: the same answer from fewer columns, and whatever else untouched."""

import sys
from types import SimpleNamespace

import pytest
import torch

from dcp_fix.plugin import pack
from tests.attention.test_attention import SCALE, agree

pytest.importorskip("triton")
from tests.attention.test_flashmla import Operators, problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")  # interpreted


@pytest.fixture(autouse=True)
def group(monkeypatch):
    """vLLM's DCP group, of 8 ranks; and 16 tokens are enough."""
    group = SimpleNamespace(world_size=8)
    modules = {"vllm": {}, "vllm.distributed": {}, "vllm.distributed.parallel_state": {"get_dcp_group": lambda: group}}
    for name, held in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**held))
    monkeypatch.setattr(pack, "FEWEST", 16)
    pack.dcp_size.cache_clear()
    yield group
    pack.dcp_size.cache_clear()


def backend():
    """A module with a FlashMLA that records its calls and attends as FlashMLA does."""
    operators, calls = Operators(), []

    def flash_mla_with_kvcache(**arguments):
        calls.append(arguments)
        if arguments["indices"] is None:
            return "dense"
        q = torch.nn.functional.pad(arguments["q"], (0, 0, 0, -arguments["q"].shape[2] % 64))
        rest = [None] * 8 + [512, arguments["softmax_scale"], None]
        out, lse, *_ = operators.sparse_decode_fwd(q, arguments["k_cache"], arguments["indices"], *rest)
        heads = arguments["q"].shape[2]
        return out[:, :, :heads], lse[:, :heads]

    module = SimpleNamespace(
        flash_mla_with_kvcache=flash_mla_with_kvcache,
        get_mla_metadata=lambda: (SimpleNamespace(), None),
    )
    pack.pack_and_cut(module)
    return module, calls


def arguments(tokens=16, columns=256, holes=0.9):
    """What the backend passes, by name, and the reference's answer."""
    q, cache, slots, want = problem(tokens, 2, columns, holes)
    given = {
        "q": q[None], "k_cache": cache[:, :, None], "block_table": None, "head_dim_v": 512, "cache_seqlens": None,
        "tile_scheduler_metadata": SimpleNamespace(), "is_fp8_kvcache": True, "indices": slots[None].int(),
        "softmax_scale": SCALE,
    }  # fmt: skip
    return given, want


@pytest.mark.parametrize(("holes", "spilling"), [(0.9, False), (0.3, True), (0.0, True)])
def test_the_answer_is_the_same_from_fewer_columns(holes, spilling):
    """Without holes every id is on one rank, as where the interleave is longer than the prompt."""
    module, calls = backend()
    given, want = arguments(holes=holes)
    out, lse = module.flash_mla_with_kvcache(**given)
    (call,) = calls
    assert call["indices"].shape == (1, 16, 64) and call["indices"].is_contiguous()
    assert ((given["indices"] >= 0).sum(-1) > 64).any() == spilling
    some = (given["indices"][0] >= 0).any(-1).cpu()  # what a token without key gets, vLLM replaces
    assert some.sum() >= 15 and out.shape == (1, 16, 2, 512) and lse.shape == (1, 2, 16)
    assert agree(
        (out[0].cpu()[some], lse[0].T.cpu()[some]), (want[0][some], want[1][some]), 64 if DEVICE == "cpu" else 256
    )
    own = {name: value for name, value in call.items() if name not in ("indices", "tile_scheduler_metadata")}
    assert own.keys() == given.keys() - {"indices", "tile_scheduler_metadata"}
    assert all(value is given[name] for name, value in own.items())


@pytest.mark.parametrize(
    "case", ["few tokens", "one rank", "dense", "another cache", "two batches", "no name", "by place"]
)
def test_what_stays_as_it_is(case, group):
    group.world_size = 1 if case == "one rank" else 8
    given, _ = arguments(tokens=15 if case == "few tokens" else 16)
    if case == "dense":
        given["indices"] = None
    elif case == "another cache":
        given["k_cache"] = torch.zeros(1, 64, 1, 584, dtype=torch.uint8)
    elif case == "two batches":
        given |= {name: given[name].expand(2, *given[name].shape[1:]) for name in ("q", "indices")}
    elif case == "no name":
        del given["softmax_scale"]
    by_place, calls = [given.pop("q")] if case == "by place" else [], []
    module = SimpleNamespace(
        flash_mla_with_kvcache=lambda *args, **kwargs: calls.append((args, kwargs)) or "vLLM's answer",
        get_mla_metadata=None,
    )  # fmt: skip
    pack.pack_and_cut(module)
    assert module.flash_mla_with_kvcache(*by_place, **given) == "vLLM's answer"
    assert calls == [(tuple(by_place), given)]


@pytest.mark.parametrize("missing", ["module", "name", "group"])
def test_a_vllm_that_does_not_say_its_dcp_size_is_left_alone(missing, monkeypatch):
    def no_group():
        raise AssertionError("decode context parallel group is not initialized")

    held = {"module": None, "name": SimpleNamespace(), "group": SimpleNamespace(get_dcp_group=no_group)}[missing]
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", held)
    module, calls = backend()
    given, _ = arguments()
    module.flash_mla_with_kvcache(**given)
    assert calls[0]["indices"] is given["indices"]


def test_one_schedule_a_step_for_each_width():
    module, calls = backend()
    step, (given, _) = SimpleNamespace(), arguments()
    for metadata in (step, step, SimpleNamespace()):
        module.flash_mla_with_kvcache(**given | {"tile_scheduler_metadata": metadata})
    first, second, other = (call["tile_scheduler_metadata"] for call in calls)
    assert first is second and other is not first and first is not step


def test_it_is_wrapped_once_and_only_when_asked():
    module, _ = backend()
    once = module.flash_mla_with_kvcache
    pack.pack_and_cut(module)
    assert module.flash_mla_with_kvcache is once
    assert pack.hooks("1") == pack.hooks("True") == {pack.MODULE: [pack.pack_and_cut]}
    assert pack.hooks("") == pack.hooks("0") == pack.hooks("off") == {}
