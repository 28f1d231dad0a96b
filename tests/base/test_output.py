"""Where evidence goes: checked before the work, written before anything is printed, nothing of the user's lost."""

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dcp_fix.base import output
from dcp_fix.base.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_new_file_has_the_mode_of_any_new_file(tmp_path):
    output.write(tmp_path / "f", "text\n")
    assert (tmp_path / "f").read_text() == "text\n" and mode(tmp_path / "f") == 0o644
    assert listing(tmp_path) == ["f"]


@pytest.mark.parametrize("was", [0o600, 0o640, 0o666])
def test_a_file_keeps_its_mode(tmp_path, was):
    (tmp_path / "f").write_text("old")
    (tmp_path / "f").chmod(was)
    output.write(tmp_path / "f", "new")
    assert (tmp_path / "f").read_text() == "new" and mode(tmp_path / "f") == was


def test_a_link_is_followed_and_stays_one(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "f").write_text("old")
    (tmp_path / "link").symlink_to("there/f")
    (tmp_path / "dangling").symlink_to("there/g")
    for name in ("link", "dangling"):
        output.check(tmp_path / name)
        output.write(tmp_path / name, "new")
        assert (tmp_path / name).is_symlink()
    assert (tmp_path / "there" / "f").read_text() == (tmp_path / "there" / "g").read_text() == "new"


def test_a_file_of_the_users_that_looks_like_ours_is_left_alone(tmp_path):
    for name in ("f.part", ".f.tmp", f".f.{os.getpid()}.tmp", ".dcp_fix-"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "g.part").symlink_to("elsewhere")
    for name in ("f", "g"):
        output.write(tmp_path / name, "new")
    assert all((tmp_path / name).read_text() == "mine" for name in (".f.tmp", "f.part", ".dcp_fix-"))
    assert not (tmp_path / "elsewhere").exists()


