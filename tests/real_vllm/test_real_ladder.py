"""The ladder in real vLLM, with a look-alike `LLM`: rungs, rows, verdict, records, refusals, who is left behind."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dcp_fix.base.errors import UserError
from dcp_fix.learn import recorded_runs
from dcp_fix.plugin import put_back
from dcp_fix.real_vllm import boot_log, preflight, questions, real_ladder, rungs
from dcp_fix.real_vllm import report as real_report
from dcp_fix.real_vllm.rungs import INSTALLED, PLUGIN, REFERENCE, WORKAROUND, Settings
from dcp_fix.records import records
from dcp_fix.tiny import corpus
from tests.real_vllm import lookalike
from tests.tools.heeding import heed_signals

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]
SMALL = Settings(classes=("512", "1024+1536"), timeout=60.0)
NCCL = {
    "torch": {"path": "/usr/lib/libnccl.so.2", "version": "2.28.9"},
    "vllm": {"path": "/opt/libnccl.so.2", "version": "2.29.7", "missing": [], "refused": None},
}
ASK_WRAPPER = preflight.ask_wrapper
BACK = ("query-norm", "combine-routing", "k-rows")


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A folder with the look-alike installed, on a host with eight GPUs; `host.does(what)` makes it misbehave."""
    site = tmp_path / "site"
    lookalike.write(site)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT)]))
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    monkeypatch.setattr(preflight, "gpu_count", lambda: 8)
    monkeypatch.setattr(preflight, "ask_wrapper", lambda: NCCL)  # a process that imports torch, for seconds
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv("VLLM_DISABLE_PYNCCL", raising=False)

    class Host:
        path = tmp_path
        json = tmp_path / "r.json"

        def does(self, what):
            monkeypatch.setenv("FAKE_VLLM", what)

        def pids(self):
            file = tmp_path / "pids"
            return [int(line) for line in file.read_text().split()] if file.exists() else []

    return Host()


def results(host):
    return records.load_record(host.json)["results"]


def counts(result, what="equal"):
    """{rung: how many of its answers are so}"""
    found = {}
    for row in result["rows"]:
        found[row["rung"]] = found.get(row["rung"], 0) + row[what]
    return found


def gone(pids):
    """Whether none of the processes lives."""
    return not any(map(alive, pids))


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# --- the ladder -------------------------------------------------------------------------------------------------------


def test_wrong_as_installed_right_with_the_plugin(host, capsys):
    settings = replace(SMALL, prompts=2, one_batch=True, put_back=BACK)
    assert real_ladder.main(settings, host.json) == 0
    result, out = results(host), capsys.readouterr()
    climbed = [REFERENCE, INSTALLED, "unpatched", "+query norm", "+combine routing", PLUGIN]
    assert list(counts(result)) == climbed
    assert counts(result) == dict.fromkeys(climbed, 4) | {REFERENCE: 8, PLUGIN: 8}
    first = result["rows"][4]
    assert (first["rung"], first["prompt_class"], first["batch"], first["nan"]) == (INSTALLED, "512", False, 2)
    answer = first["answers"][0]
    assert answer["tokens"][0] == 320 and answer["text"].startswith("<320> ") and answer["first_difference"] == 0
    assert answer["logprobs"][:3] == [None, None, -0.25] and answer["nan"] == 2
    assert [a["cached"] for row in result["rows"] if row["prompt_class"] != "512" for a in row["answers"]] == [
        1024
    ] * 24
    assert "Wrong as installed" in result["verdict"] and "8 of 8 with the plugin" in result["verdict"]
    assert result["verdict"] in out.out and "<320>" in out.out and "r-logs" in out.err
    assert result["boots"]["unpatched"]["environment"] == {put_back.VARIABLE: "query-norm,combine-routing,k-rows"}
    assert result["boots"][PLUGIN]["log"]["nccl"] == "2.28.9"
    assert result["boots"][PLUGIN]["log"]["backend"] == "FLASHMLA_SPARSE"
    assert result["nccl"]["vllm"]["path"] == "libnccl.so.2"
    assert str(host.path) not in host.json.read_text() and str(ROOT) not in host.json.read_text()
    facts = recorded_runs.facts(records.load_record(host.json))
    assert facts == [f"ladder in vLLM 0.29.0, TP2: {result['verdict']}"]


