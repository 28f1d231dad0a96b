"""`--serve-args`: the combinations that a release rejects late, found before anything is launched."""

import json
import shlex

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_fix.base.errors import UserError
from dcp_fix.doctor import report, serve_line
from dcp_fix.doctor.probes.arguments import checked, read
from dcp_fix.doctor.probes.configuration import configuration, divisors
from tests import serve_sources
from tests.serve_sources import AG_RS_ONLY, NEWER, NO_LSE

GLM = "nvidia/GLM-5.2-NVFP4 --kv-cache-dtype fp8_ds_mla "


@pytest.fixture
def release(tmp_path):
    return lambda *sparse, **changes: serve_sources.write(tmp_path / "release", *sparse, **changes)


def verdict(arguments, root):
    return configuration(checked(arguments), root)


@pytest.mark.parametrize(
    ("sparse", "arguments", "expected", "says"),
    [
        (AG_RS_ONLY, GLM + "-tp 4 -dcp 4", "defect", "pass --dcp-comm-backend ag_rs"),
        (AG_RS_ONLY, GLM + "-tp 4 -dcp 4 --dcp-comm-backend a2a", "defect", "gets a2a (given)"),
        (AG_RS_ONLY, GLM + "-tp=4 --decode_context_parallel_size=4 --dcp-comm-backend ag_rs", "ok", "rests on"),
        (NEWER, GLM + "-tp 4 -dcp 4", "ok", "a2a"),
        (NEWER, GLM + "-tp 2 -dcp 2", "defect", "32 heads per rank"),
        (NEWER, "DeepSeek-V3.2 --kv-cache-dtype fp8_ds_mla -tp 8 -dcp 8", "defect", "different kernel sizes"),
        (NEWER, "GLM-5.2 -tp 4 -dcp 4 --attention-backend FLASHMLA_SPARSE", "defect", "not auto"),
        (NO_LSE, GLM + "-tp 4 -dcp 4", "defect", "returns no LSE"),
        (NEWER, GLM + "-tp 4 -dcp 3", "defect", "use a DCP size of [1, 2, 4]"),
        (NEWER, GLM + "-tp 2 -pcp 2 -dcp 3", "defect", "DCP must be 1, 2 or 4"),
        (NEWER, GLM + "-tp 3 -dcp 3", "defect", "64 attention heads do not divide over TP 3"),
        (NEWER, GLM + "-tp 4", "ok", "DCP 1"),
        (NEWER, "some/model --kv-cache-dtype fp8_ds_mla -tp 4 -dcp 2", "not-run", "heads per rank not checked"),
        (NEWER, "GLM-5.2 -tp 4 -dcp 4", "not-run", "--attention-backend is not given"),
    ],
)
def test_combinations(release, sparse, arguments, expected, says):
    found, evidence = verdict(arguments, release(sparse))
    assert (found, says in evidence) == (expected, True), evidence


PCP4 = GLM + "-tp 1 -pcp 4 -dcp 4 "


@pytest.mark.parametrize(
    ("arguments", "expected", "says"),
    [
        (PCP4, "defect", "PCP with DCP takes only ag_rs and gets a2a (this release's default for GLM)"),
        (PCP4 + "--dcp-comm-backend ag_rs", "ok", "PCP 4, DCP 4, ag_rs"),
        ("GLM-5.2 -tp 1 -pcp 4 -dcp 4 --attention-backend FLASHINFER_MLA_SPARSE", "defect", "PCP with DCP takes only"),
        (
            "GLM-5.2 -tp 1 -pcp 4 -dcp 4 --attention-backend FLASHINFER_MLA_SPARSE --dcp-comm-backend ag_rs",
            "defect",
            "FLASHINFER_MLA_SPARSE refuses PCP together with DCP",
        ),
        (
            PCP4.replace("fp8", "nvfp4") + "--dcp-comm-backend ag_rs --attention-backend FLASHMLA_SPARSE",
            "defect",
            "under PCP with DCP needs --kv-cache-dtype fp8_ds_mla, not nvfp4_ds_mla",
        ),
        (GLM + "-tp 1 -pcp 4", "defect", "takes no CUDA graphs"),
        (GLM + "-tp 1 -pcp 4 --enforce-eager", "ok", "PCP 4, DCP 1"),
        (GLM + "-tp 1 -pcp 4 -cc.cudagraph_mode=NONE", "ok", "PCP 4, DCP 1"),
    ],
)
def test_prefill_context_parallelism(release, arguments, expected, says):
    found, evidence = verdict(arguments, release())
    assert (found, says in evidence) == (expected, True), evidence


