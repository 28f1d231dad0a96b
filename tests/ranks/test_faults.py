"""What goes wrong between ranks: everyone else stops in time, names the rank and the reason, and no process is left.

Processes are forked (ranks.py), except where the launcher itself is under test. Times are those of the module: a
failure that somebody knows reaches all within a second, a silent or late rank is found after the `silence` or `timeout`
given here, and who cannot raise is ended after `grace`.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dcp_fix.base.errors import UserError
from dcp_fix.ranks import launch, place
from dcp_fix.ranks.torch_group import joined
from dcp_fix.ranks.watch import BEAT_S, STOPPED, Watch
from dcp_fix.records.records import load_record
from dcp_fix.tiny import corpus
from dcp_fix.verify import verify
from tests.processes import run_processes, run_ranks
from tests.tools.heeding import heed_signals

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600.0  # of every wait: it only catches a hang


def ones(group):
    return group.all_reduce(torch.ones(2)).tolist()


def errors(ranks):
    return [rank.error for rank in ranks]


# --- a rank that raises, returns, dies, stops or hangs ----------------------------------------------------------------


def raises(group):
    ones(group)
    if group.rank == 1:
        raise KeyError("boom")
    return ones(group), ones(group)


def test_a_rank_that_raises_is_named():
    ranks = run_ranks(3, raises)
    assert ranks[1].error == "KeyError: 'boom'"
    assert {ranks[0].error, ranks[2].error} == {"GroupError: rank 1 of 3 failed: KeyError: 'boom'"}


def returns_early(group):
    ones(group)
    return group.rank == 1 or ones(group)


def test_a_rank_that_returns_while_others_wait_is_named():
    ranks = run_ranks(2, returns_early)
    message = r"GroupError: rank 1 of 2 returned while others wait for it in all_reduce of float32 \[2\]"
    assert all(re.match(message, error) for error in errors(ranks))


def dies(group, number):
    ones(group)
    if group.rank == 1:
        time.sleep(3 * BEAT_S)
        os.kill(os.getpid(), number)
    return ones(group)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_stopped_is_named(number):
    """Nobody tells them here: a launcher that sees the death tells them sooner."""

    def wake(processes, servers):
        if number == signal.SIGSTOP:
            processes[0].join(LIMIT_S)
            os.kill(processes[1].pid, signal.SIGKILL)

    ranks = run_ranks(2, dies, number, silence=2.0, meanwhile=wake)
    assert ranks[1].status == -signal.SIGKILL
    assert re.match(
        r"GroupError: rank 1 of 2 has given no sign of life for 2 s: .* came from all_reduce", ranks[0].error
    )


def hangs(group):
    ones(group)
    if group.rank == 1:
        time.sleep(3600)
    return ones(group)


def test_a_rank_that_hangs_is_named_and_ended():
    ranks = run_ranks(3, hangs, timeout=1.0, grace=1.0)
    message = r"GroupError: rank 1 of 3 did not reach the others within 1 s: it is still at all_reduce of float32 \[2\]"
    assert re.match(message, ranks[0].error) and re.match(message, ranks[2].error)
    assert (ranks[1].error, ranks[1].status) == (None, STOPPED)  # asleep, so it could not raise


def differs(group):
    ones(group)
    return group.all_to_all(torch.ones(2)) if group.rank == 1 else ones(group)


def test_different_collectives_are_listed():
    calls = r"rank 0: all_reduce of float32 \[2\]; rank 1: all_to_all of float32 \[2\]"
    ranks = run_ranks(2, differs, timeout=1.0)
    assert all(re.match(f"GroupError: the ranks called different collectives: {calls}", e) for e in errors(ranks))


def sleeps(group):
    ones(group)
    time.sleep(3600)


def test_ranks_that_all_stand_still_are_ended():
    """As where the collectives of a replayed CUDA graph hang: no rank is behind another."""
    ranks = run_ranks(2, sleeps, timeout=1.0, grace=1.0)
    assert [rank.status for rank in ranks] == [STOPPED] * 2


class SlowStore(dict):
    """A store that takes its time over the beat of a rank that is not finished."""

    def set(self, key, told):
        time.sleep(0 if json.loads(told)["finished"] else 0.2)
        self[key] = told


def test_the_last_beat_is_that_of_a_finished_rank():
    watch = Watch(SlowStore(), rank=0, size=1, timeout=1.0)
    late = threading.Thread(target=watch.beat)
    late.start()
    time.sleep(0.05)
    watch.finished = True
    watch.beat()
    late.join()
    assert watch.known(0)["finished"]


def shares(group):
    for _ in range(3):
        group.replicated(lambda: None)
        if group.rank == 1:
            return
    time.sleep(3600)


def test_a_replay_that_others_do_not_join_is_noticed():
    """A replay calls no collective by name, but `replicated` around it counts."""
    ranks = run_ranks(2, shares, timeout=60.0, grace=1.0)
    assert re.match("GroupError: rank 1 of 2 returned while others wait for it in share of 1 jobs", ranks[1].error)
    assert ranks[0].status == STOPPED


def waits(group):
    time.sleep(3600)


def test_without_its_launcher_no_rank_stays():
    """The store lives in the launcher."""

    def end_launcher(processes, servers):
        servers.clear()

    ranks = run_ranks(2, waits, grace=1.0, meanwhile=end_launcher)
    assert [rank.status for rank in ranks] == [STOPPED] * 2


def comes_or_not(comes):
    place.START_S = 1.0
    if comes:
        with joined():
            pass


def test_a_rank_that_never_comes_is_named():
    ranks = run_processes(comes_or_not, [(True,), (False,), (True,)])
    assert errors(ranks[::2]) == ["GroupError: rank 1 of 3 did not start within 1 s"] * 2


# --- ranks that were started with something else ----------------------------------------------------------------------


def start_rank(settings):
    return verify.as_process(settings)


SETTINGS = verify.Settings(tp=2, dcp=(1, 2), classes=("512",))


def mismatch(name, mine, other):
    return (
        f"GroupError: rank 1 of 2 was started with {name} {mine}, the others with {other}: start every rank with the "
    )


def test_another_dcp_size():
    ranks = run_processes(start_rank, [(SETTINGS,), (replace(SETTINGS, dcp=(2, 1)),)])
    assert all(error.startswith(mismatch("dcp", "[2, 1]", "[1, 2]")) for error in errors(ranks))


def test_another_commit():
    told = {0: {"DCP_FIX_COMMIT": "a" * 40}, 1: {"DCP_FIX_COMMIT": "b" * 40 + "-dirty"}}
    ranks = run_processes(start_rank, [(SETTINGS,)] * 2, environment=told)
    assert all(error.startswith(mismatch("commit", "b" * 40 + "-dirty", "a" * 40)) for error in errors(ranks))


def test_another_checkpoint(tmp_path):
    """Of the same shape, and in a folder of the same name."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(corpus.CHECKPOINT, folder)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    ranks = run_processes(start_rank, [(SETTINGS,), (replace(SETTINGS, checkpoint=folder),)])
    assert all(
        re.match("GroupError: rank 1 of 2 was started with checkpoint model.safetensors ", error)
        for error in errors(ranks)
    )


