"""Probe 8: would this release accept these `vllm serve` arguments under DCP, and would it do the right thing with them?

Nothing is launched and nothing of the target is executed: which rules a release has is read from its source as text
(`Rules`), and the arguments are checked against them before a model is downloaded or a GPU touched. Covered: TP, PCP
and DCP sizes, `--dcp-comm-backend` with the attention backend, KV cache format, heads per rank. The backend is taken
from `--attention-backend`, else from the KV cache format; heads from a local config.json, or from the model's name.

Not covered: `--config FILE`, options that change the model, speculative decoding.
"""

import argparse
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from dcp_fix.errors import UserError

HEADS_BY_NAME = {"glm-5": 64, "deepseek-v3.2": 128}
MLA = "vllm/v1/attention/backends/mla"


@dataclass(frozen=True)
class Arguments:
    """What the checks use. `heads` and `backend` are None where neither the arguments nor the model say."""

    tp: int
    dcp: int
    pcp: int
    comm_backend: str | None
    backend: str | None
    kv_cache_dtype: str
    heads: int | None
    is_glm: bool


@dataclass(frozen=True)
class Rules:
    """What a release does, from its source. `min_split_heads`: FlashMLA sparse takes fewer heads per rank than this."""

    glm_comm_backend: str
    flashmla_returns_lse: bool
    flashmla_wants_ag_rs: bool
    min_split_heads: int | None


# --- the arguments ----------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of exiting."""

    def error(self, message):
        raise UserError(f"--serve-args: {message}")


def parse(text: str) -> Arguments:
    """UserError for arguments that `vllm serve` would not parse either; unknown ones are ignored."""
    try:
        words = [re.sub(r"^--[\w-]+", lambda m: m[0].replace("_", "-"), word) for word in shlex.split(text)]
    except ValueError as error:
        raise UserError(f"--serve-args {text!r}: {error}") from error
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--decode-context-parallel-size", "-dcp", type=int, default=1)
    parser.add_argument("--prefill-context-parallel-size", "-pcp", type=int, default=1)
    parser.add_argument("--dcp-comm-backend", choices=["ag_rs", "a2a"])
    parser.add_argument("--attention-backend")
    parser.add_argument("--attention-config", type=json.loads, default={})
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--model")
    known, rest = parser.parse_known_args(words)
    sizes = known.tensor_parallel_size, known.decode_context_parallel_size, known.prefill_context_parallel_size
    if min(sizes) < 1:
        raise UserError(f"--serve-args: parallel sizes must be at least 1, not {min(sizes)}")
    model = known.model or next((w for w in rest if not w.startswith("-") and w not in ("vllm", "serve")), "")
    backend = known.attention_backend or known.attention_config.get("backend")
    if backend is None and known.kv_cache_dtype == "fp8_ds_mla":
        backend = "FLASHMLA_SPARSE"
    heads, is_glm = describe_model(model)
    return Arguments(*sizes, known.dcp_comm_backend, backend, known.kv_cache_dtype, heads, is_glm)


def describe_model(model: str) -> tuple[int | None, bool]:
    """(attention heads, is it GLM-DSA) from a local config.json, else from the name."""
    config = Path(model, "config.json")
    if model and config.is_file():
        try:
            content = json.loads(config.read_text(encoding="utf-8"))
            return content.get("num_attention_heads"), content.get("model_type") == "glm_moe_dsa"
        except (ValueError, AttributeError) as error:
            raise UserError(f"{config}: not a model's config.json ({error})") from error
    name = model.lower()
    return next((heads for part, heads in HEADS_BY_NAME.items() if part in name), None), "glm-5" in name


# --- the release ------------------------------------------------------------------------------------------------------


def read_rules(root: Path) -> Rules:
    """Raises FileNotFoundError for a release without the FlashMLA sparse backend."""
    sparse = (root / MLA / "flashmla_sparse.py").read_text(encoding="utf-8")
    models = root / "vllm/model_executor/models/config.py"
    glm = re.search(
        r"class GlmMoeDsa\w+\(.*?(?=\nclass )", models.read_text(encoding="utf-8") if models.is_file() else "", re.S
    )
    chosen = re.search(r"comm_backend\s*=\s*['\"](\w+)['\"]", glm[0]) if glm else None
    limit = re.search(r"^MIN_HEADS_FOR_BF16_PREFILL\s*=\s*(\d+)", sparse, re.M)
    return Rules(
        glm_comm_backend=chosen[1] if chosen else "ag_rs",
        flashmla_returns_lse=bool(re.search(r"can_return_lse_for_decode\s*(:\s*bool)?\s*=\s*True", sparse)),
        flashmla_wants_ag_rs=bool(re.search(r"dcp_comm_backend\s*!=\s*['\"]ag_rs['\"]", sparse)),
        min_split_heads=int(limit[1]) if limit and "decode_context_parallel_size > 1" in sparse else None,
    )


