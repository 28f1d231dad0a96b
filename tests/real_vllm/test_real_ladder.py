"""The ladder in real vLLM, with a look-alike `LLM` in this process: rungs, rows, verdict, records, refusals."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_fix.base.errors import UserError
from dcp_fix.learn import recorded_runs
from dcp_fix.plugin import put_back
from dcp_fix.real_vllm import boot, preflight, questions, real_ladder, rungs
from dcp_fix.real_vllm.rungs import INSTALLED, PLUGIN, REFERENCE, WORKAROUND, Settings
from dcp_fix.records import records
from dcp_fix.tiny import corpus
from tests.real_vllm import lookalike

ROOT = Path(__file__).parents[2]
SMALL = Settings(classes=("512", "1024+1536"), timeout=60.0)
BACK = ("query-norm", "combine-routing", "k-rows")


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A folder with the look-alike installed, on a host with eight GPUs; `host.does(what)` makes it misbehave."""
    site = tmp_path / "site"
    lookalike.write(site)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setitem(sys.modules, "vllm", lookalike.as_module())
    monkeypatch.setattr(boot, "run", lookalike.run_here)
    monkeypatch.setattr(preflight, "installed", lambda: site)
    monkeypatch.setattr(preflight, "gpu_count", lambda: 8)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(real_ladder.tempfile, "tempdir", None)
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("DCP_FIX_COMMIT", "a" * 40)
    for name in ("VLLM_PLUGINS", "VLLM_DISABLE_PYNCCL", "DCP_FIX_PLUGIN", put_back.VARIABLE):
        monkeypatch.delenv(name, raising=False)

    class Host:
        path = tmp_path
        json = tmp_path / "r.json"

        def does(self, what):
            monkeypatch.setenv("FAKE_VLLM", what)

    return Host()


def results(path):
    return records.load_record(path)["results"]


def counts(result, what="equal"):
    """{rung: how many of its answers are so}"""
    found = {}
    for row in result["rows"]:
        found[row["rung"]] = found.get(row["rung"], 0) + row[what]
    return found


# --- the ladder -------------------------------------------------------------------------------------------------------


def test_wrong_as_installed_right_with_the_plugin(host, capsys):
    settings = replace(SMALL, prompts=2, one_batch=True, put_back=BACK)
    assert real_ladder.main(settings, host.json) == 0
    result, out = results(host.json), capsys.readouterr()
    climbed = [REFERENCE, INSTALLED, "unpatched", "+query norm", "+combine routing", PLUGIN]
    assert counts(result) == dict.fromkeys(climbed, 4) | {REFERENCE: 8, PLUGIN: 8} and list(counts(result)) == climbed
    first = result["rows"][4]
    assert (first["rung"], first["prompt_class"], first["batch"], first["nan"]) == (INSTALLED, "512", False, 2)
    answer = first["answers"][0]
    assert answer["tokens"][0] == 320 and answer["text"].startswith("<320> ") and answer["first_difference"] == 0
    assert answer["logprobs"][:3] == [None, None, -0.25] and answer["nan"] == 2 and answer["smallest_margin"] == 2.75
    cached = [a["cached"] for row in result["rows"] if row["prompt_class"] != "512" for a in row["answers"]]
    assert cached == [1024] * 24
    assert "Wrong as installed" in result["verdict"] and "8 of 8 with the plugin" in result["verdict"]
    assert result["verdict"] in out.out and "<320>" in out.out and "as-installed.log" in out.err
    assert result["boots"]["unpatched"]["environment"] == {put_back.VARIABLE: "query-norm,combine-routing,k-rows"}
    log = result["boots"][PLUGIN]["log"]
    assert (log["nccl"], log["backend"], log["plugin"]) == ("2.28.9", "FLASHMLA_SPARSE", ["this vLLM has k-rows"])
    assert str(host.path) not in host.json.read_text() and str(ROOT) not in host.json.read_text()
    facts = recorded_runs.facts(records.load_record(host.json))
    assert facts == [f"TP2: {result['verdict']}"]


