"""`--serve-args`: which defects a command reaches, whatever its spelling; unknown stays unknown."""

import json
import os
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_fix.base.errors import UserError
from dcp_fix.doctor import report
from dcp_fix.doctor.probes import PROBES
from dcp_fix.doctor.serve_args import parsed, reached
from tests import doctor_targets

REGISTRY = "x = {'GlmMoeDsaForCausalLM': ('vllm.models.deepseek_v32', 'A')}"
GLM_A2A = "class GlmMoeDsaForCausalLM(Base):\n    set_dcp_defaults(comm_backend='a2a')\n\nclass Next(Base):\n    pass\n"
OLDER, NEWER = [probe.id for probe in PROBES[:9]], [probe.id for probe in PROBES[9:]]
IDS = OLDER + NEWER


@pytest.fixture
def release(tmp_path):
    models = "vllm/model_executor/models"
    return doctor_targets.folder(
        tmp_path / "release", files={f"{models}/registry.py": REGISTRY, f"{models}/config.py": GLM_A2A}
    )


def reaches(line, root):
    """{id: answer}"""
    return {answer.id: answer for answer in reached(parsed(line), IDS, root)}


FP8 = "zai-org/GLM-5.2 -tp 4 -dcp 4 --kv-cache-dtype fp8_ds_mla "
Y, N, U = "reached", "not reached", "cannot tell"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("zai-org/GLM-5.2 -tp 4 -dcp 4", [Y, Y, Y, Y, U, Y, N, U, Y]),
        (FP8, [Y, Y, Y, Y, Y, Y, N, N, Y]),
        (FP8 + "--dcp-comm-backend ag_rs", [Y, Y, Y, Y, Y, Y, Y, N, N]),
        (FP8.replace("-dcp 4", ""), [N, N, N, N, Y, N, N, N, N]),
        (FP8 + "-pcp 4 --dcp-comm-backend ag_rs", [Y, N, Y, Y, Y, Y, N, N, N]),
        (FP8 + """--attention-config '{"sparse_mla_force_mqa": true}'""", [Y, Y, N, Y, Y, Y, N, N, Y]),
        (FP8 + "-ac.sparse_mla_force_mqa=true -ac.backend FLASHINFER_MLA_SPARSE", [Y, Y, N, Y, N, Y, N, Y, Y]),
        ("GLM5.2 -dcp 2 --attention_config.backend flashmla_sparse --kv_cache_dtype=fp8", [Y, Y, Y, Y, Y, Y, N, N, Y]),
        ("GLM-5.2 -dcp 2 --attention-backend FLASHMLA_SPARSE --kv-cache-dtype bfloat16", [Y, Y, Y, Y, N, Y, N, N, Y]),
        ("GLM-5.2 -dcp 2 --attention-backend auto", [Y, Y, Y, Y, U, Y, N, U, Y]),
        ("VLLM_USE_DIRECT_DCP_A2A=0 vllm serve GLM-5.2 -dcp 4", [Y, Y, Y, Y, U, Y, N, U, N]),
        ("some/model -dcp 4", [U, U, U, U, U, Y, U, U, U]),
        ("zai/glm-5v -dcp 4", [U, U, U, U, U, Y, U, U, U]),
        ("GLM-5.2 -dcp 4 --hf-overrides '{}'", [U, U, U, U, U, Y, U, U, U]),
        ("GLM-5.2 -dcp 4 --model-class-overrides x=vllm.models.deepseek_v32:A", [Y, Y, Y, Y, U, Y, N, U, Y]),
        ("GLM-5.2 -dcp 4 --model-class-overrides x=y", [U, U, U, U, U, Y, N, U, Y]),
        ("deepseek-ai/DeepSeek-V3.2-Exp -dcp 4", [Y, Y, Y, Y, U, Y, Y, U, N]),
        # a word after an option that is not known here may be its value
        ("--enable-prefix-caching GLM-5.2 -dcp 4", [U, U, U, U, U, Y, U, U, U]),
        ("GLM-5.2 --enable-prefix-caching true -dcp 4", [Y, Y, Y, Y, U, Y, N, U, Y]),
        ("--served-model-name=x -dcp 4 GLM-5.2", [Y, Y, Y, Y, U, Y, N, U, Y]),
    ],
)
def test_what_a_command_reaches(line, wanted, release, monkeypatch):
    monkeypatch.delenv("VLLM_USE_DIRECT_DCP_A2A", raising=False)
    found = reaches(line, release)
    assert {name: found[name].reach for name in OLDER} == dict(zip(OLDER, wanted, strict=True))


@pytest.mark.parametrize(
    ("line", "wanted"),  # scale-contract, slot-mapping, index-filter, mtp-lengths, pcp-partition, query-preparation
    [
        (FP8, [U, Y, Y, U, N, Y]),
        (FP8.replace("-dcp 4", "-pcp 2"), [U, N, N, N, Y, Y]),
        ("GLM-5.2 -dcp 2 --kv-cache-dtype bfloat16", [N, Y, Y, U, N, Y]),
        ("some/model -dcp 4 -pcp 4", [U, Y, U, U, Y, U]),
    ],
)
def test_what_a_command_reaches_of_slots_lengths_and_scales(line, wanted, release):
    found = reaches(line, release)
    assert {name: found[name].reach for name in NEWER} == dict(zip(NEWER, wanted, strict=True))


def test_a_module_that_no_model_is_served_by_is_reached_by_nobody(release):
    (release / "vllm/model_executor/models/registry.py").write_text(REGISTRY.replace("vllm.models.deepseek_v32", "v2"))
    found = reaches(FP8, release)
    assert found["k-rows"].reach == N and "GlmMoeDsaForCausalLM is served by v2" in found["k-rows"].why
    assert reaches(FP8 + "--model-class-overrides x=vllm.models.deepseek_v32:A", release)["k-rows"].reach == Y


