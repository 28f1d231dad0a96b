"""pack_bench.py with a look-alike of vLLM: what it boots, what it asks, and the arithmetic of its times."""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dcp_fix.base.errors import UserError
from dcp_fix.real_vllm import boot, pack_bench, preflight
from dcp_fix.records.records import load_record
from tests.real_vllm import lookalike


@pytest.fixture
def seen(monkeypatch):
    """A vLLM to import, and a list of what it was told."""
    said = []

    class LLM:
        def __init__(self, **told):
            config = json.loads((Path(told["model"]) / "config.json").read_text())
            packs = os.environ["DCP_FIX_PACK"]
            if os.environ.get("FAKE_VLLM") == "fails":
                raise RuntimeError("no room for the cache")
            if packs == "1" and os.environ.get("FAKE_VLLM") != "does not pack":
                print("INFO dcp_fix: pack_and_cut applied to vllm.x")
            said.append({"pack": packs, "told": told, "config": config})

        def generate(self, prompts, options, use_tqdm):
            ids = [prompt["prompt_token_ids"] for prompt in prompts]
            first, least = ids[0][:8], min(map(min, ids))
            said.append({"asked": list(map(len, ids)), "new": options.max_tokens, "first": first, "least": least})
            time.sleep(1e-4 * options.max_tokens)

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace))
    monkeypatch.setattr(boot, "run", lookalike.run_here)
    monkeypatch.setattr(preflight, "check", lambda *asked, **more: "0.30.0")
    monkeypatch.setattr(pack_bench, "REPEATS", 2)
    monkeypatch.setattr(pack_bench, "PROMPT", 640)
    works = [work | {"tokens": size} for work, size in zip(pack_bench.WORKS, (640, 64), strict=True)]
    monkeypatch.setattr(pack_bench, "WORKS", works)
    return said


def test_the_same_work_without_and_with_packing(seen, tmp_path, capsys):
    path = tmp_path / "pack.json"
    assert pack_bench.from_options(2, (2,), ["max_model_len=20000"], path) == 0
    boots = [i for i, line in enumerate(seen) if "told" in line]
    assert [seen[i]["pack"] for i in boots] == ["0", "1"]
    for line in (seen[i] for i in boots):
        assert line["config"]["num_attention_heads"] == 32 and line["config"]["index_topk"] == 2048
        assert line["told"]["decode_context_parallel_size"] == 2 and line["told"]["max_model_len"] == 20000
    before, after = seen[boots[0] + 1 : boots[1]], seen[boots[1] + 1 :]
    assert before == after and len(before) == 3 * (1 + 2)
    prefills, decodes = before[:3], before[3:]
    assert all(call["asked"] == [640] and call["new"] == 1 for call in prefills)
    assert len({tuple(call["first"]) for call in prefills}) == 3  # none finds what another one has cached
    assert [call["new"] for call in decodes] == [1] * 3 + [257] * 3
    assert all(call["asked"] == [64] * 64 and call["first"] == decodes[0]["first"] for call in decodes)
    assert all(call["least"] >= 3 for call in before)
    results = load_record(path)["results"]
    assert [(row["work"], row["packed"], len(row["ms"])) for row in results["pack"]] == [
        ("prefill", False, 2), ("decode", False, 2), ("prefill", True, 2), ("decode", True, 2),
    ]  # fmt: skip
    assert results["vllm"] == "0.30.0" and str(tmp_path) not in path.read_text().split('"results"')[1]
    assert "prefill" in capsys.readouterr().out


def test_a_step_is_the_difference_of_two_lengths():
    seconds = {"prefill 1": [0.5, 0.25], "decode 1": [0.1, 0.2], "decode 257": [0.1 + 0.256, 0.2 + 0.512]}
    prefill, decode = pack_bench.rows_of(seconds, True, ["said"])
    assert prefill["ms"] == [500.0, 250.0] and decode["ms"] == [1.0, 2.0] and decode["packed"]


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("fails", "as installed: vLLM ended with status 1: RuntimeError: no room for the cache"),
        ("does not pack", "packed: the plugin says otherwise in vLLM's log: nothing"),
    ],
)
def test_what_was_not_measured_is_not_recorded(seen, tmp_path, monkeypatch, does, says):
    monkeypatch.setenv("FAKE_VLLM", does)
    with pytest.raises(UserError, match=says):
        pack_bench.from_options(2, (2,), [], tmp_path / "pack.json")
    assert not (tmp_path / "pack.json").exists()


@pytest.mark.parametrize("sizes", [(1,), (2, 4)])
def test_one_size_above_one_is_asked_for(sizes):
    with pytest.raises(UserError, match="name one size above 1"):
        pack_bench.from_options(4, sizes, [], None)


def test_the_size_that_is_recorded_is_the_one_that_runs():
    with pytest.raises(UserError, match="--llm decode_context_parallel_size"):
        pack_bench.from_options(2, (2,), ["decode_context_parallel_size=1"], None)