def padded(heads: int) -> int:
    """The head count that FlashMLA's fp8 decode kernel runs."""
    return 64 if heads <= 64 else 128


# --- the checks: sentences, each with what to change ------------------------------------------------------------------


def check_sizes(a: Arguments) -> list[str]:
    """TP, PCP and DCP sizes against each other and against the heads."""
    found = []
    if a.pcp == 1 and a.tp % a.dcp:
        divisors = [d for d in range(1, a.tp + 1) if a.tp % d == 0]
        found.append(f"TP {a.tp} is not divisible by DCP {a.dcp}: use a DCP size of {divisors}")
    if a.pcp > 1 and a.dcp not in (1, a.pcp, a.tp * a.pcp):
        found.append(f"with PCP {a.pcp} and TP {a.tp} DCP must be 1, {a.pcp} or {a.tp * a.pcp}, not {a.dcp}")
    if a.heads and a.heads % a.tp:
        found.append(f"{a.heads} attention heads do not divide over TP {a.tp}")
    return found


def check_flashmla(a: Arguments, rules: Rules) -> list[str]:
    """What FLASHMLA_SPARSE asks of a DCP run."""
    if not rules.flashmla_returns_lse:
        return ["FLASHMLA_SPARSE of this release returns no LSE and refuses DCP once the model is loaded: use 0.29.0"]
    found = []
    resolved = a.comm_backend or (rules.glm_comm_backend if a.is_glm else "ag_rs")
    if rules.flashmla_wants_ag_rs and resolved != "ag_rs":
        why = "given" if a.comm_backend else "this release's default for GLM"
        found.append(f"FLASHMLA_SPARSE takes only ag_rs and gets {resolved} ({why}): pass --dcp-comm-backend ag_rs")
    if a.kv_cache_dtype not in ("fp8_ds_mla", "fp8", "nvfp4_ds_mla"):
        found.append(f"FLASHMLA_SPARSE under DCP needs --kv-cache-dtype fp8_ds_mla, not {a.kv_cache_dtype}")
    return found + check_heads(a, rules)


def check_heads(a: Arguments, rules: Rules) -> list[str]:
    """Heads per rank against the kernels that FLASHMLA_SPARSE has under DCP."""
    if not a.heads or a.heads % a.tp or a.pcp > 1:
        return []
    local = a.heads // a.tp
    if rules.min_split_heads and local >= rules.min_split_heads:
        enough = [tp for tp in range(a.tp, a.heads + 1) if a.heads % tp == 0 and a.heads // tp < rules.min_split_heads]
        limit = f"FLASHMLA_SPARSE under DCP takes fewer than {rules.min_split_heads}"
        return [f"{local} heads per rank: {limit}, use TP {enough[0]}"]
    if padded(local) != padded(local * a.dcp):
        return [f"{local} local and {local * a.dcp} gathered heads pad to different kernel sizes: use a smaller DCP"]
    return []


def configuration(arguments: Arguments, root: Path) -> tuple[str, str]:
    """(verdict, evidence) of these arguments for the release at `root`."""
    a = arguments
    if a.dcp == 1:
        return "ok", f"TP {a.tp}, DCP 1: no combination of DCP options to reject"
    found = check_sizes(a)
    try:
        rules = read_rules(root)
    except FileNotFoundError as error:
        return "not-run", f"this vLLM has no {Path(error.filename).relative_to(root)}, from which the rules are read"
    if a.backend == "FLASHMLA_SPARSE":
        found += check_flashmla(a, rules)
    if found:
        return "defect", "; ".join(found)
    unknown = [] if a.heads else ["heads per rank not checked (name a local model folder)"]
    unknown += [] if a.backend else ["backend not given, so its rules were not checked"]
    resolved = a.comm_backend or (rules.glm_comm_backend if a.is_glm else "ag_rs")
    size = f"TP {a.tp}, DCP {a.dcp}, {resolved}, {a.backend or 'default backend'}"
    return "ok", "; ".join([f"{size}: accepted", *unknown])
