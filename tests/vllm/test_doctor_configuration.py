"""`--serve-args`: the combinations that a release rejects late, found before anything is launched."""

import json

import pytest

from dcp_fix.errors import UserError
from dcp_fix.vllm.doctor import report
from dcp_fix.vllm.doctor.probes.configuration import configuration, parse

GLM = "nvidia/GLM-5.2-NVFP4 --kv-cache-dtype fp8_ds_mla "
# The rules of the three kinds of release, as far as the probe reads them.
NO_LSE = "class FlashMLASparseImpl:\n    pass\n"
NEWER = """
MIN_HEADS_FOR_BF16_PREFILL = 32
class Builder:
    if decode_context_parallel_size > 1:
        pass
class FlashMLASparseImpl:
    can_return_lse_for_decode: bool = True
"""
AG_RS_ONLY = NEWER + "if parallel_config.dcp_comm_backend != 'ag_rs':\n    raise NotImplementedError\n"
GLM_A2A = "class GlmMoeDsaForCausalLM(Base):\n    set_dcp_defaults(comm_backend='a2a')\n\nclass Next(Base):\n    pass\n"


@pytest.fixture
def release(tmp_path):
    def make(sparse, models=GLM_A2A):
        for name, text in (
            ("vllm/v1/attention/backends/mla/flashmla_sparse.py", sparse),
            ("vllm/model_executor/models/config.py", models),
        ):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("sparse", "arguments", "verdict", "says"),
    [
        (AG_RS_ONLY, GLM + "-tp 4 -dcp 4", "defect", "pass --dcp-comm-backend ag_rs"),
        (AG_RS_ONLY, GLM + "-tp 4 -dcp 4 --dcp-comm-backend a2a", "defect", "gets a2a (given)"),
        (AG_RS_ONLY, GLM + "-tp=4 --decode_context_parallel_size=4 --dcp-comm-backend ag_rs", "ok", "accepted"),
        (NEWER, GLM + "-tp 4 -dcp 4", "ok", "a2a"),
        (NEWER, GLM + "-tp 2 -dcp 2", "defect", "32 heads per rank"),
        (
            NEWER,
            "deepseek-ai/DeepSeek-V3.2 --kv-cache-dtype fp8_ds_mla -tp 8 -dcp 8",
            "defect",
            "different kernel sizes",
        ),
        (
            NEWER,
            GLM.replace("fp8_ds_mla", "auto") + "-tp 4 -dcp 4 --attention-backend FLASHMLA_SPARSE",
            "defect",
            "not auto",
        ),
        (NO_LSE, GLM + "-tp 4 -dcp 4", "defect", "returns no LSE"),
        (NEWER, GLM + "-tp 4 -dcp 3", "defect", "use a DCP size of [1, 2, 4]"),
        (NEWER, GLM + "-tp 2 -pcp 2 -dcp 3", "defect", "DCP must be 1, 2 or 4"),
        (NEWER, GLM + "-tp 3 -dcp 3", "defect", "64 attention heads do not divide over TP 3"),
        (NEWER, GLM + "-tp 4", "ok", "DCP 1"),
        (NEWER, "some/model -tp 4 -dcp 2", "ok", "heads per rank not checked"),
    ],
)
def test_combinations(release, sparse, arguments, verdict, says):
    found, evidence = configuration(parse(arguments), release(sparse))
    assert (found, says in evidence) == (verdict, True), evidence


def test_heads_come_from_a_local_model(release, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"num_attention_heads": 16, "model_type": "glm_moe_dsa"}))
    arguments = parse(f"{model} -tp 4 -dcp 4 --kv-cache-dtype fp8_ds_mla")
    assert (arguments.heads, arguments.is_glm) == (16, True)
    (model / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json"):
        parse(str(model))


def test_a_release_without_the_backend_is_not_judged(tmp_path):
    verdict, evidence = configuration(parse(GLM + "-tp 4 -dcp 4"), tmp_path)
    assert verdict == "not-run"
    assert "flashmla_sparse.py" in evidence


@pytest.mark.parametrize("arguments", ["-tp four", "-tp 0", "--model 'open", "--dcp-comm-backend ring", "-dcp"])
def test_mistakes_are_said_at_the_door(arguments):
    with pytest.raises(UserError, match="--serve-args"):
        report.main(["/nowhere"], serve_args=arguments)
