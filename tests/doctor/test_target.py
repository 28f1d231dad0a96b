"""What the doctor accepts as a target, and what it says of damaged, foreign and hostile ones. Nothing is executed."""

import json
import os
import random
import stat
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_fix.base.errors import UserError
from dcp_fix.doctor import opening, release, report, runner, wheel
from dcp_fix.doctor.opening import opened
from dcp_fix.doctor.probes import PROBES
from dcp_fix.doctor.target import TargetError, version_of
from tests import doctor_targets
from tests.doctor_targets import METADATA


@pytest.fixture(autouse=True)
def no_child(monkeypatch):
    """Any attempt to run a probe fails the test."""
    monkeypatch.setattr(runner, "run_child", lambda *a: pytest.fail("a probe was run"))


def refusal(spec):
    with pytest.raises(TargetError) as refused, opened(str(spec)):
        pass
    assert str(spec)[:150] in str(refused.value) and len(str(refused.value)) < 600
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


def test_the_version_is_that_of_the_code_that_is_imported(tmp_path, monkeypatch):
    doctor_targets.folder(tmp_path / "site")  # the installed one, 9.9.9
    checkout = doctor_targets.folder(tmp_path / "checkout", files={"vllm/_version.py": "version = '0.28.0'\n"})
    (checkout / "vllm-9.9.9.dist-info/METADATA").unlink()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.syspath_prepend(checkout)
    found = opening.installed()
    assert (found.version, found.root) == ("0.28.0", checkout) and str(checkout) in found.name


def test_a_folder_that_is_no_package_does_not_pass_for_the_installed_vllm(tmp_path, monkeypatch):
    (tmp_path / "vllm" / "notes").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TargetError, match="has no __init__.py and is no vLLM, and hides any other") as refused:
        opening.installed()
    assert str(tmp_path / "vllm") in str(refused.value)


@pytest.mark.parametrize(
    ("own", "beside", "version", "says"),
    [
        ("0.28.0", [], "0.28.0", None),
        ("0.28.0+cu129", ["0.28.0"], "0.28.0+cu129", None),
        ("0.28.0", ["0.30.0"], "0.28.0", "its own files say 0.28.0, and beside them lies dist-info of 0.30.0"),
        (None, ["0.30.0"], "0.30.0", None),
        (None, ["0.29.0", "0.30.0"], None, "cannot be told: beside it lie dist-info of 0.29.0 and 0.30.0"),
        (None, [], None, None),
        (None, ["\x1b]0;x\x07\x1b[2J"], "\\x1b]0;x\\x07\\x1b[2J", None),
    ],
)
def test_where_the_files_disagree_it_is_said(tmp_path, own, beside, version, says):
    (tmp_path / "vllm").mkdir()
    if own:
        (tmp_path / "vllm/_version.py").write_text(f"__version__ = version = '{own}'\n")
    for number, other in enumerate(beside):
        (tmp_path / f"vllm-{number}.dist-info").mkdir()
        (tmp_path / f"vllm-{number}.dist-info/METADATA").write_text(f"Name: vllm\nVersion: {other}\n")
    found, note = version_of(tmp_path)
    assert found == version and (note is None) == (says is None) and (says or "") in (note or "")


def test_only_regular_files_are_read_for_a_version(tmp_path):
    doctor_targets.folder(tmp_path)
    os.mkfifo(tmp_path / "vllm/_version.py")
    assert version_of(tmp_path) == ("9.9.9", None)
    (tmp_path / "vllm-9.9.9.dist-info/METADATA").unlink()
    os.mkfifo(tmp_path / "vllm-9.9.9.dist-info/METADATA")
    assert version_of(tmp_path) == (None, None)


def test_truncated_and_damaged_wheels(tmp_path):
    path = doctor_targets.wheel(tmp_path / "v.whl")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "damaged or truncated wheel (no zip archive); delete it and fetch it again" in refusal(path)
    at = whole.index(b"kernels.py") + 40  # inside the compressed kernel
    path.write_bytes(whole[:at] + bytes(b ^ 0xFF for b in whole[at : at + 60]) + whole[at + 60 :])
    assert "damaged or truncated" in refusal(path)
    path.write_bytes(b"")
    assert "damaged or truncated" in refusal(path)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), flips=st.integers(1, 4))
