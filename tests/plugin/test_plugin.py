"""The vLLM plugin on a small importable look-alike: what it repairs, what it says, and that it does no harm."""

import importlib.abc
import importlib.machinery
import logging
import os
import sys
import tomllib
from pathlib import Path

import pytest

from dcp_fix.doctor import matrix, runner
from dcp_fix.plugin import pack, plugin, put_back
from dcp_fix.real_vllm import boot_log
from dcp_fix.repairs import repairs
from dcp_fix.repairs.signature import REQUIRED

pytestmark = pytest.mark.timeout(120)

ATTENTION, COMMUNICATOR = repairs.ATTENTION[0], repairs.COMMUNICATOR
SOURCES = {
    "vllm.platforms": "class P:\n    def is_cuda(self): return True\n\ncurrent_platform = P()\n",
    repairs.KERNELS[0]: f"def fused_norm_rope({', '.join(REQUIRED)}): return 'upstream'\n",
    ATTENTION: f"""
from {repairs.KERNELS[0]} import fused_norm_rope
class DeepseekV32Attention:
    def forward(self): pass
""",
    COMMUNICATOR: "class CudaCommunicator: reduce_scatter = print",
    pack.MODULE: "def flash_mla_with_kvcache(): pass\nget_mla_metadata = None",
}


@pytest.fixture
def vllm(tmp_path, monkeypatch, caplog):
    """Makes an importable vllm of a few modules, with these changed; takes it and the import hooks away again."""
    before = list(sys.meta_path)
    caplog.set_level(logging.INFO, "vllm.dcp_fix")

    def make(**changed):
        names = {name.rpartition(".")[2]: name for name in SOURCES}
        for name, text in (SOURCES | {names[short]: text for short, text in changed.items()}).items():
            path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in path.relative_to(tmp_path).parents[:-1]:
                (tmp_path / folder / "__init__.py").touch()
            path.write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    yield make
    sys.meta_path[:] = before
    for name in [n for n in sys.modules if n == "vllm" or n.startswith("vllm.")]:
        del sys.modules[name]


@pytest.fixture
def has(monkeypatch):
    """Has the matrix say which defects this vLLM has."""
    return lambda *defects: monkeypatch.setattr(matrix, "recorded_defects", lambda root: set(defects))


def imported(name):
    __import__(name)
    return sys.modules[name]


def ours(function) -> bool:
    return hasattr(function, "is_dcp_fix")


# --- what it does -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [False, True])
def test_modules_are_repaired_when_they_are_imported_or_were_before(vllm, has, caplog, before):
    vllm()
    has("query-rows", "combine-routing", "silent-collective")
    if before:
        imported(ATTENTION)
    plugin.register()
    plugin.register()  # vLLM may
    assert before or "vllm.models" not in sys.modules  # nothing was imported for it
    attention = imported(ATTENTION)
    assert ours(attention.fused_norm_rope) and ours(attention.DeepseekV32Attention.forward)
    assert before or imported(repairs.KERNELS[0]).fused_norm_rope is attention.fused_norm_rope
    assert ours(sys.modules[COMMUNICATOR].CudaCommunicator.reduce_scatter)
    assert "this vLLM has combine-routing, query-rows, silent-collective" in caplog.text
    assert f"route_attention applied to {ATTENTION}" in caplog.text


def test_what_is_whole_another_model_and_another_platform_are_left_alone(vllm, has, caplog):
    vllm(platforms=SOURCES["vllm.platforms"].replace("True", "False"))
    has("k-rows", "silent-collective")
    plugin.register()
    assert imported(COMMUNICATOR).CudaCommunicator.reduce_scatter is print  # other models use it too
    assert not ours(imported(ATTENTION).fused_norm_rope)
    assert "left alone, this platform is not CUDA" in caplog.text and "applied to" not in caplog.text
    assert plugin.repairs_for({"combine-routing"}) == {name: [repairs.route_attention] for name in repairs.ATTENTION}