def test_pcp_with_dcp_is_for_models_that_select_keys(release, tmp_path):
    model = tmp_path / "dense"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"num_attention_heads": 16}))
    line = f"{model} -tp 1 -pcp 4 -dcp 4 --kv-cache-dtype fp8_ds_mla"
    assert "sparse MLA models only" in verdict(line, release())[1]
    (model / "config.json").write_text(json.dumps({"num_attention_heads": 16, "index_topk": 2048}))
    assert verdict(line, release())[0] == "ok"


@pytest.mark.parametrize(
    "given",
    [
        "--attention-backend FLASHMLA_SPARSE",
        "--attention-backend flashmla_sparse",
        "--attention-config.backend FLASHMLA_SPARSE",
        "-ac.backend flashmla_sparse",
        "-ac.backend=FLASHMLA_SPARSE",
        """-ac '{"backend":"FLASHMLA_SPARSE"}'""",
        """--attention_config='{"backend": "FlashMLA_Sparse"}'""",
        "--attention-backend auto",  # then the cache format decides
    ],
)
def test_a_backend_is_the_same_however_it_is_spelt(release, given):
    expected = verdict(GLM + "-tp 4 -dcp 4", release(AG_RS_ONLY))
    assert verdict(GLM + "-tp 4 -dcp 4 " + given, release(AG_RS_ONLY)) == expected
    assert expected[0] == "defect"


@pytest.mark.parametrize(
    ("given", "expected", "says"),
    [
        ("--attention-backend FLASHMLA_SPRSE", "defect", "has no attention backend FLASHMLA_SPRSE"),
        ("--attention-backend rocm_aiter_mla_sparse", "not-run", "rules of ROCM_AITER_MLA_SPARSE are not known here"),
        ("-ac.bakend FLASHMLA_SPARSE", "defect", "has no 'bakend'"),
        ("-ac.backend FLASHMLA --attention-backend FLASHMLA", "defect", "exclude each other"),
        ("-ac.backend 3", "defect", "is a name, not '3'"),
    ],
)
def test_a_backend_that_is_none_or_unknown_is_never_ok(release, given, expected, says):
    found, evidence = verdict(GLM + "-tp 4 -dcp 4 " + given, release())
    assert (found, says in evidence) == (expected, True), evidence


@pytest.mark.parametrize("given", ["null", """'["x"]'""", "'{'", "3", "'" + "[" * 10_000 + "'"])
def test_an_attention_config_that_is_no_object_is_one_line(given):
    with pytest.raises(UserError, match="--attention-config takes a JSON object") as refused:
        checked(GLM + "-tp 4 -dcp 4 --attention-config " + given)
    assert len(str(refused.value).splitlines()) == 1 and len(str(refused.value)) < 300


