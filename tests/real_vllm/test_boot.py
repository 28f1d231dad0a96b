"""One boot: the child process and all that it starts are gone, and its lines and log are read whatever they hold."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_fix.base.errors import UserError
from dcp_fix.plugin import put_back
from dcp_fix.real_vllm import boot, boot_log, questions, rungs
from dcp_fix.real_vllm.rungs import Settings
from tests.real_vllm import lookalike
from tests.tools.heeding import heed_signals

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0  # of every wait: it only catches a hang


@pytest.fixture
def begin(tmp_path):
    """begin(what it does) starts a boot in a process of its own, which prints how it failed; `installed`, on 512."""
    lookalike.write(tmp_path / "site")
    settings = Settings(classes=("512",))
    rung = rungs.rung("installed", settings)
    job = rungs.job(settings, rung, questions.of_corpus(("512",), 1))
    code = "import sys, json; from pathlib import Path; from dcp_fix.real_vllm import boot\n"
    code += "import os; from dcp_fix.base.process import stoppable\n"
    code += (
        "with stoppable(): found = boot.run('installed', json.loads(sys.argv[1]), dict(os.environ), Path(sys.argv[2]), "
    )
    code += "float(sys.argv[3]))\nprint(found.failure, len(found.answers))"

    def start(does, limit_s=LIMIT_S):
        told = {"FAKE_VLLM": does, "FAKE_PIDS": str(tmp_path / "pids"), **rungs.SWITCHED_OFF}
        told["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
        command = [sys.executable, "-c", code, json.dumps(job), str(tmp_path), str(limit_s)]
        return subprocess.Popen(
            command, env=os.environ | told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=heed_signals,
        )  # fmt: skip

    return start


def pids(folder):
    file = folder / "pids"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("does", "limit_s", "says"),
    [
        ("grandchild", LIMIT_S, "None 1"),
        ("crash", LIMIT_S, "vLLM ended with status 1: ValueError: no such backend (see installed.log) 0"),
        ("hang", 3, "vLLM took longer than 3 s (see installed.log) 0"),
        ("signal", LIMIT_S, "vLLM was killed by signal 40 (see installed.log) 0"),
    ],
)
def test_a_boot_ends_with_all_that_it_started(begin, tmp_path, does, limit_s, says):
    """The grandchild has left the session, and nothing in its environment tells whose it is."""
    said, errors = begin(does, limit_s).communicate(timeout=LIMIT_S)
    assert said.strip() == says, errors
    assert (pids(tmp_path) or does in ("hang", "signal")) and not any(map(alive, pids(tmp_path)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_parent_leaves_no_process(begin, tmp_path, number):
    parent = begin("hang")
    wait_until(lambda: pids(tmp_path) or parent.poll() is not None)
    children = [int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
    assert children
    parent.send_signal(number)
    parent.communicate(timeout=LIMIT_S)
    wait_until(lambda: not any(map(alive, children + pids(tmp_path))))


# --- the child's lines ------------------------------------------------------------------------------------------------

ANSWER = {"tokens": [5, 1], "logprobs": [-0.5, None], "smallest_margin": 1.5, "cached": 0, "text": None}
LINES = [
    {"event": "booted", "seconds": [40.5], "vllm": "0.29.0"},
    {"event": "answer", "id": "alone 512 0", "answer": ANSWER},
    {"event": "timed", "id": "decode 1", "seconds": [0.5]},
    {"event": "end"},
]
WHOLE = b"".join(json.dumps(line).encode() + b"\n" for line in LINES)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(lines, log) of a boot that went well."""
    folder = tmp_path_factory.mktemp("boot")
    (folder / "x.log").write_text("")
    return folder / "x.lines.jsonl", folder / "x.log"


def read(files, content, failure=None):
    files[0].write_bytes(content)
    return boot.read(*files, failure)


def test_whole_lines_are_a_boot(files):
    found = read(files, WHOLE)
    assert (found.failure, found.vllm, found.booted_s, found.seconds) == (None, "0.29.0", 40.5, {"decode 1": [0.5]})
    assert found.answers["alone 512 0"].logprobs == [-0.5, None]
    assert read(files, WHOLE[:-17], "took longer than 3 s").failure == "vLLM took longer than 3 s (see x.log)"