def test_flipped_bytes_make_a_damaged_wheel_and_nothing_worse(tmp_path, seed, flips):
    path, generator = tmp_path / "flipped.whl", random.Random(seed)
    content = bytearray(doctor_targets.wheel(path).read_bytes())
    for _ in range(flips):
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    path.write_bytes(content)
    try:
        with opened(str(path)) as found:
            assert found.version
    except TargetError as refused:
        assert str(path) in str(refused) and len(str(refused).splitlines()) == 1


def resized(path, member, declared):
    """The wheel with another size declared for a member, in the directory and in front of it."""
    content, name = bytearray(path.read_bytes()), member.encode()
    for mark, at, header in ((b"PK\x03\x04", 22, 30), (b"PK\x01\x02", 24, 46)):
        place = content.index(mark)
        while content[place + header : place + header + len(name)] != name:
            place = content.index(mark, place + 1)
        content[place + at : place + at + 4] = struct.pack("<I", declared)
    path.write_bytes(content)
    return path


BIG = "x" * (96 << 20)


def peak_of(path):
    """MiB that reading the wheel takes above what the interpreter takes, and what was said.

    By VmHWM, which a process begins anew: the maximum of getrusage is that of its parent as well.
    """
    code = (
        "import re, sys\nfrom dcp_fix.base.errors import UserError\nfrom dcp_fix.doctor.opening import opened\n"
        "kib = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\nbefore = kib()\n"
        "try:\n    with opened(sys.argv[1]) as found: said = found.version\n"
        "except UserError as error: said = error\nprint((kib() - before) >> 10, said)"
    )
    grown, said = subprocess.check_output([sys.executable, "-c", code, path], text=True).split(" ", 1)
    return int(grown), said


def test_what_a_wheel_unpacks_to_is_bounded_whatever_it_declares(tmp_path):
    metadata = {"vllm-9.9.9.dist-info/METADATA": METADATA + BIG}
    grown, said = peak_of(doctor_targets.wheel(tmp_path / "metadata.whl", files=metadata))
    assert said.strip() == "9.9.9" and grown < 60
    liar = doctor_targets.wheel(tmp_path / "liar.whl", members=[("vllm/utils/big.py", BIG)])
    grown, said = peak_of(resized(liar, "vllm/utils/big.py", 100))
    assert "damaged or truncated" in said and grown < 60
    grown, said = peak_of(doctor_targets.wheel(tmp_path / "honest.whl", members=[("vllm/utils/big.py", BIG)]))
    assert "bytes to unpack" in said and grown < 60
    lzma = zipfile.ZipInfo("vllm/utils/big.py")
    lzma.compress_type = zipfile.ZIP_LZMA
    grown, said = peak_of(doctor_targets.wheel(tmp_path / "lzma.whl", members=[(lzma, "x" * 1000)]))
    assert "compressed as no wheel is" in said and grown < 60


def test_a_large_extension_is_no_reason_to_refuse(tmp_path, monkeypatch):
    extension = (wheel.COMPILED, "x" * 3000)
    path = doctor_targets.wheel(tmp_path / "v.whl", members=[extension])
    monkeypatch.setattr(wheel, "UNPACKED_LIMIT", 2900)
    monkeypatch.setattr(wheel, "GPU_DEVICES", ("/nowhere",))
    with opened(str(path)) as found:
        assert not (found.root / wheel.COMPILED).exists()
    monkeypatch.setattr(wheel, "GPU_DEVICES", ("/dev/null",))
    with opened(str(path)) as found:
        assert (found.root / wheel.COMPILED).stat().st_size == 3000


