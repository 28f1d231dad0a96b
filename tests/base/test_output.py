"""Where evidence goes: checked before the work, written before anything is printed, nothing of the user's lost."""

import json
import os
import stat
import subprocess
import sys
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


@pytest.mark.parametrize("was", [None, 0o600, 0o666])
def test_a_file_keeps_its_mode_and_a_new_one_has_that_of_any(tmp_path, was):
    if was:
        (tmp_path / "f").write_text("old")
        (tmp_path / "f").chmod(was)
    output.check(tmp_path / "f")
    assert (tmp_path / "f").exists() is bool(was)  # checking changes nothing
    output.write(tmp_path / "f", "new")
    assert (tmp_path / "f").read_text() == "new" and mode(tmp_path / "f") == (was or 0o644)
    assert listing(tmp_path) == ["f"]


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
    for name in ("f.part", ".f.tmp", ".dcp_fix-"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "g.part").symlink_to("elsewhere")
    for name in ("f", "g"):
        output.write(tmp_path / name, "new")
    assert all((tmp_path / name).read_text() == "mine" for name in (".f.tmp", "f.part", ".dcp_fix-"))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("broken", ["write", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, broken):
    (tmp_path / "f").write_text("old")

    def full(*values, **options):
        raise OSError(28, "No space left on device")

    if broken == "write":
        monkeypatch.setattr(output, "open", full, raising=False)
    else:
        monkeypatch.setattr(os, broken, full)
    with pytest.raises(UserError, match=r"f: cannot be written \(No space left"):
        output.write(tmp_path / "f", "new")
    monkeypatch.undo()
    assert (tmp_path / "f").read_text() == "old" and listing(tmp_path) == ["f"]


def test_what_cannot_hold_evidence_is_refused_at_the_door(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    places = {
        tmp_path / "folder": "is a folder", tmp_path / "loop": "links", tmp_path / "file" / "f": "cannot be written",
        tmp_path / "none" / "f": "is no folder; make it first", "/proc/f": "cannot be written", "a\0b": "null",
        tmp_path / ("x" * 256): "File name too long", tmp_path / "\x1b[31m" / "f": r"x1b\[31m.*no folder",
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
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_a_device_is_written_to_and_stays_one(tmp_path):
    """A node of our own: root, with a broken `output`, would replace the machine's."""
    device = Path("/dev/null")  # whose folder is not ours to write, unless
    if os.geteuid() == 0:
        device = tmp_path / "null"
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        try:
            device.write_text("")
        except OSError:
            pytest.skip("device nodes do nothing in this file system")
    before = os.stat(device)
    output.check(device)
    output.write(device, "text")
    assert (os.stat(device).st_ino, os.stat(device).st_mode) == (before.st_ino, before.st_mode)


# --- standard output --------------------------------------------------------------------------------------------------


def test_a_dash_is_standard_output_and_nothing_else_is_printed(capsys):
    output.deliver(Path("-"), {"a": 1}, print, "a table")
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_the_file_comes_first_and_the_table_comes_whatever_became_of_it(tmp_path, capsys):
    seen = []
    output.deliver(tmp_path / "f", {"a": 1}, lambda: seen.append((tmp_path / "f").read_text()))
    assert json.loads(seen[0]) == {"a": 1}
    with pytest.raises(UserError, match="No such file"):
        output.deliver(tmp_path / "none" / "f", {"a": 1}, print, "a table")
    assert capsys.readouterr().out == "a table\n"


DELIVER = """
import os, sys
from rich.console import Console
from dcp_fix.base import output, process
from dcp_fix.base.errors import UserError
process.ready_streams()
show = Console(width=99).print if os.environ.get("RICH") else print
print(os.environ.get("SAY", ""), end="", file=sys.stderr, flush=True)
status = 1  # found a difference
try:
    output.deliver(sys.argv[1], {"a": 1}, show, "x\\n" * 40_000 + "\\u2500\\u2603")
except UserError as error:
    print(error, file=sys.stderr)
    status = 2
sys.exit(process.flushed(status))
"""


def deliver(path, **options):
    """A command that writes `path`, prints a long table and finds a difference: (status, stderr)."""
    command = [sys.executable, "-c", DELIVER, str(path)]
    done = subprocess.run(command, cwd=ROOT, **{"stderr": subprocess.PIPE} | options, text=True, timeout=600)
    assert json.loads(Path(path).read_text()) == {"a": 1}
    assert "Traceback" not in (done.stderr or "")
    return done.returncode, done.stderr


@pytest.mark.parametrize("rich", ["", "yes"])
def test_a_reader_that_goes_changes_no_status(tmp_path, rich):
    reader, writer = os.pipe()
    os.close(reader)
    assert deliver(tmp_path / "f", stdout=writer, env=os.environ | {"RICH": rich}) == (1, "")
    os.close(writer)


@pytest.mark.parametrize("rich", ["", "yes"])
def test_a_full_disk_behind_standard_output_is_said_after_the_file_is_there(tmp_path, rich):
    with open("/dev/full", "w") as full:
        status, said = deliver(tmp_path / "f", stdout=full, env=os.environ | {"RICH": rich})
    assert status == 2 and "standard output cannot be written (No space left" in said


def test_a_full_disk_behind_standard_error_changes_neither_file_nor_status(tmp_path):
    """All that is lost is what would have been said."""
    with open("/dev/full", "w") as full:
        options = {"stdout": subprocess.DEVNULL, "stderr": full, "env": os.environ | {"SAY": "progress"}}
        assert deliver(tmp_path / "f", **options) == (1, None)


@pytest.mark.parametrize("closed", [1, 2])
def test_closed_streams_lead_nowhere(tmp_path, closed):
    status, _ = deliver(tmp_path / "f", stdout=subprocess.DEVNULL, preexec_fn=lambda: os.close(closed))
    assert status == 1


def test_what_a_terminal_cannot_encode_is_escaped(tmp_path):
    with open(tmp_path / "out", "w") as out:
        status, _ = deliver(tmp_path / "f", stdout=out, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert status == 1 and (tmp_path / "out").read_text().endswith("\\u2500\\u2603\n")
