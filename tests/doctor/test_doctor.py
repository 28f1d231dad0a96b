"""The doctor on tiny look-alikes of vLLM: verdicts, exit statuses, targets that raise, hang, crash, print or lie."""

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

from dcp_fix.doctor import report, runner
from dcp_fix.doctor.opening import folder
from dcp_fix.doctor.probes import PROBES
from dcp_fix.doctor.reach import reach
from tests import doctor_targets
from tests.doctor_targets import SOUND
from tests.tools.heeding import heed_signals

KERNEL_PROBES = ("query-rows", "k-rows", "owner-only-writes")
CASE = "    if -1 in slots and q_c_out is not None:\n        "  # reached in a case, never in a control


@pytest.fixture(autouse=True)
def only_the_kernel_probes(monkeypatch):
    """The look-alikes have a kernel and nothing else."""
    monkeypatch.setattr(runner, "PROBES", tuple(p for p in PROBES if p.code == "kernel"))


def examine(path, time_limit=60.0):
    """{probe id: finding}"""
    return {found.id: found for found in runner.probe_target(folder(path), time_limit=time_limit)}


def verdicts(findings):
    return {name: findings[name].verdict for name in KERNEL_PROBES}


def broken(line, by):
    """SOUND with `line` replaced."""
    assert SOUND.count(line) == 1
    return SOUND.replace(line, by)


def before(code):
    return broken("    # BEFORE\n", code)


def test_a_sound_kernel_is_ok_and_its_package_is_never_imported(tmp_path):
    findings = examine(doctor_targets.folder(tmp_path))
    assert set(verdicts(findings).values()) == {"ok"}
    assert all(findings[name].remedy == "" and findings[name].reference for name in KERNEL_PROBES)
    assert "vllm" not in sys.modules


@pytest.mark.parametrize(
    ("probe", "line"),
    [
        ("query-rows", "q_c_out.copy_(norm(q_c, q_rms_norm_w, q_rms_eps))"),
        ("k-rows", "kv_c_out.copy_(norm(kv_c, kv_rms_norm_w, kv_rms_eps))"),
        ("owner-only-writes", "if slot >= 0:"),
    ],
)
def test_each_defect_is_named_for_what_it_is(tmp_path, probe, line):
    by = "if True:"
    if probe != "owner-only-writes":  # the rows of owned slots only
        out, norm = line.removesuffix(")").split(".copy_(")
        by = f"mine = torch.tensor(slots) >= 0; {out}[mine] = {norm}[mine]"
    findings = examine(doctor_targets.folder(tmp_path, broken(line, by)))
    assert {name for name, verdict in verdicts(findings).items() if verdict == "defect"} == {probe}
    assert findings[probe].remedy
    wanted = "outside the owned slots" if probe == "owner-only-writes" else "tokens 1, 3 never written"
    assert wanted in findings[probe].evidence


@pytest.mark.parametrize(
    ("line", "by", "says"),
    [
        (
            "topk_indices_buffer[: len(slots)] = -1",
            "topk_indices_buffer[:] = -1",
            "entries outside the batch overwritten",
        ),
        ("topk_indices_buffer[: len(slots)] = -1", "topk_indices_buffer[: len(slots) - 1] = -1", "top-k rows [3] not"),
        (
            "    if has_indexer:\n        topk",
            "    if True:\n        topk",
            "top-k entries of a shared layer overwritten",
        ),
        ("if slot >= 0:", "if slot > 0:", "cache not written at owned slots [0]"),
        ("if slot >= 0:", "if slot >= 0 and slot != 70:", "cache not written at owned slots [70]"),
    ],
)
def test_a_guard_that_is_off_by_one_is_named(tmp_path, monkeypatch, line, by, says):
    monkeypatch.setattr(runner, "PROBES", tuple(p for p in PROBES if p.id == "owner-only-writes"))
    found = examine(doctor_targets.folder(tmp_path, broken(line, by)))["owner-only-writes"]
    if "70" not in by:
        assert found.verdict == "defect" and says in found.evidence, found.evidence
    else:  # in the control as well: another formula is not judged
        assert found.verdict == "not-run" and says in found.evidence, found.evidence