def test_a_full_or_missing_temporary_folder_is_not_the_wheel_s_fault(tmp_path, monkeypatch):
    path = doctor_targets.wheel(tmp_path / "v.whl")
    monkeypatch.setattr(Path, "write_bytes", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert "cannot be unpacked into" in (said := refusal(path)) and "No space left" in said and "TMPDIR" in said
    monkeypatch.undo()
    monkeypatch.setattr(
        opening.tempfile, "TemporaryDirectory", lambda **k: (_ for _ in ()).throw(OSError(30, "Read-only"))
    )
    assert "no temporary folder" in refusal(path)


def test_what_is_not_vllm(tmp_path):
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
        archive.writestr("other-1.0.dist-info/METADATA", "Name: other\nVersion: 1.0\n")
    assert "not a vLLM wheel: it is other-1.0" in refusal(tmp_path / "other.whl")
    with tarfile.open(tmp_path / "vllm-9.9.9.tar.gz", "w:gz") as archive:
        archive.add(__file__, "vllm-9.9.9/setup.py")
    assert "an sdist" in refusal(tmp_path / "vllm-9.9.9.tar.gz")
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
    monkeypatch.setattr(wheel, "UNPACKED_LIMIT", 1000)
    assert "bytes to unpack" in refusal(doctor_targets.wheel(tmp_path / "w.whl"))


@pytest.mark.parametrize("spec", ["x" * 5000, "/x" * 2500, "a\0b", "caf\udce9.whl", "/dev/null", "x[/y]"], ids=range(6))
def test_a_path_that_is_none_is_one_line(spec, capsys):
    assert report.main([spec]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and error[0].startswith("error: ") and len(error[0]) < 400


@pytest.mark.parametrize("name", ["x[/y]", "a[red]b", "c\x1b[2Jd"])
def test_names_are_shown_as_they_are(tmp_path, name, capsys, monkeypatch):
    monkeypatch.setattr(report, "probe_target", lambda target, **k: [runner.finding(PROBES[0], "ok", "[/x] \\ fine")])
    monkeypatch.setenv("COLUMNS", "300")
    assert report.main([str(doctor_targets.folder(tmp_path / name))]) == 0
    shown = capsys.readouterr().out
    assert name.replace("\x1b", "\\x1b") in shown and "[/x] \\ fine" in shown and "\x1b[2J" not in shown


def test_json_to_where_nothing_can_be_written_is_said_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "examine", lambda *a, **k: pytest.fail("the work was begun"))
    with pytest.raises(UserError, match="is a folder"):
        report.main([], json=str(tmp_path))


def test_an_unreadable_target_has_a_row_per_probe_and_status_2(tmp_path, capsys):
    assert report.main([str(tmp_path / "absent")], json="-") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    (entry,) = json.loads(captured.out)
    assert entry["version"] is None
    assert [p["verdict"] for p in entry["probes"]] == ["not-run"] * len(PROBES)
    assert report.main([]) == 2  # no vLLM in this environment
    assert "no vLLM in this environment" in capsys.readouterr().err


# --- releases ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """A stand-in for pip that `leaves` these files in --dest, or fails; and an empty cache folder."""

    class Pip:
        leaves, said, calls = ["vllm-0.29.0-cp38-abi3-manylinux_2_28_x86_64.whl"], "", []

    def run(*words, folder):
        Pip.calls.append(words)
        for name in Pip.leaves or ():
            doctor_targets.wheel(f"{folder}/{name}", files={"vllm-0.29.0.dist-info/METADATA": METADATA})
        return int(Pip.leaves is None), "", release.reason(Pip.said)

    monkeypatch.setattr(release, "pip", run)
    monkeypatch.setenv("DCP_FIX_CACHE", str(tmp_path / "cache"))
    return Pip


def test_a_release_is_downloaded_once(pip):
    path = release.fetch_release("0.29.0")
    assert path == release.fetch_release("0.29.0")
    assert [c[-1] for c in pip.calls] == ["vllm==0.29.0"]
    assert "--no-deps" in pip.calls[0]
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    tags = {c.removeprefix("--platform=manylinux_") for c in pip.calls[0] if "manylinux_" in c}
    assert {"2_28_x86_64", "2_31_x86_64", "2_34_x86_64", "2_35_x86_64", "2_39_x86_64"} == tags


@pytest.mark.parametrize(
    ("said", "means"),
    [
        (
            "WARNING: Retrying after NewConnectionError: Failed to establish\nERROR: No matching",
            "index cannot be reached",
        ),
        ("ERROR: Could not install: [Errno 28] No space left on device", "no space for the wheel"),
        ("\x1b[31mERROR: No matching distribution\x1b[0m", "0.29.0: pip could not: \\x1b[31mERROR: No matching"),
        ("ERROR: No matching\n\n[notice] A new release of pip: 1 -> 2\n[notice] To update", "pip could not: ERROR: No"),
        ("ERROR: No matching\nWARNING: You are using pip version 20.0", "pip could not: ERROR: No matching"),
        ("WARNING: 401 Error, Credentials not correct\nERROR: No matching", "index asks for a password"),
        ("ERROR: HTTP error 500 while getting x\nERROR: 500 Server Error: x", "index fails (its error is 5xx)"),
        ("", "pip could not: it gave no reason"),
    ],
)
def test_a_download_that_fails_is_named_for_what_failed_and_leaves_nothing(pip, said, means, tmp_path):
    pip.leaves, pip.said = None, said
    with pytest.raises(TargetError) as refused:
        release.fetch_release("0.29.0")
    assert means in str(refused.value) and "\x1b" not in str(refused.value)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("version", ["0.29", "0.29.0", "0.29.0.0", "0.29.0+cu129", "v0.29.0"])
def test_a_release_is_the_same_however_it_is_written(pip, version):
    assert release.fetch_release(version).name == pip.leaves[0] and pip.calls[0][-1] == "vllm==0.29.0"
    assert release.normal("0.30.1rc2.post1") == "0.30.1rc2.post1" and release.normal("0.27.0.post1") == "0.27.0.post1"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    for name in ("DCP_FIX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory."))
    )
    with pytest.raises(TargetError, match="set DCP_FIX_CACHE"):
        release.fetch_release("0.29.0")
    monkeypatch.setenv("DCP_FIX_CACHE", "/dev/null/x")
    with pytest.raises(TargetError, match="set DCP_FIX_CACHE"):
        release.fetch_release("0.29.0")