def test_a_healthy_release_is_said_to_be_healthy_and_reproduces_nothing(host, capsys):
    assert real_ladder.main(replace(SMALL, rungs=("dcp1", "workaround", "installed"), classes=("1024+1536",))) == 1
    assert "Healthy as installed" in capsys.readouterr().out


def test_the_workaround_is_a_rung_and_no_defect(host):
    settings = replace(SMALL, rungs=("dcp1", "workaround"), llm={"attention_config": {"backend": "X"}})
    assert real_ladder.main(settings, host.json) == 1
    assert counts(results(host))[WORKAROUND] == 2
    assert results(host)["boots"][WORKAROUND]["llm"]["attention_config"] == {
        "backend": "X",
        "sparse_mla_force_mqa": True,
    }


def test_a_later_run_takes_rungs_over(host, capsys):
    assert real_ladder.main(replace(SMALL, rungs=("dcp1", "installed")), host.json) == 1
    assert "the plugin was not tried" in capsys.readouterr().out
    second = host.path / "second.json"
    host.does("crash-at-dcp2")  # DCP1 and `installed` would fail if they were run again
    assert real_ladder.main(replace(SMALL, rungs=("plugin",)), second, resume=host.json) == 1
    assert counts(records.load_record(second)["results"]) == {REFERENCE: 2, INSTALLED: 1, PLUGIN: 0}
    host.does("")
    third = host.path / "third.json"
    assert real_ladder.main(replace(SMALL, rungs=("dcp1", "installed", "plugin")), third, resume=second) == 0
    assert counts(records.load_record(third)["results"]) == {REFERENCE: 2, INSTALLED: 1, PLUGIN: 2}


@pytest.mark.parametrize(
    ("changes", "named"), [({"prompts": 2}, "prompts 1 there, 2 here"), ({"llm": {"seed": 1}}, "llm {} there")]
)
def test_what_differs_cannot_be_resumed(host, changes, named):
    real_ladder.main(replace(SMALL, rungs=("dcp1",)), host.json)
    with pytest.raises(UserError, match=named):
        real_ladder.main(replace(SMALL, **changes), resume=host.json)


def test_another_kind_of_record_cannot_be_resumed(host):
    records.record(host.json, "x", {"repaired": True})
    with pytest.raises(UserError, match="no record of `dcp-fix reproduce --engine vllm`"):
        real_ladder.main(SMALL, resume=host.json)


def test_without_a_reference_nothing_boots(host):
    with pytest.raises(UserError, match="DCP1 has no answers: it was not run"):
        real_ladder.main(replace(SMALL, rungs=("plugin",)), host.json)
    assert not host.json.exists()


# --- what vLLM does to it ---------------------------------------------------------------------------------------------


def test_a_crash_is_a_result_with_its_cause_and_leaves_nothing(host, capsys):
    host.does("crash-at-dcp2")
    assert real_ladder.main(replace(SMALL, rungs=("dcp1", "installed")), host.json) == 1
    row = results(host)["rows"][-1]
    assert row["failure"] == "vLLM ended with status 1: ValueError: no such backend (see as-installed.log)"
    assert row["failure"] in capsys.readouterr().out.replace("\n", " ")
    assert host.pids() and gone(host.pids())


def test_a_hang_ends_with_the_timeout(host):
    host.does("hang")
    assert real_ladder.main(replace(SMALL, rungs=("dcp1", "plugin"), timeout=3.0), host.json) == 1
    assert "took longer than 3 s" in results(host)["rows"][-1]["failure"]


def test_a_grandchild_in_a_session_of_its_own_is_gone_too(host):
    host.does("grandchild")
    real_ladder.main(replace(SMALL, rungs=("dcp1", "installed"), classes=("512",)), host.json)
    assert host.pids() and gone(host.pids())
    assert counts(results(host))[INSTALLED] == 0  # answered and wrong, not failed
    assert not results(host)["rows"][-1]["failure"]


def test_what_vllm_prints_is_never_taken_for_an_answer(host):
    host.does("junk")
    assert real_ladder.main(SMALL, host.json) == 0