def test_other_sources():
    """A host whose checkout differs, at the same commit."""
    first, second = ({"sources": digest} for digest in ("aa", "bb"))
    ranks = run_ranks(3, ones, terms={0: first, 1: second, 2: second})
    message = "GroupError: rank 0 of 3 was started with sources aa, the others with bb"
    assert all(error.startswith(message) for error in errors(ranks))  # the majority is right


def test_another_number_of_processes():
    ranks = run_processes(start_rank, [(replace(SETTINGS, tp=4),)] * 2)
    assert all(error == "UserError: --tp 4 with 2 processes: a process is a rank; start 4" for error in errors(ranks))


# --- the launcher -----------------------------------------------------------------------------------------------------


@pytest.fixture
def running(tmp_path):
    """`dcp-fix verify --procs 2` under way, with work for minutes; its record would be tmp_path / "r.json"."""
    command = [sys.executable, "-m", "dcp_fix", "verify", "--tp", "2", "--dcp", "1,2", "--classes", "512"]
    command += ["--prompts", "300", "--procs", "2", "--record", str(tmp_path / "r.json")]
    log = tmp_path / "log"
    with open(log, "w") as file:
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, preexec_fn=heed_signals)
    wait_until(lambda: "512 tokens" in log.read_text() or launcher.poll() is not None)
    assert launcher.poll() is None, log.read_text()
    yield launcher, children(launcher.pid), log
    launcher.kill()


