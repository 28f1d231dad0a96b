"""verify.py: equal runs are told from unequal ones, by tokens, logits and sublayers; threads and processes agree."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dcp_fix import broken, cli, combine
from dcp_fix.base.errors import UserError
from dcp_fix.engine.config import Config
from dcp_fix.engine.engine import Generation
from dcp_fix.engine.sharded import Ops, ShardedAttention
from dcp_fix.ranks import launch
from dcp_fix.ranks.group import LocalGroup
from dcp_fix.records.records import load_record
from dcp_fix.tiny import corpus
from dcp_fix.verify import multi_gpu, verify
from dcp_fix.verify import report as verify_report
from dcp_fix.verify import settings as verify_settings

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = verify.Settings(tp=2, dcp=(1, 2), classes=("512",))
FREE = replace(SETTINGS, passes=("free",))
CONFIG = Config.from_json(corpus.CHECKPOINT / "config.json")


@pytest.fixture(scope="module")
def report():
    return verify.as_threads(SETTINGS)


# --- the corrected engine ---------------------------------------------------------------------------------------------


def test_every_dcp_size_gives_the_same_answer(report):
    assert report.ok and report.odd_ranks == [] and report.transport == "threads"
    one, two = report.rows
    assert one.logits_identical and (one.ulps, one.apart) == (0, 0)
    assert two.tokens == one.tokens and two.first_token is None
    assert two.logits[0] == one.logits[0] and two.logits[1] != one.logits[1]  # dense prefill has no combine
    assert 0 < two.apart < 1e-3 and not two.logits_identical
    assert two.margin > 0.5  # so that rounding cannot flip a token
    assert [row.case for row in report.forced] == ["512", "short", "sparse", "ties", "prefix"]


def test_processes_record_what_threads_compute(report, tmp_path):
    record = tmp_path / "r.json"
    command = [sys.executable, "-m", "dcp_fix", "verify", "--tp", "2", "--dcp", "1,2", "--classes", "512"]
    command += ["--procs", "2", "--record", str(record)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert re.search("DCP1, DCP2 give the same tokens for every prompt, byte for byte.", done.stdout)
    written = load_record(record)
    assert written["command"].startswith("python -m dcp_fix verify --tp 2 --dcp 1,2 --classes 512 --procs 2")
    results = written["results"]
    assert results["transport"] == "gloo" and len(results["devices"]) == 2 and results["settings"]["sources"]
    mine = json.loads(json.dumps(verify_report.as_json(report)["rows"]))
    assert results["rows"] == mine  # tokens and logits, bit for bit
    assert results["forced"] == json.loads(json.dumps(verify_report.as_json(report)["forced"]))
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_both_combines_give_the_same_bits(report):
    other = verify.as_threads(replace(FREE, combine="a2a"))
    assert [row.logits for row in other.rows] == [row.logits for row in report.rows]


# --- unequal runs -----------------------------------------------------------------------------------------------------


def generation(tokens, logits):
    return Generation(tokens, torch.tensor(logits), 0)


def run(dcp, tokens=(5, 6), logits=((1.0, 8.0), (2.0, 4.0))):
    return verify.Run(dcp, "512", 0, generation(list(tokens), logits), [])


@pytest.mark.parametrize(
    "changed, same, first_token",
    [
        ({}, True, None),
        ({"tokens": (5, 7)}, False, 1),
        ({"tokens": (5,), "logits": ((1.0, 8.0),)}, False, 1),
        ({"logits": ((1.0, 8.0), (2.0, 4.3))}, True, None),
        ({"logits": ((1.0, 8.0), (2.0, 5.0))}, False, None),
        ({"logits": ((1.0, 8.0), (2.0, float("nan")))}, False, None),
    ],
)
def test_a_difference_is_found(changed, same, first_token):
    rows = verify.compare([run(1), run(2, **changed)], SETTINGS)
    assert rows[0].same and rows[0].logits_identical
    assert (rows[1].same, rows[1].first_token) == (same, first_token)


def test_the_step_that_chose_another_token_counts_and_later_ones_do_not():
    """Up to there both have the same context."""
    later = run(2, tokens=(5, 7, 8), logits=((1.0, 8.0), (6.0, 4.0), (0.0, 99.0)))
    got = verify.compare([run(1, (5, 6, 9), ((1.0, 8.0), (2.0, 4.0), (7.0, 1.0))), later], SETTINGS)[1]
    assert (got.first_token, got.apart) == (1, 0.5)


@pytest.mark.parametrize(("apart", "same"), [(0.049, True), (0.051, False), (0.09, False)])
def test_logits_are_the_same_up_to_a_twentieth_of_the_largest(apart, same):
    other = ((1.0, 8.0), (2.0, 4.0 + 8.0 * apart))
    assert verify.compare([run(1), run(2, logits=other)], SETTINGS)[1].same is same


def test_logits_are_measured_in_units_of_the_largest():
    apart = [[1.0, 8.0], [2.0, 4.0 + 2**-20]]
    got = verify.compare([run(1), run(2, logits=apart)], SETTINGS)[1]
    assert got.ulps == 1.0 and got.apart == 2**-23  # one ulp of 8.0 in fp32
    bf16 = replace(SETTINGS, device="cuda")
    assert verify.compare([run(1), run(2, logits=[[1.0, 8.0], [2.0, 4.03125]])], bf16)[1].ulps == 0.5


def test_logits_that_are_nan_are_said_and_recorded_as_such(tmp_path, capsys):
    rows = verify.compare([run(1), run(2, logits=((1.0, 8.0), (2.0, float("nan"))))], SETTINGS)
    odd = verify.Report(SETTINGS, "threads", ["x"], rows, [])
    assert verify.finish(odd, 0, tmp_path / "r.json") == launch.DIFFERS
    second = load_record(tmp_path / "r.json")["results"]["rows"][1]
    assert (second["ulps"], second["apart"], second["same"]) == (None, None, False)
    assert multi_gpu.verify_row(load_record(tmp_path / "r.json")["results"])[1].endswith("inf ulps apart at most")
    assert "1 of 2 runs differ from DCP1, 1 of them by logits that are no numbers." in (said := capsys.readouterr().out)
    assert "same   │ no numbers" in said and "nan" not in said


def test_a_merge_that_ignores_the_lse_is_caught(monkeypatch, capsys):
    """Defect by hand: equal weights for every shard."""
    weights = lambda lse: (torch.full_like(lse, 1 / len(lse)), lse[0])  # noqa: E731
    monkeypatch.setattr(combine.reference, "merge_weights", weights)
    broken = verify.as_threads(FREE)
    assert not broken.ok and verify.finish(broken, 0, None) == launch.DIFFERS
    assert re.search("1 of 2 runs differ from DCP1.", capsys.readouterr().out)


def test_ranks_that_disagree_are_named(monkeypatch, capsys):
    """Logits are gathered, so that a rank which strays shows in none of them: its sublayers' digests tell."""
    right = LocalGroup.all_reduce

    def strays(self, x, out=None):
        whole = right(self, x, out)
        return whole + 1e-6 if self.rank == 1 and x.shape[-1] == CONFIG.hidden_size else whole

    monkeypatch.setattr(LocalGroup, "all_reduce", strays)
    odd = verify.as_threads(FREE)
    assert odd.odd_ranks == [1] and not odd.ok and odd.rows[1].same
    assert verify.finish(odd, 0, None) == launch.DIFFERS
    assert "Ranks 1 computed other numbers than rank 0." in capsys.readouterr().out