def test_a_kernel_that_raises_on_import_is_not_run_and_the_status_says_so(tmp_path, capsys):
    path = doctor_targets.folder(tmp_path, "raise ValueError('no\\nkernel')")
    assert report.main([str(path)], json="-") == 2
    probes = {probe["id"]: probe for probe in json.loads(capsys.readouterr().out)[0]["probes"]}
    assert {probes[name]["verdict"] for name in KERNEL_PROBES} == {"not-run"}
    assert "ValueError: no kernel" in probes["query-rows"]["evidence"]


def test_a_kernel_that_hangs_on_import_runs_into_the_time_limit_once(tmp_path):
    findings = examine(doctor_targets.folder(tmp_path, "import time; time.sleep(999)"), time_limit=5)
    assert set(verdicts(findings).values()) == {"not-run"}
    assert "time limit" in findings["k-rows"].evidence


def test_what_it_prints_goes_nowhere(tmp_path, capfd):
    noise = "import sys, os\nprint('LOUD' * 10**6); sys.stderr.write('LOUD' * 10**6); os.write(1, b'LOUD')\n"
    path = doctor_targets.folder(tmp_path, noise + SOUND)
    assert report.main([str(path)], json="-") == 0
    out, err = capfd.readouterr()
    assert "LOUD" not in out + err
    assert json.loads(out)[0]["version"] == "9.9.9"


@pytest.mark.parametrize(
    ("code", "evidence"),
    [
        (CASE + "import ctypes; ctypes.string_at(0)\n", "SIGSEGV"),
        (CASE + "import os; os._exit(0)\n", "ended with status 0"),
    ],
)
def test_a_case_that_takes_the_process_down_is_the_defect_and_the_next_probe_still_runs(
    tmp_path, code, evidence, monkeypatch
):
    monkeypatch.setattr(runner, "PROBES", tuple(p for p in PROBES if p.id in ("query-rows", "k-rows")))
    code = code.replace("-1 in slots", "-1 in slots and kv_c_out is None")  # k-rows always asks for dense rows
    findings = examine(doctor_targets.folder(tmp_path, before(code)))
    assert findings["query-rows"].verdict == "defect" and evidence in findings["query-rows"].evidence
    assert findings["k-rows"].verdict == "ok"


def test_a_case_that_raises_is_the_defect_and_an_exception_in_a_control_is_not(tmp_path):
    case = examine(doctor_targets.folder(tmp_path / "case", before(CASE + "raise KeyError('slot')\n")))
    assert set(verdicts(case).values()) == {"defect"}
    assert "raises KeyError: 'slot'" in case["query-rows"].evidence
    control = examine(doctor_targets.folder(tmp_path / "control", before("    raise KeyError('slot')\n")))
    assert set(verdicts(control).values()) == {"not-run"}
    assert "control" in control["query-rows"].evidence


def test_another_formula_is_not_judged(tmp_path):
    findings = examine(doctor_targets.folder(tmp_path, broken("x.square().mean", "x.abs().mean")))
    assert verdicts(findings)["query-rows"] == "not-run"
    assert "query row of tokens 0, 1, 2, 3 wrong" in findings["query-rows"].evidence


def test_an_unknown_signature_says_what_changed(tmp_path):
    kernels = broken("k_pe_out=None,\n):", "k_pe_out=None, dcp_plan=None,\n):").replace("mla_k_scale=None, ", "")
    findings = examine(doctor_targets.folder(tmp_path, kernels))
    assert set(verdicts(findings).values()) == {"not-run"}
    assert "unknown signature" in findings["k-rows"].evidence
    assert "new ['dcp_plan'], gone ['mla_k_scale']" in findings["k-rows"].evidence


def test_a_collaborator_without_a_stand_in_is_named_even_if_the_target_catches_everything(tmp_path):
    code = (
        "    from vllm.new_helpers import allowed\n    try:\n        allowed()\n    except Exception:\n        pass\n"
    )
    findings = examine(doctor_targets.folder(tmp_path, before(code)))
    assert set(verdicts(findings).values()) == {"not-run"}
    assert "vllm.new_helpers.allowed" in findings["query-rows"].evidence


def test_a_target_without_the_kernel_is_not_run(tmp_path):
    findings = examine(doctor_targets.folder(tmp_path, kernels=None))
    assert set(verdicts(findings).values()) == {"not-run"}
    assert "no fused norm/RoPE kernel" in findings["k-rows"].evidence


