"""What the doctor accepts as a target, and what it says of damaged, foreign and hostile ones. Nothing is executed."""

import stat
import subprocess
import sys
import zipfile

import pytest

from dcp_fix.vllm.doctor import report, runner, target
from dcp_fix.vllm.doctor.target import TargetError, opened
from tests import doctor_targets
from tests.doctor_targets import METADATA


@pytest.fixture(autouse=True)
def no_child(monkeypatch):
    """Any attempt to run a probe fails the test."""
    monkeypatch.setattr(runner, "run_child", lambda *a: pytest.fail("a probe was run"))


def refusal(spec):
    with pytest.raises(TargetError) as refused, opened(str(spec)):
        pass
    assert str(spec) in str(refused.value)
    return str(refused.value)


def test_a_wheel_is_unpacked_as_far_as_needed_and_its_folder_goes_away(tmp_path):
    path = doctor_targets.wheel(tmp_path / "v.whl", members=[("vllm/entrypoints/big.py", "x = 1")])
    with opened(str(path)) as found:
        root = found.root
        assert found.version == "9.9.9"
        assert (root / doctor_targets.KERNELS).is_file()
        assert not (root / "vllm/entrypoints").exists()
    assert not root.exists()


def test_folders_checkouts_and_the_package_itself(tmp_path):
    doctor_targets.folder(tmp_path / "site")
    doctor_targets.folder(tmp_path / "checkout", files={"vllm/_version.py": "__version__ = version = '1.2.3.dev4'\n"})
    (tmp_path / "checkout/vllm-9.9.9.dist-info/METADATA").unlink()
    for spec, version in (("site", "9.9.9"), ("site/vllm", "9.9.9"), ("checkout", "1.2.3.dev4")):
        with opened(str(tmp_path / spec)) as found:
            assert found.version == version
            assert (found.root / "vllm/__init__.py").is_file()


def test_the_installed_vllm_is_found_without_importing_it(tmp_path, monkeypatch):
    doctor_targets.folder(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert target.installed() == target.Target("installed", tmp_path, "9.9.9")


def test_truncated_and_damaged_wheels(tmp_path):
    path = doctor_targets.wheel(tmp_path / "v.whl")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "damaged or truncated" in refusal(path)
    at = whole.index(b"kernels.py") + 40  # inside the compressed kernel
    path.write_bytes(whole[:at] + bytes(b ^ 0xFF for b in whole[at : at + 60]) + whole[at + 60 :])
    assert "damaged or truncated" in refusal(path)
    path.write_bytes(b"")
    assert "damaged or truncated" in refusal(path)


def test_what_is_not_vllm(tmp_path):
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
        archive.writestr("other-1.0.dist-info/METADATA", "Name: other\nVersion: 1.0\n")
    assert "not a vLLM wheel" in refusal(tmp_path / "other.whl")
    assert "names no version" in refusal(
        doctor_targets.wheel(tmp_path / "v.whl", files={"vllm-1.dist-info/METADATA": "Name: vllm\n"})
    )
    (tmp_path / "empty").mkdir()
    assert "no vllm/__init__.py" in refusal(tmp_path / "empty")
    assert "no such file or folder" in refusal(tmp_path / "absent.whl")


def symlink(name):
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


@pytest.mark.parametrize(
    "member",
    ["../outside.py", "vllm/utils/../../../outside.py", "/tmp/outside.py", "vllm\\..\\outside.py", "C:outside.py"],
)
def test_names_that_leave_the_folder_are_refused_before_anything_is_written(tmp_path, member):
    path = doctor_targets.wheel(tmp_path / "v.whl", members=[(member, "x = 1")])
    assert "refused, member" in refusal(path)
    assert [p.name for p in tmp_path.iterdir()] == ["v.whl"]


def test_links_and_bombs_are_refused(tmp_path, monkeypatch):
    path = doctor_targets.wheel(tmp_path / "v.whl", members=[(symlink("vllm/utils/link.py"), "/etc/passwd")])
    assert "refused, member" in refusal(path)
    monkeypatch.setattr(target, "UNPACKED_LIMIT", 1000)
    assert "bytes to unpack" in refusal(doctor_targets.wheel(tmp_path / "w.whl"))


def test_an_unreadable_target_has_eight_rows_and_status_2(tmp_path, capsys):
    assert report.main([str(tmp_path / "absent")], json="-") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    (entry,) = report.jsonlib.loads(captured.out)
    assert entry["version"] is None
    assert [p["verdict"] for p in entry["probes"]] == ["not-run"] * 8
    assert report.main([]) == 2  # no vLLM in this environment
    assert "no vLLM in this environment" in capsys.readouterr().err


# --- releases ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """A stand-in for pip that `leaves` these files in --dest, or fails; and an empty cache folder."""
    calls = []

    def run(command, **options):
        calls.append(command)
        if run.leaves is None:
            return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: No matching distribution\n")
        destination = command[command.index("--dest") + 1]
        for name in run.leaves:
            doctor_targets.wheel(f"{destination}/{name}", files={"vllm-0.29.0.dist-info/METADATA": METADATA})
        return subprocess.CompletedProcess(command, 0, "", "")

    run.leaves, run.calls = ["vllm-0.29.0-cp38-abi3-manylinux_2_28_x86_64.whl"], calls
    monkeypatch.setattr(target.subprocess, "run", run)
    monkeypatch.setenv("DCP_FIX_CACHE", str(tmp_path / "cache"))
    return run


def test_a_release_is_downloaded_once(pip):
    path = target.fetch_release("0.29.0")
    assert path == target.fetch_release("0.29.0")
    assert [c[-1] for c in pip.calls] == ["vllm==0.29.0"]
    assert "--no-deps" in pip.calls[0]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_refused_download_says_why_and_leaves_nothing(pip, tmp_path):
    pip.leaves = None
    with pytest.raises(TargetError, match=r"vllm==0.29.0: ERROR: No matching distribution"):
        target.fetch_release("0.29.0")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("version", ["0.29.0 --index-url x", "../0.29.0", "latest", "", "0.29.0; rm"])
def test_a_version_is_a_version(pip, version):
    with pytest.raises(TargetError, match="not a version"):
        target.fetch_release(version)
    assert pip.calls == []


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("DCP_FIX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert target.cache_folder() == tmp_path / "dcp_fix"


def test_the_caller_needs_no_torch():
    code = "import sys, dcp_fix.vllm.doctor.report, dcp_fix.vllm.plugin; print({'torch', 'triton'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