def test_a_plugin_that_was_not_loaded_is_no_plugin_rung(host):
    host.does("silent")
    assert real_ladder.main(replace(SMALL, rungs=("dcp1", "plugin")), host.json) == 1
    assert "did not load the plugin" in results(host)["rows"][-1]["failure"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_an_interrupt_and_a_killed_parent_leave_no_process(host, number, status):
    host.does("hang")
    script = (
        "from dcp_fix.real_vllm import preflight, real_ladder\n"
        "from tests.real_vllm.test_real_ladder import NCCL, SMALL\n"
        "from dataclasses import replace\n"
        "preflight.gpu_count, preflight.ask_wrapper = lambda: 8, lambda: NCCL\n"
        f"raise SystemExit(real_ladder.main(replace(SMALL, rungs=('dcp1', 'installed')), {str(host.json)!r} and "
        f"__import__('pathlib').Path({str(host.json)!r})))\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals
    )
    log = host.path / "r-logs/as-installed.log"
    wait_for(lambda: log.exists() and "hanging" in log.read_text(), parent)
    children = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent_of(pid) == parent.pid]
    assert children
    parent.send_signal(number)
    parent.communicate(timeout=60)
    assert parent.returncode == status
    wait_for(lambda: gone(children))
    assert list(counts(results(host))) == [REFERENCE]  # what was there before is kept


def wait_for(condition, process=None, limit=60.0):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()[1]
        time.sleep(0.05)


def parent_of(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


# --- at the door ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "says"), [(0, "no CUDA device.*leave out `--engine vllm`"), (1, "2 GPUs are needed .* and 1 are here")]
)
def test_too_few_gpus(host, monkeypatch, gpus, says):
    monkeypatch.setattr(preflight, "gpu_count", lambda: gpus)
    with pytest.raises(UserError, match=says):
        real_ladder.main(SMALL)


def test_no_vllm(monkeypatch):
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="not installed.*pip install vllm"):
        preflight.installed()


def test_a_disabled_nccl_wrapper_is_refused_with_both_libraries(host, monkeypatch):
    monkeypatch.setattr(preflight, "ask_wrapper", ASK_WRAPPER)
    assert preflight.check_nccl()["vllm"]["missing"] == ["ncclCommQueryProperties"]  # which its wrapper can do without
    host.does("old-nccl")
    with pytest.raises(UserError) as refused:
        real_ladder.main(SMALL)
    said = str(refused.value)
    assert "undefined symbol: ncclCommQueryProperties" in said and "which lacks ncclCommQueryProperties" in said
    assert "torch has loaded" in said and "vLLM loads" in said and "VLLM_NCCL_SO_PATH" in said


def test_the_switch_that_disables_nccl_is_refused(host, monkeypatch):
    monkeypatch.setenv("VLLM_DISABLE_PYNCCL", "1")
    with pytest.raises(UserError, match="unset it"):
        real_ladder.main(SMALL)


