"""pack_bench.py with a look-alike of vLLM: what it boots, what it asks, and the arithmetic of its times."""

import json
import os
import sys

import pytest

from dcp_fix.base.errors import UserError
from dcp_fix.real_vllm import pack_bench, preflight
from dcp_fix.records.records import load_record

VLLM = """
import json, os, pathlib, types
SEEN = pathlib.Path(os.environ["SEEN"])

class SamplingParams(types.SimpleNamespace):
    pass

class LLM:
    def __init__(self, **told):
        config = json.loads((pathlib.Path(told["model"]) / "config.json").read_text())
        if os.environ.get("FAILS"):
            raise RuntimeError("no room for the cache")
        self.say(pack=os.environ["DCP_FIX_PACK"], told=told, config=config)

    def say(self, **fields):
        with SEEN.open("a") as lines:
            lines.write(json.dumps(fields) + "\\n")

    def generate(self, prompts, options, use_tqdm):
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        self.say(asked=[len(own) for own in ids], new=options.max_tokens, first=ids[0][:8], least=min(map(min, ids)))
"""


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """A vLLM to import, and the file in which it says what it was told."""
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.jsonl"))
    monkeypatch.setattr(preflight, "check", lambda *asked, **more: {"vllm": "0.30.0", "nccl": None})
    monkeypatch.setattr(pack_bench, "REPEATS", 2)
    return lambda: [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]


def test_the_same_work_without_and_with_packing(seen, tmp_path, capsys):
    path = tmp_path / "pack.json"
    assert pack_bench.from_options(2, (2,), ["max_model_len=20000"], path) == 0
    said = seen()
    boots = [i for i, line in enumerate(said) if "told" in line]
    assert [said[i]["pack"] for i in boots] == ["0", "1"]
    for line in (said[i] for i in boots):
        assert line["config"]["num_attention_heads"] == 32 and line["config"]["index_topk"] == 2048
        assert line["told"]["decode_context_parallel_size"] == 2 and line["told"]["max_model_len"] == 20000
    before, after = said[boots[0] + 1 : boots[1]], said[boots[1] + 1 :]
    assert before == after and len(before) == 3 * (1 + 2)
    prefills, decodes = before[:3], before[3:]
    assert all(call["asked"] == [16384] and call["new"] == 1 for call in prefills)
    assert len({tuple(call["first"]) for call in prefills}) == 3  # none finds what another one has cached
    assert [call["new"] for call in decodes] == [1] * 3 + [257] * 3
    assert all(call["asked"] == [2304] * 64 and call["first"] == decodes[0]["first"] for call in decodes)
    assert all(call["least"] >= 3 for call in before)
    results = load_record(path)["results"]
    assert [(row["work"], row["packed"], len(row["ms"])) for row in results["pack"]] == [
        ("prefill", False, 2), ("decode", False, 2), ("prefill", True, 2), ("decode", True, 2),
    ]  # fmt: skip
    assert results["vllm"] == "0.30.0" and str(tmp_path) not in path.read_text().split('"results"')[1]
    assert "prefill" in capsys.readouterr().out


def test_a_step_is_the_difference_of_two_lengths():
    timed = [
        {"name": "prefill", "new": 1, "seconds": [0.5, 0.25]},
        {"name": "decode", "new": 1, "seconds": [0.1, 0.2]},
        {"name": "decode", "new": 257, "seconds": [0.1 + 0.256, 0.2 + 0.512]},
    ]
    prefill, decode = pack_bench.rows_of(timed, True, ["said"])
    assert prefill["ms"] == [500.0, 250.0] and decode["ms"] == [1.0, 2.0] and decode["packed"]
    rows = [prefill, decode, *pack_bench.rows_of(timed[:1] + timed[1:], False, [])]
    assert pack_bench.median(rows, "decode", True) == 1.5


def test_a_boot_that_fails_says_why_and_writes_nothing(seen, tmp_path, monkeypatch):
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(UserError, match="vLLM, as installed, ended with status 1: RuntimeError: no room for the cache"):
        pack_bench.from_options(2, (2,), [], tmp_path / "pack.json")
    assert not (tmp_path / "pack.json").exists()


@pytest.mark.parametrize("sizes", [(1,), (2, 4)])
def test_one_size_above_one_is_asked_for(sizes):
    with pytest.raises(UserError, match="name one size above 1"):
        pack_bench.from_options(4, sizes, [], None)