@pytest.mark.parametrize(
    ("asked", "classes", "does", "status", "says"),
    [
        ("dcp1,workaround,installed", "1024+1536", "", 0, "Healthy as installed"),
        ("dcp1,workaround", "512", "", 0, "Nothing differs"),
        ("dcp1,installed", "512", "", 1, "Wrong as installed; the plugin was not tried"),
        ("dcp1,plugin", "512", "silent", 1, "did not load the plugin"),
        ("dcp1,installed", "1024+1536", "empty", 1, "Wrong as installed"),
        ("dcp1,installed", "1024+1536", "nan", 1, "Wrong as installed"),
        ("dcp1,installed", "512", "crash", 1, "ended with status 1: ValueError: no such backend (see as-installed"),
        ("dcp1,installed,plugin", "512", "junk", 0, "Wrong as installed, right with the plugin"),
    ],
)  # fmt: skip
def test_the_status_is_that_of_the_last_rung(host, capsys, asked, classes, does, status, says):
    host.does(does)
    settings = replace(SMALL, rungs=tuple(asked.split(",")), classes=(classes,))
    assert real_ladder.main(settings) == status
    assert says in capsys.readouterr().out


def test_a_reference_without_answers_is_none(host, monkeypatch):
    with pytest.raises(UserError, match="DCP1 has no answers: it was not run"):
        real_ladder.main(replace(SMALL, rungs=("plugin",)), host.json)
    assert not host.json.exists()
    monkeypatch.setattr(lookalike.LLM, "output", lambda self, *rest: RIGHT(self, [], 0))
    with pytest.raises(UserError, match="DCP1 answered without a token"):
        real_ladder.main(replace(SMALL, rungs=("dcp1", "installed"), classes=("1024+1536",)))


RIGHT = lookalike.LLM.output


def test_rows_come_as_they_come_and_an_interrupt_keeps_them(host, monkeypatch, capsys):
    def second(name, *rest):
        if name == INSTALLED:
            assert "DCP1                512 " in capsys.readouterr().out
            raise KeyboardInterrupt
        return lookalike.run_here(name, *rest)

    monkeypatch.setattr(boot, "run", second)
    assert real_ladder.main(SMALL, host.json) == 130
    assert list(counts(results(host.json))) == [REFERENCE]
    assert "logs are in" in capsys.readouterr().err


def test_on_standard_output_the_record_is_alone(host, capsys):
    assert real_ladder.main(replace(SMALL, rungs=("dcp1", "workaround"), classes=("512",)), Path("-")) == 0
    assert counts(json.loads(capsys.readouterr().out)["results"]) == {REFERENCE: 1, WORKAROUND: 1}


def test_a_file_that_lies_among_the_logs_is_left_alone(host):
    logs, mine = host.path / "logs", host.path / "mine"
    logs.mkdir()
    mine.write_text("mine")
    for name in ("dcp1.log", "dcp1.lines.jsonl", "dcp1.job.json"):
        (logs / name).symlink_to(mine)
    assert real_ladder.main(replace(SMALL, rungs=("dcp1",), classes=("512",), logs=logs)) == 0
    assert mine.read_text() == "mine" and len(list(logs.glob("*/dcp1.log"))) == 1


# --- an earlier record ------------------------------------------------------------------------------------------------


def test_a_later_run_takes_rungs_over(host):
    one = replace(SMALL, classes=("512",))
    assert real_ladder.main(replace(one, rungs=("dcp1", "installed")), host.json) == 1
    second = host.path / "second.json"
    host.does("crash")  # `installed` would fail if it were run again
    assert real_ladder.main(replace(one, rungs=("plugin",)), second, resume=host.json) == 1
    host.does("")
    third = host.path / "third.json"
    assert real_ladder.main(replace(one, rungs=("dcp1", "installed", "plugin")), third, resume=second) == 0
    assert counts(results(third)) == {REFERENCE: 1, INSTALLED: 0, PLUGIN: 1}


@pytest.fixture
def earlier(host):
    """(a record, what resuming a changed copy of it says)"""
    settings = replace(SMALL, rungs=("dcp1", "installed"), classes=("512",))
    real_ladder.main(settings, host.json)
    sound = host.json.read_text()

    def resumed(change, **changes):
        record = json.loads(sound)
        change(record)
        host.json.write_text(json.dumps(record))
        with pytest.raises(UserError) as refused:
            real_ladder.main(replace(settings, **changes), resume=host.json)
        return str(refused.value)

    return json.loads(sound), resumed


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("terms.commit", "b" * 40, "differs in commit"),
        ("terms.gpus", ["another"], "differs in gpus"),
        ("terms.torch", "1.0", "differs in torch"),
        ("terms", None, "terms is null; allowed: an object"),
        ("rows", None, "rows is null; allowed: a list of rows"),
        ("rows.0", [], "rows.0"),
        ("boots", 5, "boots is 5; allowed: an object, a boot for each rung"),
        ("rows.0.answers.0.tokens.3", 99, "answers, judged again, come out otherwise"),
        ("rows.0.answers.0.tokens", [1 << 63], "rows.0.answers.0.tokens"),
        ("rows.0.answers.0.sha256", "0" * 64, "come out otherwise"),
        ("rows.1.equal", 1, "come out otherwise"),
        ("rows.1.answers.0.of the future", 1, "come out otherwise"),
    ],
)
def test_a_record_that_is_not_this_runs_is_refused(earlier, place, value, says):
    def change(record):
        *path, last = place.split(".")
        found = record["results"]
        for name in path:
            found = found[int(name) if name.isdecimal() else name]
        found[int(last) if last.isdecimal() else last] = value

    said = earlier[1](change)
    assert "r.json" in said and says in said, said


