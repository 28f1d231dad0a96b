"""What a command does with its process: a signal ends it with the usual status and leaves nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dcp_fix.base.process import Stopped, ending, status_of, stoppable
from tests.tools.heeding import heed_signals

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600.0  # only catches a hang


def test_a_signal_raises_what_ctrl_c_raises_and_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt) as caught, stoppable():
        signal.raise_signal(signal.SIGTERM)
    assert isinstance(caught.value, Stopped) and status_of(caught.value) == 143
    assert status_of(KeyboardInterrupt()) == 130 and status_of(Stopped(signal.SIGHUP)) == 129
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_was_ignored_stays_ignored():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    except KeyboardInterrupt:  # which would end pytest
        pytest.fail("the signal was heeded")
    finally:
        signal.signal(signal.SIGHUP, before)


def test_how_a_child_ended():
    assert ending(3) == "ended with status 3" and ending(-9) == "was killed by SIGKILL"
    assert ending(-40) == "was killed by signal 40"  # of real time, which has no name


def begun(folder, *arguments):
    """A command in a process of its own, once it has said what it works at."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dcp_fix", *arguments], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals,
    )  # fmt: skip
    assert "512 tokens" in process.stderr.readline()
    return process


@pytest.mark.parametrize(
    "number, arguments",
    [
        (signal.SIGTERM, ["reproduce", "--classes", "512", "--prompts", "200", "--json", "r.json"]),
        (signal.SIGINT, ["verify", "--classes", "512", "--prompts", "200", "--record", "r.json"]),
    ],
)
def test_a_signal_during_the_work_of_threads_leaves_nothing(tmp_path, number, arguments):
    """Rank threads still compute: torch would abort the process (status 134) if it ended as usual."""
    process = begun(tmp_path, *arguments)
    process.send_signal(number)
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + number
    assert "Traceback" not in said and said.rstrip().endswith("stopped")
    assert list(tmp_path.iterdir()) == []


SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.{name})
except BaseException:
    pass
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_in_an_import_that_swallows_it_is_raised_when_that_has_ended(tmp_path, name):
    """As torch's import does, now and then: the command went on as if nobody had asked it to end."""
    (tmp_path / "swallows.py").write_text(SWALLOWS.format(name=name))
    code = (
        "import sys, time\nfrom dcp_fix.base.process import status_of, stoppable\n"
        "try:\n    with stoppable():\n        import swallows\n        time.sleep(20)\n"
        "except KeyboardInterrupt as stop:\n    sys.exit(status_of(stop))\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, preexec_fn=heed_signals, timeout=100)
    assert done.returncode == 128 + signal.Signals[name]