AWAY = """
import os, time
pid = os.fork()
if pid == 0:
    {leave}
    open({file!r}, "w").write(str(os.getpid()))
    time.sleep(999)
    os._exit(0)
while not os.path.exists({file!r}) or not open({file!r}).read():
    time.sleep(0.01)
"""


def status_of(pid) -> list[str]:
    """State and parent of a process, empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except FileNotFoundError:
        return []


def gone(pid) -> bool:
    """Whether the process is no more, or only waits to be buried."""
    return status_of(pid)[:1] in ([], ["Z"])


@pytest.mark.parametrize(
    ("leave", "then"),
    [
        ("pass", ""),
        ("os.setsid()", ""),
        ("os.setsid(); os.fork() and os._exit(0)", "os._exit(3)\n"),
        ("os.setsid()", "raise ValueError('x')\n"),
    ],
)
def test_what_a_target_starts_neither_outlives_the_probes_nor_delays_them(tmp_path, leave, then):
    pid_file = tmp_path / "pid"
    code = AWAY.format(leave=leave, file=str(pid_file)) + then
    found = verdicts(examine(doctor_targets.folder(tmp_path, code + SOUND), time_limit=200.0))
    assert set(found.values()) == {"not-run" if then else "ok"}
    assert gone(pid_file.read_text())  # it would have slept for 999 s, with the pipe to the doctor in its hands


def test_a_target_that_hangs_takes_what_it_started_with_it(tmp_path):
    pid_file = tmp_path / "pid"
    code = AWAY.format(leave="os.setsid()", file=str(pid_file)) + "time.sleep(999)\n"
    findings = examine(doctor_targets.folder(tmp_path, code), time_limit=8.0)
    assert "time limit" in findings["k-rows"].evidence and gone(pid_file.read_text())


def test_a_target_that_kills_its_parent_and_loops_is_ended(tmp_path):
    pid_file = tmp_path / "pid"
    code = f"import os, signal, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"
    code += "os.setsid()\nos.kill(os.getppid(), signal.SIGKILL)\nwhile True: pass\n"
    findings = examine(doctor_targets.folder(tmp_path, code), time_limit=20.0)
    assert set(verdicts(findings).values()) == {"not-run"} and "SIGKILL" in findings["k-rows"].evidence
    for _ in range(1000):
        if not gone(pid_file.read_text()):
            time.sleep(0.01)  # killed, and on its way
    assert gone(pid_file.read_text())


def test_no_setting_of_the_caller_stands_on_a_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "a-secret")
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", "a-secret-place")
    code = "import os\nfor pid in (os.getpid(), os.getppid()):\n"
    code += "    for what in ('cmdline', 'environ'):\n"
    code += "        assert b'a-secret' not in open(f'/proc/{pid}/{what}', 'rb').read()\n"
    findings = examine(doctor_targets.folder(tmp_path, code + SOUND))
    assert set(verdicts(findings).values()) == {"ok"}, findings["k-rows"].evidence


def test_causes_that_form_a_circle_end(tmp_path):
    code = "a, b = ValueError('a'), ValueError('b')\na.__cause__, b.__cause__ = b, a\nraise a\n"
    findings = examine(doctor_targets.folder(tmp_path, code), time_limit=20.0)
    assert "ValueError" in findings["k-rows"].evidence and "time limit" not in findings["k-rows"].evidence


@pytest.mark.parametrize("place", [doctor_targets.KERNELS, "vllm/model_executor/models/registry.py"])
def test_a_source_that_no_parser_holds_is_a_target_that_cannot_be_read(tmp_path, place, capsys):
    files = {"vllm/models/deepseek_v32/__init__.py": "", place: "x = " + "-" * 100_000 + "1"}
    path, sound = doctor_targets.folder(tmp_path / "deep", files=files), doctor_targets.folder(tmp_path / "sound")
    assert report.main([str(path), str(sound)], json="-") == 2
    deep, other = json.loads(capsys.readouterr().out)
    assert {probe["verdict"] for probe in deep["probes"]} == {"not-run"}
    assert {probe["verdict"] for probe in other["probes"]} == {"ok"}


def test_no_escape_of_a_target_s_registry_reaches_the_terminal(tmp_path, capsys):
    registry = "x = {'GlmMoeDsaForCausalLM': ('\\x1b[2Jv2', 'A')}"
    path = doctor_targets.folder(
        tmp_path, broken("if slot >= 0:", "if True:"), files={"vllm/model_executor/models/registry.py": registry}
    )
    assert report.main([str(path)]) == 1
    said = capsys.readouterr().out
    assert "\\x1b[2Jv2" in "".join(said.split()) and "\x1b[2J" not in said + reach(path).how


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("VLLM_PLUGINS", "other", "but this environment keeps it out: VLLM_PLUGINS=other"),
        ("VLLM_PLUGINS", "", "but this environment keeps it out: VLLM_PLUGINS="),
        ("VLLM_PLUGINS", "other,dcp_fix", None),
        ("DCP_FIX_PLUGIN", "Off", "but this environment keeps it out: DCP_FIX_PLUGIN=Off"),
        ("DCP_FIX_PLUGIN", "1", None),
    ],
)
def test_a_plugin_that_this_environment_keeps_out_is_said_to_be(monkeypatch, tmp_path, setting, value, says):
    monkeypatch.setattr(report, "probe_target", lambda target, **how: [runner.finding(PROBES[0], "defect", "x")])
    target = str(doctor_targets.folder(tmp_path))
    monkeypatch.setenv(setting, value)
    (note,) = report.examine(target, with_plugin=True).notes
    assert note.startswith("with the plugin, which repairs: query-rows")
    assert note.endswith(says or "query-rows")
    if says:
        monkeypatch.delenv(setting)
        command = report.serving.parsed(f"{setting}={value} vllm serve x")
        assert says in report.examine(target, with_plugin=True, command=command).notes[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_ends_the_command_with_all_that_it_started(tmp_path, number):
    pid_file = tmp_path / "pid"
    looping = AWAY.format(leave="os.setsid()", file=str(pid_file)) + "while True: pass\n"
    path = doctor_targets.wheel(tmp_path / "v.whl", looping)
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    argv = [sys.executable, "-m", "dcp_fix", "doctor", str(path)]
    with subprocess.Popen(argv, env=environment, preexec_fn=heed_signals) as command:
        while not pid_file.exists() or not pid_file.read_text():
            assert command.poll() is None
            time.sleep(0.05)
        (probing,) = (p for p in os.listdir("/proc") if p.isdigit() and status_of(p)[1:] == [str(command.pid)])
        command.send_signal(number)
        assert command.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
    while not (gone(pid_file.read_text()) and gone(probing)):
        time.sleep(0.05)  # after SIGKILL nobody waits for them
    if number != signal.SIGKILL:
        assert list((tmp_path / "temporary").iterdir()) == []


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=3)
)
LINES = st.one_of(
    st.binary(max_size=40),
    VALUES.map(lambda v: json.dumps({"id": v, "verdict": "ok", "begin": v, "evidence": v}).encode()),
    st.sampled_from([b'{"begin": "k-rows", "case": "c", "control": true}', b'{"end": true}', b"[" * 100_000]),
)


@given(st.lists(LINES, max_size=6))
def test_whatever_a_child_writes_is_findings_or_nothing(lines):
    said, last = runner.parse(b"\n".join(lines), ["k-rows"])
    assert set(said) <= {"k-rows"} and (last is None or last.probe == "k-rows")
    for verdict, evidence in said.values():
        runner.finding(PROBES[0], verdict, evidence)


def test_evidence_is_bounded_and_harmless(tmp_path):
    text = json.dumps({"id": "k-rows", "verdict": "ok", "evidence": "\x1b[2J" + "x" * 10_000}).encode()
    ((verdict, evidence),) = runner.parse(text, ["k-rows"])[0].values()
    assert verdict == "ok" and evidence.startswith("\\x1b[2Jx") and len(evidence) == runner.EVIDENCE_LIMIT


def test_the_highest_status_of_all_targets_counts(tmp_path, capsys):
    bad = doctor_targets.folder(tmp_path / "bad", broken("if slot >= 0:", "if True:"))
    out = tmp_path / "report.json"
    assert report.main([str(bad), str(tmp_path / "absent")], json=str(out)) == 2
    assert report.main([str(bad)], json=str(out)) == 1
    captured = capsys.readouterr()
    assert "error: " in captured.err and "absent" in captured.err
    assert "owner-only-writes" in captured.out and "defect" in captured.out
    (only,) = json.loads(out.read_text())
    assert list(only) == ["target", "version", "reach", "notes", "probes", "serve_args"]
    assert set(only["probes"][0]) == {"id", "verdict", "evidence", "reference", "remedy"}