SAME = [
    "--port 8001 MODEL --kv-cache-dtype fp8_ds_mla -tp 4 -dcp 4",
    "--model MODEL --kv-cache-dtype fp8_ds_mla -tp 4 -dcp 4",
    "-tp 4 --model=MODEL --kv-cache-dtype fp8_ds_mla -dcp 4",
    "vllm serve MODEL --kv-cache-dtype fp8_ds_mla -tp 4 -dcp 4",
    "CUDA_VISIBLE_DEVICES=0,1,2,3 vllm serve MODEL --kv-cache-dtype fp8_ds_mla -tp 4 -dcp 4",
    "env A=1 /opt/venv/bin/vllm serve MODEL --kv-cache-dtype fp8_ds_mla -tp 4 -dcp 4",
    "python3.12 -m vllm.entrypoints.openai.api_server --model MODEL --kv-cache-dtype fp8_ds_mla -tp 4 -dcp 4",
    "vllm serve MODEL \\\n    --kv-cache-dtype fp8_ds_mla \\\n    -tp 4 -dcp 4",
    "MODEL --kv-cache fp8_ds_mla --tensor-parallel 4 --decode-context 4",
    "MODEL --kv_cache_dtype fp8_ds_mla -tp 4 -dcp 4 -O3 --no-enable-prefix-caching --hf-token",
    "MODEL --kv-cache-dtype fp8_ds_mla -tp 4 -dcp 4 --served-model-name a b --max-model-len 128k",
]


@pytest.mark.parametrize("line", SAME, ids=range(len(SAME)))
@pytest.mark.parametrize("model", ["zai-org/GLM-5.2", "GLM5.2", "glm_5.2"])
def test_one_command_in_many_spellings(release, line, model):
    arguments = read(checked(line.replace("MODEL", model)), release())
    assert (arguments.tp, arguments.dcp, arguments.pcp, arguments.kv_cache_dtype) == (4, 4, 1, "fp8_ds_mla")
    assert (arguments.model.heads, arguments.model.is_glm, arguments.model.sparse) == (64, True, True)


@pytest.mark.parametrize("name", ["GLM-5-Next", "zai/glm-5v", "GLM-4.6", "x/deepseek-v3"])
def test_another_model_is_not_taken_for_one_that_is_known(release, name):
    assert read(checked(f"{name} -tp 4"), release()).model.heads is None


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("GLM-5.2 --tp 4 -dcp 4", "unrecognized arguments: --tp"),
        ("GLM-5.2 other -tp 4", "one model is served, and these are 2"),
        ("GLM-5.2 --enab x", "ambiguous option"),
        ("GLM-5.2 -tp 4 --port many", "invalid int value: 'many'"),
        ("GLM-5.2 -tp 4 --enforce-eager=yes", "ignored explicit argument"),
    ],
)
def test_what_the_release_would_not_parse_is_its_refusal(release, line, says):
    found, evidence = verdict(line, release())
    assert found == "defect" and says in evidence, evidence