@pytest.mark.parametrize(
    ("variables", "defects", "kept_out", "says"),
    [({"DCP_FIX_PLUGIN": off}, ["k-rows"], f"DCP_FIX_PLUGIN={off}", "switched off") for off in ("0", "OFF", "no")]
    + [
        ({"VLLM_PLUGINS": "other"}, [], "VLLM_PLUGINS=other", "nothing is changed"),
        ({"VLLM_PLUGINS": ""}, [], "VLLM_PLUGINS=", "nothing is changed"),
        ({"VLLM_PLUGINS": "other,dcp_fix", "DCP_FIX_PLUGIN": "1"}, [], None, "nothing is changed"),
        ({}, [], None, "nothing is changed"),
    ],
)
def test_it_does_nothing_and_says_so(vllm, has, monkeypatch, caplog, variables, defects, kept_out, says):
    vllm()
    has(*defects)
    for name in ("DCP_FIX_PLUGIN", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    plugin.register()
    assert says in caplog.text and repairs.kept_out() == kept_out
    assert not any(isinstance(finder, plugin.AfterImport) for finder in sys.meta_path)


def test_the_entry_point_is_the_one_that_vllm_looks_for():
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"dcp_fix": "dcp_fix.plugin.plugin:register"}


@pytest.mark.parametrize("defects", [[], ["k-rows", "combine-routing"]])
def test_register_puts_back_what_the_variable_names_after_the_repairs(vllm, has, monkeypatch, caplog, defects):
    vllm()
    has(*defects)
    monkeypatch.setenv(put_back.VARIABLE, "combine-routing, query-norm")
    plugin.register()
    plugin.register()
    attention = imported(ATTENTION)
    assert attention.fused_norm_rope.put_back == ("q_c_out",)
    assert attention.DeepseekV32Attention.__init__.is_put_back
    assert ours(attention.fused_norm_rope) == bool(defects)
    assert "answers will be wrong" in caplog.text
    for name in ("query-norm", "combine-routing"):
        said = {"plugin": [record.message.removeprefix("dcp_fix: ") for record in caplog.records]}
        assert boot_log.not_as_asked(said, plugin=True, put_back=(name,)) is None


def test_a_defect_that_does_not_exist_is_no_put_back(vllm, has, monkeypatch, caplog):
    vllm()
    has()
    monkeypatch.setenv(put_back.VARIABLE, "k-rows,workspace")
    plugin.register()  # out of which nothing comes; the ladder checks the names before it boots
    assert "'workspace' is no defect that can be put back" in caplog.text
    assert not any(isinstance(finder, plugin.AfterImport) for finder in sys.meta_path)


# --- it does no harm --------------------------------------------------------------------------------------------------

RENAMED = {
    "attention": (SOURCES[ATTENTION].replace("DeepseekV32Attention", "Other"), "combine-routing not repaired, route"),
    "kernels": (
        "def other(): pass\nfused_norm_rope = None",
        "owner-only-writes, query-rows not repaired, replace_launcher",
    ),
    "cuda_communicator": ("", "silent-collective not repaired, guard_communicator"),
    "flashmla_sparse": ("get_mla_metadata = None", "pack_and_cut cannot change"),
    "platforms": ("import no_such_module", "combine-routing not repaired, route_attention cannot change"),
}


@pytest.mark.parametrize("changed", RENAMED)
def test_what_cannot_be_applied_is_an_error_in_the_log_and_vllm_starts(vllm, has, monkeypatch, caplog, changed):
    source, says = RENAMED[changed]
    vllm(**{changed: source})
    has(*repairs.REPAIRED)
    monkeypatch.setenv(pack.VARIABLE, "1")
    plugin.register()
    for name in (repairs.KERNELS[0], ATTENTION, pack.MODULE):
        imported(name)
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert any(says in error for error in errors)
    if changed == "platforms":
        assert "applied to" not in caplog.text and not ours(sys.modules[ATTENTION].fused_norm_rope)
    elif changed != "kernels":
        assert ours(sys.modules[ATTENTION].fused_norm_rope), "the others are repaired"


class OtherHook(importlib.abc.MetaPathFinder):
    """Somebody else's import hook on the attention module: notes that it ran, and finds by the path or by asking."""

    def __init__(self, asks: bool):
        self.asks, self.asking, self.ran = asks, False, []

    def find_spec(self, fullname, path=None, target=None):
        if fullname != ATTENTION or self.asking:
            return None
        self.asking = True
        finders = [f for f in sys.meta_path if f is not self] if self.asks else [importlib.machinery.PathFinder]
        spec = next(spec for finder in finders if (spec := finder.find_spec(fullname, path, target)))
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), self.ran.append(ours(module.fused_norm_rope)))
        self.asking = False
        return spec