def test_an_unwritten_row_shows(monkeypatch):
    """The scratch memory holds noise: it cannot be another request's good row."""
    monkeypatch.setattr(verify_settings, "Ops", lambda: Ops(norm_rope=broken.norm_rope_skip_dense_rows))
    assert [row.same for row in verify.as_threads(FREE).rows] == [True, False]


# --- the door ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dcp": (1,)}, "DCP sizes 1: name at least two different ones"),
        ({"dcp": (2, 2)}, "DCP sizes 2, 2"),
        ({"dcp": (1, 3)}, "DCP size of 3"),
        ({"tp": 3}, "TP size of 3"),
        ({"classes": ("512", "9")}, "prompt class '9' is not one of 512, 1536"),
        ({"combine": "magic"}, "combine method 'magic' is not one of ag_rs, a2a"),
        ({"device": "abacus"}, "abacus"),
        ({"cuda_graphs": True}, "--cuda-graphs needs --device cuda"),
        ({"checkpoint": Path("nowhere")}, "nowhere"),
        ({"passes": ("free", "easy")}, "passes free, easy: choose from free, forced"),
        ({"passes": ()}, "choose from free, forced"),
        ({"plant": "gremlin"}, "no planted defect 'gremlin'; --plant list names them"),
        ({"plant": "lse-base", "combine": "exact"}, "--plant goes with ag_rs or a2a"),
        ({"passes": ("forced",), "logits": True}, "--logits: no meaning with --passes forced"),
        ({"passes": ("forced",), "prompts": 2}, "--prompts: no meaning with --passes forced"),
        ({"share_gpus": True}, "--share-gpus needs --device cuda"),
    ],
)
def test_settings_that_cannot_run_are_refused_before_anything_starts(monkeypatch, changes, message):
    monkeypatch.setattr(launch, "launch", lambda *arguments: pytest.fail("started"))
    with pytest.raises(UserError, match=message):
        verify.main(replace(SETTINGS, **changes), procs=2)