def test_a_config_file_is_read_and_the_command_wins(release, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: zai-org/GLM-5.2\ntensor_parallel_size: 8\nkv-cache-dtype: fp8_ds_mla\nenable-prefix-caching: false\n"
        "attention-config:\n  backend: FLASHMLA_SPARSE\nserved-model-name: [a, b]\n"
    )
    arguments = read(checked(f"--config {file} -tp 4 -dcp 4"), release())
    assert (arguments.tp, arguments.dcp, arguments.backend, arguments.model.heads) == (4, 4, "FLASHMLA_SPARSE", 64)
    for text, says in (
        ("- a\n", "a mapping of options is wanted"),
        ("a: [", "--config"),
        ("a: !!python/x 1", "--config"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=says):
            checked(f"--config {file}")
    with pytest.raises(UserError, match="no YAML file"):
        checked(f"--config {tmp_path}/absent.yaml")
    with pytest.raises(UserError, match="no YAML file"):
        checked("--config /dev/zero")


def test_options_that_change_what_was_checked_are_named(release):
    line = GLM + """-tp 4 -dcp 4 --hf-overrides '{"num_attention_heads": 128}'"""
    found, evidence = verdict(line, release())
    assert found == "not-run" and "--hf-overrides may change what was checked" in evidence


@pytest.mark.parametrize(
    ("value", "backend", "expected", "says"),
    [
        ("1", "FLASHMLA_SPARSE", "defect", "FLASHMLA_SPARSE refuses VLLM_BATCH_INVARIANT"),
        ("True", "FLASHMLA_SPARSE", "defect", "FLASHMLA_SPARSE refuses VLLM_BATCH_INVARIANT"),
        ("0", "FLASHMLA_SPARSE", "ok", "accepted"),
        ("1", "TRITON_MLA", "not-run", "takes VLLM_BATCH_INVARIANT, and no rule of this release speaks of it"),
    ],
)
def test_batch_invariance_together_with_dcp(release, monkeypatch, value, backend, expected, says):
    line = f"{GLM} -tp 4 -dcp 4 --attention-backend {backend}"
    for environment, command in ((None, f"VLLM_BATCH_INVARIANT={value} vllm serve {line}"), (value, line)):
        monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
        if environment:
            monkeypatch.setenv("VLLM_BATCH_INVARIANT", environment)
        found, evidence = verdict(command, release())
        assert (found, says in evidence) == (expected, True), evidence


def test_heads_come_from_a_local_model(release, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    text = {"num_attention_heads": 16, "model_type": "glm_moe_dsa"}
    for content in (text, {"model_type": "other", "text_config": text}, {**text, "model_type": None}):
        (model / "config.json").write_text(json.dumps({**content, "architectures": ["GlmMoeDsaForCausalLM"]}))
        described = read(checked(f"{model} -tp 4 -dcp 4 --kv-cache-dtype fp8_ds_mla"), release()).model
        assert (described.heads, described.is_glm) == (16, True)
    for bad in ("{", "[]", '{"num_attention_heads": "many"}', '{"num_attention_heads": 1000000000000}', "[" * 99_999):
        (model / "config.json").write_text(bad)
        found, evidence = verdict(f"{model} -tp 4 -dcp 4", release())
        assert found == "defect" and "config.json" in evidence, bad


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sparse": None}, "flashmla_sparse.py"),
        ({"options": None}, "arg_utils.py"),
        ({"frontend": None}, "cli_args.py"),
        ({"classes": "def broken(:"}, "cannot be read"),
        ({"options": "x = 1"}, "does not show the option"),
        ({"registry": "def broken(:"}, "no Python"),
    ],
)
def test_a_release_that_cannot_be_read_is_not_judged(release, changes, says):
    found, evidence = verdict(GLM + "-tp 4 -dcp 4", release(**changes))
    assert found == "not-run" and says in evidence, evidence


@pytest.mark.parametrize(
    "arguments",
    ["-tp four", "-tp 0", "--model 'open", "--dcp-comm-backend ring", "-dcp", "-tp 4 && echo", "-tp 4 > log", "a\0b"]
    + ["-tp 99999999999999999999999999 -dcp 2", "-tp 999999999 -dcp 7", "-ac." + "x." * 9999 + "y 1", "-ac.backend"],
)
def test_mistakes_are_said_at_the_door(arguments):
    with pytest.raises(UserError, match="--serve-args") as refused:
        report.main(["/nowhere"], serve_args=arguments)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("number", [1, 12, 997, 1 << 20])
def test_divisors(number):
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


WORDS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["-tp", "-dcp", "4", "--config", "-ac.backend", "--model", "-O3", "-O", "--", "-", "-ac", "{}", "a.b"]
    ),
)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(words=st.lists(WORDS, max_size=8))
def test_no_words_end_in_anything_but_a_verdict_or_one_line(release, tmp_path, words):
    root = tmp_path / "release"
    try:
        found, evidence = verdict(shlex.join(words), root if root.exists() else release())
    except UserError as refused:
        assert str(refused).startswith("--serve-args")
    else:
        assert found in ("ok", "defect", "not-run") and evidence
        assert serve_line.split(shlex.join(words))