def test_other_settings_and_other_commands_are_refused(earlier):
    assert "prompts 1 there, 2 here" in earlier[1](lambda record: None, prompts=2)
    assert "lacks terms" in earlier[1](lambda record: record.update(results={"repaired": True}))


VALUES = st.none() | st.booleans() | st.integers(-1, 1 << 70) | st.floats() | st.text(max_size=3)
JSON = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner))


def places(value, path=()):
    """Every place within a value of JSON."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for name, one in inner:
        yield from places(one, (*path, name))


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """(a run of which nothing has been climbed, the record of one that has)"""
    folder = tmp_path_factory.mktemp("sound")
    settings = replace(SMALL, rungs=("dcp1", "installed"), classes=("512",), logs=folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boot, "run", lookalike.run_here)
        patch.setitem(sys.modules, "vllm", lookalike.as_module())
        run = real_ladder.RealLadder(settings, "0.29.0", questions.of_corpus(("512",), 1), rungs.climb(settings))
        patch.setattr(real_ladder.RealLadder, "terms", {"tp": 2})
        run.climb(folder, folder / "r.json")
    return folder / "damaged.json", json.loads((folder / "r.json").read_text()), run


@given(st.data())
def test_any_damage_to_a_record_is_one_sentence(sound, data):
    path, record, run = sound
    record = json.loads(json.dumps(record))
    *way, last = data.draw(st.sampled_from([place for place in places(record) if place]))
    found = record
    for name in way:
        found = found[name]
    if data.draw(st.booleans()):
        found[last] = data.draw(JSON)
    else:
        del found[last]
    text = json.dumps(record)
    path.write_text(text[: data.draw(st.sampled_from([len(text)] * 9 + [len(text) // 2]))])
    again = replace(run, rows=[], boots={})
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(real_ladder.RealLadder, "terms", {"tp": 2})
            again.take_over(path)
    except UserError as error:
        assert str(error).replace("\n", "").isprintable() and "damaged.json" in str(error)
    else:
        tokens = {(row.rung, str(answer.tokens)) for row in run.rows for answer in row.answers}
        assert {(row.rung, str(answer.tokens)) for row in again.rows for answer in row.answers} <= tokens


# --- at the door ------------------------------------------------------------------------------------------------------

WORDS = {"dcp": 2, "classes": "512", "rungs": None, "put_back": None, "llm": None, "logs": None, "checkpoint": None}
DEEP = "x=" + "[" * 100_000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"dcp": 1}, "--dcp 1 is what the ladder compares with"),
        ({"classes": ""}, "--classes '': allowed"),
        ({"classes": "512,512"}, "--classes '512,512': allowed: .* each of them once"),
        ({"classes": "513"}, "prompt class '513'"),
        ({"rungs": "dcp1,other"}, r"--rungs: 'other' is none of dcp1, .*query-norm\+k-rows"),
        ({"rungs": "query-norm+other"}, "--rungs: "),
        ({"put_back": "x"}, "--put-back: 'x' is no defect that can be put back"),
        ({"llm": ["x"]}, "write key=value"),
        ({"llm": ["a b=1"]}, "write key=value"),
        ({"llm": ["x=NaN"]}, "--llm x: .*NaN is no JSON"),
        ({"llm": ["x=1e999"]}, "--llm x: .*1e999"),
        ({"llm": [DEEP]}, "--llm x: nested too deeply"),
        ({"llm": ["attention_config=5"]}, "--llm attention_config: allowed: an object"),
        ({"llm": ["decode-context-parallel-size=1"]}, "--llm decode_context_parallel_size: the command's own options"),
        ({"checkpoint": Path("/nope")}, "/nope"),
        ({"logs": Path(__file__)}, "test_real_ladder.py: .* no folder"),
        ({"logs": Path("/proc/x")}, "/proc/x: cannot be written"),
    ],
)
def test_what_is_refused_before_anything_boots(host, words, says):
    with pytest.raises(UserError, match=says) as refused:
        real_ladder.from_options(json_path=host.json, resume=None, **WORDS | words)
    assert str(refused.value).isprintable()
    assert not host.json.exists()


@pytest.mark.parametrize(
    ("word", "pair"),
    [("max-num-seqs=8", ("max_num_seqs", 8)), ('a={"b": 1}', ("a", {"b": 1})), ("dtype=half", ("dtype", "half"))],
)
def test_an_argument_of_llm(word, pair):
    assert rungs.pair(word) == pair


def test_a_host_that_cannot_climb(host, monkeypatch):
    monkeypatch.setenv("VLLM_DISABLE_PYNCCL", "1")
    with pytest.raises(UserError, match="unset it"):
        real_ladder.main(SMALL)
    monkeypatch.setattr(preflight, "gpu_count", lambda: 1)
    with pytest.raises(UserError, match="2 GPUs are needed .* and 1 are here"):
        real_ladder.main(SMALL)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(UserError, match="VLLM_PLUGINS='other'"):
        real_ladder.main(SMALL)
    monkeypatch.setattr(preflight.importlib.metadata, "entry_points", lambda group: [])
    with pytest.raises(UserError, match="pip install -e"):
        real_ladder.main(SMALL)
    monkeypatch.undo()
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="not installed.*pip install vllm"):
        preflight.check(2, plugin=False)


# --- what vLLM is told ------------------------------------------------------------------------------------------------


def test_arguments_of_llm(monkeypatch):
    monkeypatch.setenv("DCP_FIX_PLUGIN", "0")
    monkeypatch.setenv(put_back.VARIABLE, "k-rows")
    llm = {"max_num_seqs": 7, "x": "y", "attention_config": {"backend": "X"}}
    settings = replace(SMALL, dcp=4, tp=2, pcp=2, cuda_graphs=True, one_batch=True, llm=llm)
    asked = questions.of_corpus(settings.classes, 2)
    told = rungs.arguments(settings, rungs.rung("workaround", settings), asked)
    assert told["tensor_parallel_size"] == 2 and told["prefill_context_parallel_size"] == 2
    assert told["decode_context_parallel_size"] == 4 and told["dcp_comm_backend"] == "ag_rs"
    assert told["enforce_eager"] is False and told["max_num_seqs"] == 7 and told["x"] == "y"
    assert told["attention_config"] == {"backend": "X", "sparse_mla_force_mqa": True}
    assert told["max_model_len"] == 2624 and told["max_model_len"] % 64 == 0
    alone = rungs.arguments(settings, rungs.rung("dcp1", settings), asked)
    assert {"decode_context_parallel_size", "dcp_comm_backend", "prefill_context_parallel_size"}.isdisjoint(alone)
    environment = rungs.child_environment(settings, rungs.rung("installed", settings))
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "1" and environment["DCP_FIX_PLUGIN"] == "0"
    environment = rungs.child_environment(SMALL, rungs.rung("plugin", SMALL))  # the caller's own do not reach it
    assert "DCP_FIX_PLUGIN" not in environment and put_back.VARIABLE not in environment


def test_names_of_rungs():
    names = [rung.name for rung in rungs.climb(Settings(put_back=("query-norm", "k-rows")))]
    assert names == [REFERENCE, INSTALLED, "put back: query-norm, k-rows", "+combine routing", PLUGIN]


class Letters:
    """A tokenizer that takes two tokens for a word of more than five letters, and begins with one of its own."""

    def encode(self, text):
        return [0] + [len(word) for word in text.split() for _ in range(1 + (len(word) > 5))]


@pytest.mark.parametrize("name", ["512", "1024+1536"])
def test_prompts_are_sized_by_the_models_tokenizer(monkeypatch, name):
    transformers = pytest.importorskip("transformers")

    def load(model, trust_remote_code):
        assert trust_remote_code is False  # None would ask, and run the model's code for a "y"
        return Letters()

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)
    question = questions.of_model("any", (name,), 2)[1]
    tokens = corpus.CLASSES[name][0]
    assert tokens - 3 <= len(question.ids) <= tokens and question.cached == corpus.CACHED.get(name, 0)
    place, colour, room = question.wanted
    assert place in corpus.PLACES and colour in corpus.COLOURS and room in corpus.ROOMS
    assert question.right([], f"It opens the {place} lock of the {colour} door in the {room}.")
    assert not question.right([], f"It opens the {place} lock of the {colour} door.")


def test_a_model_without_a_tokenizer(tmp_path):
    pytest.importorskip("transformers")
    os.makedirs(tmp_path / "m")
    with pytest.raises(UserError, match="no tokenizer"):
        questions.of_model(str(tmp_path / "m"), ("512",), 1)
