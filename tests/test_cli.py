"""The command line: quick without torch, one line for a user's error, the exit status of what it ran."""

import importlib.util
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import dcp_fix
import dcp_fix.bench
import dcp_fix.ladder
import dcp_fix.tiny
from dcp_fix import cli
from dcp_fix.base.errors import FAULT, UserError

ROOT = Path(__file__).resolve().parent.parent


def run_main(monkeypatch, *arguments):
    """The exit status of `dcp-fix ...` in this process."""
    monkeypatch.setattr(sys, "argv", ["dcp-fix", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code or 0


def stand_in(monkeypatch, package, name):
    """A module `package.name` whose main keeps what it was called with and returns, or raises, its `result`."""
    fake = types.ModuleType(f"{package.__name__}.{name}")
    fake.calls, fake.result = [], 0

    def main(*values, **arguments):
        fake.calls.append((*values, arguments))
        if isinstance(fake.result, Exception):
            raise fake.result
        return fake.result

    fake.main = main
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(package, name, fake, raising=False)
    return fake


@pytest.fixture
def ladder(monkeypatch):
    """A stand-in for dcp_fix.ladder.ladder, in a process that others use too."""
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: None)
    return stand_in(monkeypatch, dcp_fix.ladder, "ladder")


def test_help_loads_nothing_that_takes_long():
    code = "import sys; sys.argv = ['dcp-fix', '--help']\nimport dcp_fix.cli as c\ntry: c.main()\n"
    code += "finally: print('loaded', *sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0 and "reproduce" in done.stdout
    loaded = set(done.stdout.split("loaded")[-1].split())
    assert not loaded & {"torch", "numpy", "pydantic", "triton", "transformers", "safetensors", "httpx"}


def test_every_command_runs_a_module_that_exists():
    lazily = re.findall(r"(?m)^ +from (dcp_fix[\w.]*) import (\w+)", Path(cli.__file__).read_text())
    assert len(lazily) >= len(cli.app.registered_commands) + len(cli.bench.registered_commands)
    for package, name in lazily:
        assert importlib.util.find_spec(f"{package}.{name}"), f"{package}.{name} is imported by a command and missing"


def test_version_is_the_package_version():
    done = subprocess.run([sys.executable, "-m", "dcp_fix", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, f"dcp_fix {dcp_fix.__version__}")


@pytest.mark.parametrize("words, command", [(["repair"], ""), (["bench", "x"], " bench"), (["bench"], " bench")])
def test_an_unknown_command_is_refused_and_the_help_named(monkeypatch, capsys, words, command):
    assert run_main(monkeypatch, *words) == 2
    assert capsys.readouterr().err.endswith(f" See dcp-fix{command} --help.\n")


def test_reproduce_passes_its_options_on(monkeypatch, ladder, tmp_path):
    status = run_main(
        monkeypatch, "reproduce", "--prompts", "3", "--stale", "noise", "--json", str(tmp_path / "r.json"),
        "--dcp", "2", "--classes", "512,8192",
    )  # fmt: skip
    assert status == 0
    options = {"tp": 4, "dcp": 2, "device": "cpu", "checkpoint": None, "classes": ("512", "8192")}
    assert ladder.calls == [({"prompts": 3, "stale": "noise", "json_path": tmp_path / "r.json"} | options,)]


def test_train_passes_its_options_on(monkeypatch, tmp_path):
    training = stand_in(monkeypatch, dcp_fix.tiny, "train")
    assert run_main(monkeypatch, "train", str(tmp_path / "new"), "--seed", "5") == 0
    assert training.calls == [(tmp_path / "new", {"seed": 5, "device": None})]


def test_a_users_error_is_one_line(monkeypatch, ladder, capsys):
    ladder.result = UserError("DCP size 3 does not divide TP size 4: choose 1, 2 or 4")
    assert run_main(monkeypatch, "reproduce", "--dcp", "3") == 2
    printed = capsys.readouterr()
    assert printed.err == "error: DCP size 3 does not divide TP size 4: choose 1, 2 or 4\n"
    assert printed.out == ""


def test_a_fault_of_ours_has_a_status_of_its_own_and_the_way_to_report_it(monkeypatch, ladder, capsys):
    """1 would say "different", or "a defect"."""
    ladder.result = ValueError("too many \x1b[31mvalues to unpack")
    assert run_main(monkeypatch, "reproduce") == FAULT == 70
    said = capsys.readouterr().err
    assert "Traceback" in said and "too many \\x1b[31mvalues" in said and said.rstrip().endswith(cli.REPORT)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("unable to mmap 25056624 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
    ],
)
def test_what_does_not_fit_into_memory_is_no_fault_of_ours(monkeypatch, ladder, capsys, error):
    """What torch, safetensors and Python say under `ulimit -v`."""
    ladder.result = error
    assert run_main(monkeypatch, "reproduce") == 2
    assert "not enough memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--stale", "rotten"],
        ["--stale", "\x1b[31m"],
        ["--prompts", "0"],
        ["--prompts", "1" + "0" * 20],
        ["--json", "no/such/folder/r.json"],
        ["--json", "/proc/r.json"],
        ["--json", "."],
        ["--json", "x" * 5000],
        ["--json", "a\udcffb/c"],
        ["--tp", "four"],
        ["--tp", "1" + "0" * 20],
        ["--no-such-option"],
        ["one\ntoo many"],
    ],
)
def test_a_bad_option_is_refused_before_anything_runs(monkeypatch, ladder, capsys, arguments):
    assert run_main(monkeypatch, "reproduce", *arguments) == 2
    assert ladder.calls == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and line.isprintable()


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "--timeout", "inf"],
        ["verify", "--timeout", "nan"],
        ["verify", "--dcp", "1,two"],
        ["verify", "--dcp", "1," + "9" * 5000],
        ["verify", "--dcp", ",".join(["1"] * 65)],
        ["verify", "--procs", "100000"],
        ["verify", "--plant", "list", "--record", "r.json"],
        ["verify", "--plant", "all", "--combine", "exact", "--passes", "free", "--procs", "2"],
        ["verify", "--plant", "all", "--prompts", "1"],
        ["verify", "--passes", "free,free"],
        ["verify", "--classes", "512,512"],
        ["multi-gpu", "--device", "cpu", "--ranks", "2", "--classes", "512,512"],
        ["multi-gpu", "--device", "cpu", "--ranks", "2", "--classes", "512", "--part", "x"],
        ["reproduce", "--classes", "512,512"],
        ["reproduce", "--classes", ""],
        ["reproduce", "--classes", "512,"],
        ["reproduce", "--checkpoint", "/nope"],
        ["reproduce-vllm", "--classes", "512,512"],
        ["reproduce-vllm", "--logs", ""],
        ["reproduce-vllm", "--logs", "/proc/x"],
        ["train", ""],
        ["compare", "--a", "http://a", "--b", "http://b", "--timeout", "1e308"],
        ["compare", "--a", "http://a", "--b", "http://b", "--timeout", "nan"],
        ["bench", "exact", "--tokens", "1" + "0" * 12],
        ["bench", "exact", "--contexts", "0"],
        ["bench", "exact", "--topk", "1" + "0" * 12],
        ["bench", "exact", "--llm", "a=1"],
        ["bench", "kernels", "--tokens", "1"],
        ["bench", "pack", "--works", "norm"],
        ["train", "out", "--seed", "-1"],
        ["train", "/proc/out"],
        ["train", "/dev/null"],
        ["train", "/dev/null/out"],
        ["train", "out", "--device", "tpu"],
        ["multi-gpu", "--device", "cpu", "--ranks", "1"],
        ["reproduce", "--dcp", "1"],
    ],
)
def test_what_could_only_hang_or_fail_later_is_refused_at_the_door(monkeypatch, capsys, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)
    assert run_main(monkeypatch, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and line.isprintable()
    assert list(tmp_path.iterdir()) == []


def test_an_argument_that_no_record_could_name_is_refused_before_the_work(monkeypatch, ladder, capsys, tmp_path):
    arguments = ["--checkpoint", "caf\udce9", "--json", str(tmp_path / "r.json")]
    assert run_main(monkeypatch, "reproduce", *arguments) == 2
    assert "argument caf\\udce9: is not UTF-8" in capsys.readouterr().err and ladder.calls == []
    assert run_main(monkeypatch, "reproduce", *arguments[:2]) == 0  # nobody writes it down


@pytest.mark.parametrize("option, most", [("--tokens", cli.MOST_TOKENS), ("--contexts", cli.MOST_CONTEXT)])
def test_sizes_of_a_benchmark_are_bounded_where_it_would_run(monkeypatch, capsys, option, most):
    """On a CPU, where nothing else refuses them."""
    benchmark = stand_in(monkeypatch, dcp_fix.bench, "exact_cost")
    assert run_main(monkeypatch, "bench", "exact", "--device", "cpu", option, str(most + 1)) == 2
    assert f"at most {most}" in capsys.readouterr().err and benchmark.calls == []
    assert (
        run_main(monkeypatch, "bench", "exact", "--device", "cpu", option, str(most)) == 0 and len(benchmark.calls) == 1
    )


def test_a_time_that_is_no_number_is_refused_by_whichever_typer():
    """NaN is neither below a limit nor above it: older ones let it pass."""
    assert cli.finite(1.5) == 1.5 and cli.finite(None) is None
    with pytest.raises(cli.ClickError, match="nan"):
        cli.finite(float("nan"))


@pytest.mark.parametrize("told", ["v1", "a" * 39, "A" * 40, "a" * 40 + "-dirty-dirty"])
def test_a_commit_that_is_told_wrongly_is_refused_before_the_work(monkeypatch, ladder, capsys, told, tmp_path):
    monkeypatch.setenv("DCP_FIX_COMMIT", told)
    assert run_main(monkeypatch, "reproduce", "--json", str(tmp_path / "r.json")) == 2
    assert "DCP_FIX_COMMIT" in capsys.readouterr().err and ladder.calls == []