def wait_until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children(pid):
    """The processes that it started, in order."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def assert_all_gone(ranks, log):
    wait_until(lambda: not any(map(alive, ranks)))
    assert sorted(path.name for path in log.parent.iterdir()) == ["log"]  # no record, and no part of one


def test_a_killed_rank_ends_the_run_and_leaves_no_record(running):
    launcher, ranks, log = running
    os.kill(ranks[1], signal.SIGKILL)
    assert launcher.wait(LIMIT_S) == 128 + signal.SIGKILL
    assert_all_gone(ranks, log)
    assert "error: rank 1 of 2 was killed by SIGKILL" in log.read_text()
    assert "rank 0 stops: rank 1 of 2 was killed by SIGKILL" in log.read_text()


def test_ctrl_c_ends_every_rank(running):
    launcher, ranks, log = running
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(LIMIT_S) == 128 + signal.SIGINT
    assert_all_gone(ranks, log)
    assert "interrupted" in log.read_text() and "Traceback" not in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_every_rank_and_say_which(running, number):
    launcher, ranks, log = running
    launcher.send_signal(number)
    assert launcher.wait(LIMIT_S) == 128 + number
    assert_all_gone(ranks, log)
    assert "Traceback" not in log.read_text()


def listening(pid):
    """The addresses, in hexadecimal, at which a process listens for TCP connections."""
    sockets = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    rows = [
        row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()
    ]
    return [row[1].split(":")[0] for row in rows if len(row) > 9 and row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


def test_nobody_else_can_reach_the_store(running):
    """It listens on the loopback interface, and its keys begin with what only the ranks are told."""
    launcher, ranks, _ = running
    assert listening(launcher.pid) == ["0100007F"]
    told = [dict(pair.split("=", 1) for pair in environment(pid) if "=" in pair) for pid in ranks]
    assert len({rank[place.TOKEN] for rank in told}) == 1 and len(told[0][place.TOKEN]) == 32
    store = torch.distributed.TCPStore("127.0.0.1", int(told[0]["MASTER_PORT"]), is_master=False)
    store.set("dcp_fix///0/failure", "\x1b[31mforged")
    store.set("failure", "forged")
    time.sleep(4 * BEAT_S)
    assert launcher.poll() is None and all(map(alive, ranks))
    assert store.check([f"{place.prefix(told[0][place.TOKEN])}/beat/0"])


def environment(pid):
    """NAME=value of a process."""
    return Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"MASTER_PORT": "tcp://10.0.0.1:23456"}, "MASTER_PORT is 'tcp://10.0.0.1:23456'; allowed: a number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; allowed: 1 .. 65535"),
        ({"RANK": "-1"}, "RANK is '-1'; allowed: a number"),
        ({"RANK": "2"}, "RANK is 2; allowed: 0 .. 1"),
        ({"RANK": "٣"}, "RANK is '٣'; allowed: a number"),
        ({"WORLD_SIZE": "1" * 5000}, "WORLD_SIZE is '111"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0; allowed: 1"),
        ({"LOCAL_RANK": "1.0"}, "LOCAL_RANK is '1.0'; allowed: a number"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE is 3; allowed: 1 .. 2"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is ''; allowed: the name or address"),
        ({"MASTER_ADDR": "a\x1b[31mb"}, r"MASTER_ADDR is 'a\\x1b\[31mb'; allowed"),
    ],
)
def test_what_is_no_place_is_refused_by_variable(monkeypatch, changes, message):
    sound = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "::1"}
    for name, value in (sound | {"MASTER_PORT": "29400"} | changes).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        place.Place.from_environment()
    assert re.match(message.replace("..", r"\.\."), str(caught.value).replace("\\\\", "\\")), caught.value


def test_termination_ends_even_ranks_that_ignore_it():
    stubborn = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write(1, b'ready\\n'); "
    code = f"import sys; from dcp_fix.ranks.launch import launch; sys.exit(launch([sys.executable, '-c', {stubborn!r} "
    code += "'time.sleep(3600)'], 2))"
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert [launcher.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    ranks = children(launcher.pid)
    launcher.terminate()
    assert launcher.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert len(ranks) == 2 and not any(map(alive, ranks))


@pytest.mark.parametrize(
    "code, status, said",
    [
        ("import nothing_of_this_name", launch.FAULT, "of 2 ended with status 1"),
        (f"import sys; sys.exit({launch.RANK_DIFFERS})", launch.DIFFERS, ""),
        ("", 0, ""),
    ],
)
def test_a_difference_is_told_from_a_rank_that_cannot_start(code, status, said, capfd):
    assert launch.launch([sys.executable, "-c", code], 2) == status
    assert said in capfd.readouterr().err


def test_a_rank_that_cannot_be_started_leaves_no_other(monkeypatch):
    begun, start = [], launch.start

    def second_fails(command, rank, *rest):
        if rank == 1:
            raise OSError("no more processes")
        begun.append(start(command, rank, *rest))
        return begun[0]

    monkeypatch.setattr(launch, "start", second_fails)
    with pytest.raises(OSError, match="no more processes"):
        launch.launch([sys.executable, "-c", "import time; time.sleep(3600)"], 2)
    assert begun[0].poll() is not None


def test_a_killed_launcher_leaves_no_rank(running):
    launcher, ranks, log = running
    launcher.kill()
    assert_all_gone(ranks, log)


def test_part_of_a_record_is_no_record(tmp_path):
    verify.finish(verify.as_threads(SETTINGS), 0, tmp_path / "r.json")
    whole = (tmp_path / "r.json").read_text()
    assert load_record(tmp_path / "r.json")["results"]["ok"]
    for length in (0, 100, len(whole) // 2, len(whole) - 3):
        (tmp_path / "r.json").write_text(whole[:length])
        with pytest.raises(UserError):
            load_record(tmp_path / "r.json")