@pytest.mark.parametrize("first", [False, True], ids=["registered after ours", "registered before ours"])
@pytest.mark.parametrize("asks", [False, True], ids=["finds by the path", "asks the others"])
def test_another_plugins_hook_on_the_same_module_runs_beside_ours(vllm, has, caplog, first, asks):
    vllm(kernels=SOURCES[repairs.KERNELS[0]])
    has("k-rows", "combine-routing")
    imported("vllm")
    other = OtherHook(asks)
    for register in (lambda: sys.meta_path.insert(0, other), plugin.register)[:: 1 if first else -1]:
        register()
    attention = imported(ATTENTION)
    assert len(other.ran) == 1, "theirs"
    assert ours(attention.DeepseekV32Attention.forward), "ours"
    assert caplog.text.count(f"route_attention applied to {ATTENTION}") == 1


@pytest.mark.parametrize("error", [RuntimeError("x"), RecursionError(), MemoryError()])
def test_nothing_leaves_register(vllm, monkeypatch, caplog, error):
    def fail(root):
        raise error

    vllm()
    monkeypatch.setattr(plugin, "find_defects", fail)
    plugin.register()
    assert f"nothing is repaired, the plugin failed: {type(error).__name__}" in caplog.text


def test_without_vllm_it_only_says_so(vllm, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    plugin.register()
    assert "there is no vllm to import" in caplog.text


# --- a vLLM that is not in the matrix ---------------------------------------------------------------------------------


@pytest.fixture
def unknown(vllm, monkeypatch, tmp_path):
    """A vllm that is not in the matrix and has the defect k-rows; and how often it was probed."""
    probed = []

    def probe_target(target, *, on_cpu):
        probed.append((target.root, on_cpu))
        return [runner.Finding("k-rows", "defect", "", "", ""), runner.Finding("query-rows", "not-run", "why", "", "")]

    monkeypatch.setattr(runner, "probe_target", probe_target)
    monkeypatch.setenv("DCP_FIX_CACHE", str(tmp_path / "cache"))
    vllm()
    return probed


def test_it_is_probed_once_and_again_when_it_has_changed(unknown, tmp_path, caplog):
    assert plugin.find_defects(tmp_path) == plugin.find_defects(tmp_path) == {"k-rows"}
    assert unknown == [(tmp_path, True)] and "query-rows is unknown: why" in caplog.text
    (tmp_path / "vllm/models/deepseek_v32/attention.py").write_text("# patched by hand\n")
    plugin.find_defects(tmp_path)
    assert len(unknown) == 2


@pytest.mark.parametrize("place", ["file", "file/below", "/dev/null/below", "/proc/self/below", None])
def test_a_cache_folder_that_cannot_be_written_only_costs_the_next_start(unknown, monkeypatch, tmp_path, caplog, place):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DCP_FIX_CACHE", str(tmp_path / place) if place else "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("~nobody-of-this-name").expanduser())  # a user without a home
    plugin.register()
    assert "not cached" in caplog.text and ours(imported(ATTENTION).fused_norm_rope) and len(unknown) == 1


DAMAGE = [b"", b"\xff\xfe", b"3", b'["other"]', b"[[1]]", b"{}", b"[" * 60_000, b'"k-rows"', os.mkfifo, os.mkdir]


@pytest.mark.parametrize("damage", DAMAGE, ids=range(len(DAMAGE)))
def test_a_damaged_cache_file_is_probed_anew_and_one_that_is_no_file_is_not_waited_for(unknown, tmp_path, damage):
    plugin.find_defects(tmp_path)
    (cached,) = (tmp_path / "cache/probed").iterdir()
    if callable(damage):
        cached.unlink()
        damage(cached)
    else:
        cached.write_bytes(damage)
    assert plugin.find_defects(tmp_path) == {"k-rows"} and len(unknown) == 2
    plugin.find_defects(tmp_path)
    assert len(unknown) == (3 if damage is os.mkdir else 2)