def answered(**changes):
    return json.dumps(LINES[1] | {"answer": ANSWER | changes})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "vLLM ended before its work was done"),
        ("garbage", "line 1: not a whole JSON file"),
        ('{"event": "end"', "line 1: not a whole JSON file"),
        ('{"event": "end", "x": "\xe9"}', "line 1: not a whole JSON file"),  # latin-1
        ("[1]", "line 1: the file is [1]; allowed: an object"),
        ("5", "line 1: the file is 5; allowed: an object"),
        ("{}", "line 1: lacks event; allowed: booted, answer, timed, end"),
        ('{"event": "other"}', 'line 1: event is "other"; allowed: booted, answer, timed, end'),
        (json.dumps({"event": "answer", "answer": ANSWER}), "line 1: lacks id"),
        ('{"event": "answer", "id": "x"}', "line 1: lacks answer"),
        (answered(tokens=[1 << 63, 1]), f"line 1: answer.tokens.0 is {1 << 63}"),
        (answered(logprobs=[-1.7e308, 0.0]), "line 1: answer.logprobs.0 is -1.7e+308"),
        (answered(logprobs=[-0.5]), "line 1: 2 tokens and 1 logprobs; allowed: as many"),
    ],
)
def test_a_damaged_line_is_a_failure_that_names_file_line_and_field(files, line, says):
    failure = read(files, line.encode("latin-1")).failure
    assert says in failure and "x.l" in failure, failure


def test_files_that_are_gone_are_a_failure(files, tmp_path):
    assert boot.read(tmp_path / "x.lines.jsonl", files[1], None).failure == "x.lines.jsonl is gone"
    assert boot.read(files[0], tmp_path / "x.log", None).failure == "x.log is gone"


VALUES = st.none() | st.integers(-1, 1 << 70) | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)


@given(
    st.binary(max_size=30) | VALUES.map(lambda value: json.dumps(value).encode()), st.integers(0, 400), st.booleans()
)
def test_any_damage_to_the_lines_is_one_sentence(files, put, place, instead):
    """Something is put into them, or over them."""
    found = read(files, WHOLE[:place] + put + WHOLE[place + len(put) * instead :])
    if found.failure:
        assert found.failure.replace("\n", "").isprintable() and "x.l" in found.failure
        assert not found.answers
    else:
        assert all(0 <= token < 1 << 31 for answer in found.answers.values() for token in answer.tokens)


@given(st.recursive(VALUES, lambda inner: st.dictionaries(st.sampled_from([*LINES[1], *ANSWER, "x"]), inner)))
def test_any_json_on_a_line_is_an_event_or_one_sentence(files, value):
    files[0].write_text(json.dumps(value) + "\n")
    try:
        assert boot.lines_in(files[0])[0].event
    except UserError as error:
        assert "x.lines.jsonl, line 1" in str(error) and str(error).replace("\n", "").isprintable()


# --- the log ----------------------------------------------------------------------------------------------------------


def test_the_last_error_at_first_hand(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "INFO booting\n(Worker pid=3) \x1b[31mERROR\x1b[0m [x.py:3] torch.OutOfMemoryError: CUDA out of \x07memory\n"
        "(EngineCore pid=2) ERROR EngineCore failed to start.\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert boot_log.read(log)["error"] == r"torch.OutOfMemoryError: CUDA out of \x07memory"
    log.write_text("RuntimeError: Engine core initialization failed.\n")
    assert boot_log.read(log)["error"] == "RuntimeError: Engine core initialization failed."
    log.write_bytes(b"")
    assert boot_log.read(log) == {"nccl": None, "backend": None, "plugin": [], "error": None}


@pytest.mark.timeout(60)  # a pattern that backtracks would take hours
def test_long_lines_and_long_logs_hide_nothing_and_end(tmp_path):
    log = tmp_path / "log"
    hostile = ("a." * 200_000, "Using A" + "A" * 200_000, "\x1b[" + "0;" * 200_000, "using nccl==" + "." * 200_000)
    log.write_text("\n".join(["INFO dcp_fix: k_rows applied to x", *hostile, "x" * (5 << 20), "ValueError: last"]))
    said = boot_log.read(log)
    assert said["plugin"] == ["k_rows applied to x"] and said["error"] == "ValueError: last"


@pytest.mark.parametrize(
    ("plugin", "back", "lines", "says"),
    [
        (True, (), [], "did not load"),
        (True, (), ["switched off by DCP_FIX_PLUGIN=0"], "did not load"),
        (True, (), ["this vLLM needs none of the plugin's repairs, nothing is changed"], None),
        (True, (), ["route_attention applied to x", "k-rows not repaired, f cannot change y: E"], "cannot change y: E"),
        (False, (), [], None),
        (False, (), ["replace_launcher applied to vllm.x"], "although it was switched off"),
        (True, ("k-rows",), ["this vLLM has k-rows"], "did not put k-rows back"),
        (True, put_back.HISTORY[2:], ["k_rows_put_back applied to vllm.x"], None),
    ],
)
def test_a_boot_that_is_not_what_its_rung_says(plugin, back, lines, says):
    found = boot_log.not_as_asked({"plugin": lines, "nccl": "2.28.9"}, plugin, back, ranks=2)
    assert found is None if says is None else says in found


def test_a_wrapper_that_loaded_no_nccl_is_no_run():
    said = {"plugin": [], "nccl": None}
    assert "VLLM_NCCL_SO_PATH" in boot_log.not_as_asked(said, plugin=False, ranks=2)
    assert boot_log.not_as_asked(said, plugin=False, ranks=1) is None