def test_a_local_folder_says_which_model_it_is(release, tmp_path):
    model = tmp_path / "GLM-5.2"
    model.mkdir()
    for content, wanted in (
        ({"architectures": ["GlmMoeDsaForCausalLM"]}, Y),
        ({"architectures": ["LlamaForCausalLM"]}, N),
        ({"architectures": [3]}, U),
        ([], U),
    ):
        (model / "config.json").write_text(json.dumps(content))
        assert reaches(f"{model} -dcp 4", release)["k-rows"].reach == wanted
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    assert reaches(f"{model} -dcp 4", release)["k-rows"].reach == U


@pytest.mark.parametrize(
    "line",
    [
        "vllm serve MODEL -dcp 4",
        "# as on the slide, don't ask\nCUDA_VISIBLE_DEVICES=0,1 vllm serve MODEL \\\n    -dcp 4",
        "nohup sudo -E /opt/venv/bin/vllm serve MODEL -dcp 4",
        "uv run --with x vllm serve MODEL --decode-context 4",
        "env A=1 python3.12 -m vllm.entrypoints.openai.api_server --model MODEL --decode_context_parallel_size=4",
        "-tp 4 -cc 3 -O3 -dcp 4 MODEL",
        "--port 8001 --model=MODEL -dcp=4",
    ],
)
def test_one_command_in_many_spellings(line):
    command = parsed(line.replace("MODEL", "zai-org/GLM-5.2"))
    assert (command.options.model, command.options.dcp) == ("zai-org/GLM-5.2", 4)


def test_what_was_not_looked_at_is_listed_and_nothing_is_called_accepted(release, monkeypatch, capsys):
    monkeypatch.setattr(report, "probe_target", lambda target: [report.finding(PROBES[2], "defect", "x")])
    line = FP8 + """--compilation-config '{"level":3}' --gpu-memory-utilization 90% --block-size 64 --x=1 -y"""
    assert report.main([str(release)], serve_args=line) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "accepted" not in said and "k-rows with these arguments: reached (DCP 4;" in said
    for option in ("--compilation-config", "--gpu-memory-utilization", "--block-size", "--x", "-y"):
        assert option in said.partition("not looked at in --serve-args: ")[2]


def test_a_recorded_workspace_counts_where_no_gpu_measured_it(release, monkeypatch, capsys):
    monkeypatch.setattr(report, "probe_target", lambda target: [report.finding(PROBES[4], "not-run", "x")])
    monkeypatch.setattr(report, "workspace_verdict", {"9.9.9": "defect"}.get)
    report.main([str(release)], serve_args=FP8, json="-")
    (answer,) = json.loads(capsys.readouterr().out)[0]["serve_args"]
    assert (answer["id"], answer["reach"]) == ("split-workspace", Y)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_config_file_is_read_and_the_command_wins(release, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: zai-org/GLM-5.2\ndecode_context_parallel_size: 8\nkv-cache-dtype: fp8_ds_mla\nenforce-eager: true\n"
        "attention-config:\n  sparse_mla_force_mqa: true\nserved-model-name: [a, b]\nsince: 2026-01-01\n"
        "odd: !!set {a, b}\nbytes: !!binary aGk=\nenable-prefix-caching: false\n"
    )
    options = parsed(f"--config {file} -dcp 4").options
    assert (options.model, options.dcp, options.cache, options.force_mqa) == ("zai-org/GLM-5.2", 4, "fp8_ds_mla", True)


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n", "a mapping of options is wanted"),
        ("a: [", "serve.yaml"),
        ("[" * 5000, "serve.yaml"),
        ("a: " + "x" * (1 << 20), "longer than 1048576 bytes"),
        (BOMB, "aliases"),
        ("a: &a [*a]", "aliases"),
        (None, "is a FIFO"),
    ],
    ids=range(7),
)
def test_a_config_file_that_is_none_is_one_line(tmp_path, text, says):
    file = tmp_path / "serve.yaml"
    os.mkfifo(file) if text is None else file.write_text(text)
    with pytest.raises(UserError, match=says) as refused:
        parsed(f"GLM-5.2 --config {file}")
    assert str(refused.value).startswith("--serve-args: --config") and len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    "line",
    ["-dcp four", "--model 'open", "-dcp", "GLM -tp 4 && echo", "GLM > log", "-ac 3", "-ac '[]'", "-ac '{'"]
    + ["--config /nowhere/x.yaml", "-ac '" + "[" * 10_000 + "'"],
)
def test_what_cannot_be_read_is_said_at_the_door(line):
    with pytest.raises(UserError, match="--serve-args") as refused:
        report.main(["/nowhere"], serve_args=line)
    assert len(str(refused.value)) < 400


WORDS = st.text(max_size=12) | st.sampled_from(
    ["-tp", "-dcp", "4", "--config", "-ac.backend", "--model", "-O3", "--", "-", "-ac", "{}", "a.b", "vllm", "serve"]
)


@given(words=st.lists(WORDS, max_size=8))
def test_no_words_end_in_anything_but_answers_or_one_line(tmp_path_factory, words):
    try:
        answers = reached(parsed(shlex.join(words)), IDS, tmp_path_factory.getbasetemp())
    except UserError as refused:
        assert str(refused).startswith("--serve-args")
    else:
        assert [answer.id for answer in answers] == IDS and {answer.reach for answer in answers} <= {Y, N, U}
