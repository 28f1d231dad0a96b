"""pack.py on a look-alike of the backend's module: the same keys, fewer columns, a schedule of their own."""

from types import SimpleNamespace

import pytest
import torch

from dcp_fix.vllm import pack

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def backend(calls):
    """A module with a FlashMLA that records what it is given."""
    return SimpleNamespace(
        flash_mla_with_kvcache=lambda **arguments: calls.append(arguments) or "out and lse",
        get_mla_metadata=lambda: ("new schedule", None),
    )


def holed(tokens, columns, keep):
    """int32 [1, T, K], of which token t holds 0 .. K-1 where `keep` is true; the last token holds nothing."""
    indices = torch.arange(columns, dtype=torch.int32, device=DEVICE).expand(1, tokens, columns).clone()
    indices[..., ~keep.to(DEVICE)] = -1
    indices[:, -1] = -1
    return indices


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(pack, "MANY", 3)


def test_holes_are_packed_away_and_the_rest_is_passed_on():
    calls, keep = [], torch.arange(256) % 3 == 1  # 85 of 256
    module = backend(calls)
    pack.pack_and_cut(module)
    indices = holed(3, 256, keep)
    given = {"q": "q", "indices": indices, "tile_scheduler_metadata": "vLLM's"}
    assert module.flash_mla_with_kvcache(**given) == "out and lse"
    (call,) = calls
    assert (
        call["q"] == "q" and call["tile_scheduler_metadata"] == "new schedule" and call["indices"].shape == (1, 3, 128)
    )
    for row, cut in zip(indices[0].tolist(), call["indices"][0].tolist(), strict=True):
        keys = [i for i in row if i >= 0]
        assert cut == keys + [-1] * (128 - len(keys))


@pytest.mark.parametrize("case", ["nothing to cut", "few tokens", "dense", "capturing"])
def test_what_stays_as_it_is(case, monkeypatch):
    calls = []
    module = backend(calls)
    pack.pack_and_cut(module)
    keep = torch.arange(128) < (65 if case == "nothing to cut" else 10)
    indices = None if case == "dense" else holed(2 if case == "few tokens" else 3, 128, keep)
    if case == "capturing":
        monkeypatch.setattr(pack, "capturing", lambda x: True)
    module.flash_mla_with_kvcache(indices=indices, tile_scheduler_metadata="vLLM's")
    assert calls[0]["indices"] is indices and calls[0]["tile_scheduler_metadata"] == "vLLM's"


def test_it_is_wrapped_once_and_only_when_asked():
    module = backend([])
    pack.pack_and_cut(module)
    once = module.flash_mla_with_kvcache
    pack.pack_and_cut(module)
    assert module.flash_mla_with_kvcache is once
    assert pack.hooks("1") == {pack.MODULE: [pack.pack_and_cut]} and pack.hooks("") == pack.hooks("0") == {}