def test_checking_changes_nothing(tmp_path):
    (tmp_path / "old").write_text("old")
    before = os.stat(tmp_path / "old")
    for name in ("old", "new"):
        output.check(tmp_path / name)
    after = os.stat(tmp_path / "old")
    assert listing(tmp_path) == ["old"] and (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize("broken", ["write", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, broken):
    (tmp_path / "f").write_text("old")

    def full(*values, **options):
        raise OSError(28, "No space left on device")

    if broken == "write":
        monkeypatch.setattr(output, "open", lambda *a, **k: full(), raising=False)
    else:
        monkeypatch.setattr(os, broken, full)
    with pytest.raises(UserError, match=r"f: cannot be written \(No space left"):
        output.write(tmp_path / "f", "new")
    monkeypatch.undo()
    assert (tmp_path / "f").read_text() == "old" and listing(tmp_path) == ["f"]


def test_a_name_as_long_as_the_system_allows(tmp_path):
    output.check(tmp_path / ("x" * 255))
    output.write(tmp_path / ("x" * 255), "new")
    with pytest.raises(UserError, match="File name too long"):
        output.check(tmp_path / ("x" * 256))


def test_what_cannot_hold_evidence_is_refused_at_the_door(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    places = {
        tmp_path / "folder": "is a folder", tmp_path / "loop": "link", tmp_path / "file" / "f": "cannot|no folder",
        tmp_path / "none" / "f": "is no folder; make it first", "/proc/f": "cannot be written", "a\0b": "null",
        f"{tmp_path}/new/": "no folder|ends as a folder", tmp_path / "\x1b[31m" / "f": r"x1b\[31m.*no folder",
    }  # fmt: skip
    for place, message in places.items():
        with pytest.raises(UserError, match=message) as caught:
            output.check(place)
        assert str(caught.value).isprintable()
    assert listing(tmp_path) == ["file", "folder", "loop"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_another_user_is_refused_what_is_not_theirs(tmp_path):
    (tmp_path / "f").write_text("old")
    tmp_path.chmod(0o755)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        refused = 0
        for place in (tmp_path / "f", tmp_path / "new", "/etc/passwd"):
            try:
                output.check(place)
            except UserError:
                refused += 1
        try:
            output.check("/dev/null")
            output.write("/dev/null", "text")
        finally:
            os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


# --- special files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def device(tmp_path):
    """A device node of our own: root, with a broken `output`, would replace the machine's."""
    if os.geteuid() != 0:
        return Path("/dev/null")  # whose folder is not ours to write
    node = tmp_path / "null"
    os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    try:
        node.write_text("")
    except OSError:
        pytest.skip("device nodes do nothing in this file system")
    return node


def test_a_device_is_written_to_and_stays_one(device):
    before = os.stat(device)
    output.check(device)
    output.write(device, "text")
    after = os.stat(device)
    assert stat.S_ISCHR(after.st_mode) and (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)


def test_a_fifo_is_written_to_and_stays_one(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    heard = []
    reader = threading.Thread(target=lambda: heard.append((tmp_path / "fifo").read_text()))
    reader.start()
    output.check(tmp_path / "fifo")
    output.write(tmp_path / "fifo", "x" * 100_000)  # more than a pipe holds
    reader.join(60)
    assert heard == ["x" * 100_000] and stat.S_ISFIFO(os.stat(tmp_path / "fifo").st_mode)


def test_a_fifo_that_nobody_reads_is_not_waited_for_without_end(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr(output, "READER_S", 0.2)
    with pytest.raises(UserError, match="fifo: cannot be written"):
        output.write(tmp_path / "fifo", "text")


# --- standard output --------------------------------------------------------------------------------------------------


def test_a_dash_is_standard_output_and_nothing_else_is_printed(capsys):
    output.deliver(Path("-"), {"a": 1}, print, "a table")
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_the_file_comes_first_and_the_table_comes_whatever_became_of_it(tmp_path, capsys):
    seen = []
    output.deliver(tmp_path / "f", {"a": 1}, lambda: seen.append((tmp_path / "f").read_text()))
    assert json.loads(seen[0]) == {"a": 1}
    with pytest.raises(UserError, match="no folder"):
        output.deliver(tmp_path / "none" / "f", {"a": 1}, print, "a table")
    assert capsys.readouterr().out == "a table\n"


DELIVER = """
import os, sys, types
from rich.console import Console
from dcp_fix import cli
from dcp_fix.base import output
ladder = sys.modules["dcp_fix.ladder.ladder"] = types.ModuleType("ladder")
def main(json_path, **options):
    print(os.environ.get("SAY", ""), end="", file=sys.stderr, flush=True)
    show = Console(width=99).print if os.environ.get("RICH") else print
    output.deliver(json_path, {"a": 1}, show, "x\\n" * 40_000 + "\\u2500\\u2603")
    return 1
ladder.main = main  # found a difference
sys.argv = ["dcp-fix", "reproduce", "--json", sys.argv[1]]
cli.main()
"""


def deliver(path, **options):
    """A command that writes `path`, prints a long table and finds a difference: (status, stderr)."""
    command = [sys.executable, "-c", DELIVER, str(path)]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=600, **options)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("rich", ["", "yes"])
def test_a_reader_that_goes_changes_no_status(tmp_path, rich):
    reader, writer = os.pipe()
    os.close(reader)
    assert deliver(tmp_path / "f", stdout=writer, env=os.environ | {"RICH": rich}) == (1, "")
    assert json.loads((tmp_path / "f").read_text()) == {"a": 1}


@pytest.mark.parametrize("rich", ["", "yes"])
def test_a_full_disk_behind_standard_output_is_said_after_the_file_is_there(tmp_path, rich):
    with open("/dev/full", "w") as full:
        status, said = deliver(tmp_path / "f", stdout=full, env=os.environ | {"RICH": rich})
    assert status == 2 and "standard output cannot be written (No space left" in said
    assert json.loads((tmp_path / "f").read_text()) == {"a": 1}


def test_a_full_disk_behind_standard_error_changes_neither_file_nor_status(tmp_path):
    """All that is lost is what would have been said."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", DELIVER, str(tmp_path / "f")]
        options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": full, "timeout": 600}
        done = subprocess.run(command, env=os.environ | {"SAY": "progress"}, **options)
        assert done.returncode == 1 and json.loads((tmp_path / "f").read_text()) == {"a": 1}
        assert len(done.stdout) > 80_000
        refused = subprocess.run([sys.executable, "-m", "dcp_fix", "reproduce", "--tp", "four"], **options)
        assert refused.returncode == 2


@pytest.mark.parametrize("closed", [[1], [2], [0, 1, 2]])
def test_closed_streams_lead_nowhere(tmp_path, closed):
    def close():
        for number in closed:
            os.close(number)

    status, _ = deliver(tmp_path / "f", stdout=subprocess.DEVNULL, preexec_fn=close)
    assert status == 1 and json.loads((tmp_path / "f").read_text()) == {"a": 1}


@pytest.mark.parametrize("settings", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C"}])
def test_what_a_terminal_cannot_encode_is_escaped(tmp_path, settings):
    with open(tmp_path / "out", "w") as out:
        status, _ = deliver(tmp_path / "f", stdout=out, env=os.environ | settings)
    assert status == 1 and json.loads((tmp_path / "f").read_text()) == {"a": 1}
    said = (tmp_path / "out").read_bytes().decode("utf-8")
    assert said.endswith("─☃\n") if "LC_ALL" in settings and "\\u" not in said else said.endswith("\\u2500\\u2603\n")