@pytest.mark.parametrize(
    "changes, procs, message",
    [({}, 3, "--procs 3 with --tp 2"), ({"share_gpus": True}, None, "--share-gpus is for processes, --procs")],
)
def test_processes_must_fit_the_settings(changes, procs, message):
    with pytest.raises(UserError, match=message):
        verify.main(replace(SETTINGS, **changes), procs)


def command_line(monkeypatch, *arguments):
    calls = []
    monkeypatch.setattr(verify, "main", lambda *passed: calls.append(passed) or 0)
    monkeypatch.setattr(sys, "argv", ["dcp-fix", "verify", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code or 0, calls


def test_the_command_passes_its_options_on(monkeypatch, tmp_path):
    status, calls = command_line(
        monkeypatch, *"--tp 8 --dcp 1,8 --classes 512,8192 --prompts 2 --combine a2a --device cuda --procs 8".split(),
        "--cuda-graphs", "--share-gpus", "--passes", "free", "--timeout", "60", "--record", str(tmp_path / "r.json"),
    )  # fmt: skip
    settings = verify.Settings(8, (1, 8), ("512", "8192"), 2, "a2a", "cuda", True, True, passes=("free",))
    assert (status, calls) == (0, [(settings, 8, 60.0, tmp_path / "r.json")])
    assert command_line(monkeypatch)[1] == [(verify.Settings(), None, 300.0, None)]


def test_a_reference_that_met_nan_is_refused(monkeypatch):
    """A NaN in one index key of DCP1 reaches its logits, and nothing is compared with those."""
    right = ShardedAttention.indexer_inputs

    def spoiled(self, layer, x):
        inputs = right(self, layer, x)
        return inputs and replace(inputs, k=torch.full_like(inputs.k, torch.nan))

    monkeypatch.setattr(ShardedAttention, "indexer_inputs", spoiled)
    for passes in (("free",), ("forced",)):
        with pytest.raises(Exception, match="DCP1, .* no numbers .NaN or infinity.*name another checkpoint"):
            verify.as_threads(replace(SETTINGS, passes=passes))