def test_a_plugin_that_vllm_would_not_find(host, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(UserError, match="VLLM_PLUGINS='other'"):
        real_ladder.main(SMALL)
    monkeypatch.setattr(preflight.importlib.metadata, "entry_points", lambda group: [])
    with pytest.raises(UserError, match="pip install -e"):
        preflight.check_plugin()
    real_ladder.main(replace(SMALL, rungs=("dcp1",)))  # which needs none


@pytest.mark.parametrize("word", ["other", "query-norm+other", ""])
def test_an_unknown_rung(word):
    with pytest.raises(UserError, match=r"--rungs: .*query-norm\+k-rows"):
        rungs.climb(Settings(rungs=(word,)))


# --- words of the command line ----------------------------------------------------------------------------------------


def test_arguments_of_llm(host):
    settings = replace(SMALL, dcp=4, tp=2, pcp=2, cuda_graphs=True, one_batch=True, llm={"max_num_seqs": 7, "x": "y"})
    asked = questions.of_corpus(settings.classes, 2)
    told = rungs.arguments(settings, rungs.rung("installed", settings), asked)
    assert told["tensor_parallel_size"] == 2 and told["prefill_context_parallel_size"] == 2
    assert told["decode_context_parallel_size"] == 4 and told["dcp_comm_backend"] == "ag_rs"
    assert told["enforce_eager"] is False and told["max_num_seqs"] == 7 and told["x"] == "y"
    assert told["max_model_len"] == 2624 and told["max_model_len"] % 64 == 0
    alone = rungs.arguments(settings, rungs.rung("dcp1", settings), asked)
    assert {"decode_context_parallel_size", "dcp_comm_backend", "prefill_context_parallel_size"}.isdisjoint(alone)
    environment = rungs.child_environment(settings, rungs.rung("installed", settings))
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "1" and environment["DCP_FIX_PLUGIN"] == "0"


def test_the_callers_switches_do_not_reach_another_rung(host, monkeypatch):
    monkeypatch.setenv("DCP_FIX_PLUGIN", "0")
    monkeypatch.setenv(put_back.VARIABLE, "k-rows")
    environment = rungs.child_environment(SMALL, rungs.rung("plugin", SMALL))
    assert "DCP_FIX_PLUGIN" not in environment and put_back.VARIABLE not in environment


def test_names_of_rungs():
    names = [rung.name for rung in rungs.climb(Settings(put_back=("query-norm", "k-rows")))]
    assert names == [REFERENCE, INSTALLED, "put back: query-norm, k-rows", "+combine routing", PLUGIN]


@pytest.mark.parametrize(
    ("word", "pair"),
    [("max-num-seqs=8", ("max_num_seqs", 8)), ('a={"b": 1}', ("a", {"b": 1})), ("dtype=half", ("dtype", "half"))],
)
def test_an_argument_of_llm(word, pair):
    assert real_ladder.pair(word) == pair


@pytest.mark.parametrize("word", ["x", "=1", "a b=1"])
def test_a_bad_argument_of_llm(word):
    with pytest.raises(UserError, match="write key=value"):
        real_ladder.pair(word)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--engine", "vllm", "--stale", "noise"], "--stale have no meaning with --engine vllm"),
        (["--put-back", "k-rows", "--one-batch"], "--put-back, --one-batch need --engine vllm"),
        (["--engine", "vllm", "--put-back", "x"], "--put-back: 'x' is no defect that can be put back"),
    ],
)
def test_options_that_would_do_nothing_are_refused(words, says, capsys, monkeypatch):
    from dcp_fix import cli

    monkeypatch.setattr(sys, "argv", ["dcp-fix", "reproduce", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert ended.value.code == 2 and says in said


# --- logs and prompts -------------------------------------------------------------------------------------------------


def test_the_last_error_at_first_hand(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "INFO booting\n(Worker pid=3) \x1b[31mERROR\x1b[0m 11-29 [x.py:3] torch.OutOfMemoryError: CUDA out of memory\n"
        "(EngineCore pid=2) ERROR EngineCore failed to start.\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert boot_log.read(log)["error"] == "torch.OutOfMemoryError: CUDA out of memory"
    log.write_text("RuntimeError: Engine core initialization failed.\n")
    assert boot_log.read(log)["error"] == "RuntimeError: Engine core initialization failed."
    log.write_bytes(b"")
    assert boot_log.read(log) == {"nccl": None, "backend": None, "plugin": [], "error": None}


@pytest.mark.parametrize(
    ("plugin", "back", "lines", "says"),
    [
        (True, (), [], "did not load"),
        (True, (), ["switched off by DCP_FIX_PLUGIN=0"], "did not load"),
        (True, (), ["this vLLM needs none of the plugin's repairs, nothing is changed"], None),
        (False, (), [], None),
        (False, (), ["replace_launcher applied to vllm.x"], "although it was switched off"),
        (True, ("k-rows",), ["this vLLM has k-rows"], "did not put k-rows back"),
        (True, ("k-rows",), ["k_rows_put_back applied to vllm.x"], None),
    ],
)
def test_a_boot_that_is_not_what_its_rung_says(plugin, back, lines, says):
    found = boot_log.not_as_asked({"plugin": lines}, plugin, back)
    assert found is None if says is None else says in found


class Letters:
    """A tokenizer that takes two tokens for a word of more than five letters, and begins with one of its own."""

    def encode(self, text):
        return [0] + [len(word) for word in text.split() for _ in range(1 + (len(word) > 5))]


@pytest.mark.parametrize("name", ["512", "1024+1536"])
def test_prompts_are_sized_by_the_models_tokenizer(name):
    question = questions.sized(Letters(), name, 1)
    tokens = corpus.CLASSES[name][0]
    assert tokens - 3 <= len(question.ids) <= tokens and question.cached == corpus.CACHED.get(name, 0)
    place, colour, room = question.wanted
    assert place in corpus.PLACES and colour in corpus.COLOURS and room in corpus.ROOMS
    assert question.right([], f"It opens the {place} lock of the {colour} door in the {room}.")
    assert not question.right([], f"It opens the {place} lock of the {colour} door.")


def test_progress_says_how_far_it_is():
    state = real_report.Progress("DCP1", 3)
    assert "vLLM boots" in state.text() and not state.due()
    for event in ({"event": "booted"}, {"event": "answer"}, None):
        state.take(event)
    assert "1 of 3 answers" in state.text()