FAKE_PIP = """
import os, subprocess, sys, time
if sys.argv[-1] == "asks":
    sys.exit(f"ERROR: heard {sys.stdin.read()!r}, {os.environ['TMPDIR']}")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(999)"])
open(os.environ["PIDS"], "w").write(f"{os.getpid()} {child.pid}")
time.sleep(999)
"""


@pytest.fixture
def fake_pip(tmp_path, monkeypatch):
    """A module of pip's name that asks, or hangs with a child of its own; the file that then names both."""
    (tmp_path / "pip.py").write_text(FAKE_PIP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    return tmp_path / "pids"


@pytest.fixture
def typed():
    """Standard input holds a line, as where somebody sits at a terminal."""
    (reader, writer), saved = os.pipe(), os.dup(0)
    os.write(writer, b"typed")
    os.close(writer)
    os.dup2(reader, 0)
    yield
    os.dup2(saved, 0)


def test_pip_asks_nothing_and_works_in_our_folder(fake_pip, typed, tmp_path):
    status, _, why = release.pip("asks", folder=str(tmp_path))
    assert status == 1 and f"heard '', {tmp_path}" in why


def test_pip_has_one_deadline_and_leaves_nobody(fake_pip, monkeypatch, tmp_path):
    monkeypatch.setattr(release, "DEADLINE_S", 5.0)
    monkeypatch.setenv("DCP_FIX_CACHE", str(tmp_path / "cache"))
    with pytest.raises(TargetError, match="did not end within 5 s"):
        release.fetch_release("0.29.0")
    for pid in fake_pip.read_text().split():
        while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] not in "ZX":
            time.sleep(0.01)  # killed, and on its way
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_empty_release_is_not_the_installed_vllm(capsys):
    assert report.main([], releases=[""]) == 2
    assert "--release '': not a version like 0.29.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "version", ["0.29.0 --index-url x", "../0.29.0", "latest", "", "0.29.0; rm", "[/x].0", "1." * 999 + "0"]
)
def test_a_version_is_a_version(pip, version):
    with pytest.raises(TargetError, match="not a version"):
        release.fetch_release(version)
    assert pip.calls == []


def test_the_caller_needs_no_torch():
    code = "import sys, dcp_fix.doctor.report, dcp_fix.plugin.plugin; print({'torch', 'triton'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
