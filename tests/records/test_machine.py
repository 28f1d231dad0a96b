"""What a record says about the machine, also where there is no GPU, no git and no driver."""

import subprocess
import sys

import torch

from dcp_fix.records import machine


def test_hardware_names_this_machine():
    found = machine.hardware()
    assert found["cpu"] and found["cores"] >= 1
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert (found["driver"] is None) == (found["gpus"] == [])


def test_versions_are_those_in_use():
    found = machine.versions()
    assert found["torch"] == torch.__version__ and found["cuda"] == torch.version.cuda
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))


def test_a_command_that_is_absent_or_fails_gives_nothing():
    assert machine.output_of(["no-such-command-here"]) is None
    assert machine.output_of([sys.executable, "-c", "print(1); raise SystemExit(3)"]) is None
    assert machine.output_of([sys.executable, "-c", "print(1)"]) == "1\n"


def git(folder, *arguments):
    """Run git in `folder` with an identity of its own."""
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_a_changed_tracked_file_makes_the_tree_dirty(monkeypatch, tmp_path):
    monkeypatch.delenv("DCP_FIX_COMMIT", raising=False)
    source = tmp_path / "dcp_fix" / "records" / "machine.py"
    source.parent.mkdir(parents=True)
    source.write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    monkeypatch.setattr(machine, "__file__", str(source))
    sha, dirty = machine.commit()
    assert len(sha) == 40 and dirty is False
    (tmp_path / "record.json").write_text("{}")
    assert machine.commit() == (sha, False), "an untracked record does not make the code dirty"
    source.write_text("changed")
    assert machine.commit() == (sha, True)


def test_a_tree_whose_changes_git_cannot_list_is_not_called_clean(monkeypatch):
    monkeypatch.delenv("DCP_FIX_COMMIT", raising=False)
    monkeypatch.setattr(machine, "output_of", lambda command: None if "status" in command else "ab" * 20 + "\n")
    assert machine.commit() == ("ab" * 20, None)


def test_the_commit_can_be_told(monkeypatch):
    monkeypatch.setenv("DCP_FIX_COMMIT", "ab" * 20 + "-dirty")
    assert machine.commit() == ("ab" * 20, True)
    monkeypatch.setenv("DCP_FIX_COMMIT", "ab" * 20)
    assert machine.commit() == ("ab" * 20, False)


def test_a_tree_without_git_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.delenv("DCP_FIX_COMMIT", raising=False)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "dcp_fix" / "records" / "machine.py"))
    assert machine.commit() == (None, None)


def test_the_command_is_quoted_and_names_no_folder(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/opt/venv/bin/dcp-fix", "reproduce", "--json", "my runs.json"])
    assert machine.command_line() == "dcp-fix reproduce --json 'my runs.json'"
    monkeypatch.setattr(sys, "argv", ["dcp-fix", "verify", "--record", "/tmp/x/my run.json", "--dcp", "1,2"])
    assert machine.command_line() == "dcp-fix verify --record 'my run.json' --dcp 1,2"
    monkeypatch.setattr(sys, "argv", ["/opt/dcp_fix/__main__.py", "--version"])
    assert machine.command_line() == "python -m dcp_fix --version"
    monkeypatch.setattr(sys, "argv", ["/opt/venv/site-packages/pytest/__main__.py", "tests/gpu"])
    assert machine.command_line() == "python -m pytest tests/gpu"
    monkeypatch.setattr(sys, "argv", ["dcp-fix", "verify", "--record=/elsewhere/r.json", "--classes=512"])
    assert machine.command_line() == "dcp-fix verify --record=r.json --classes=512"
