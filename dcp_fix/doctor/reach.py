"""Who reaches the fused DeepSeek-V3.2 / GLM-5 module of a vLLM: read from its model registry, without importing it.

Defects of a kernel or a layer harm only those whose model is served by it. In 0.26.0 to 0.28.0 the module exists and no
architecture is mapped to it, so that a default user of these releases never runs it.

    reach(root)  ->  Reach(default=False, how="present, reached only by --model-class-overrides: ...")
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from dcp_fix.base.errors import shown
from dcp_fix.doctor.target import TargetError

REGISTRY = "vllm/model_executor/models/registry.py"
ENGINE = "vllm/engine/arg_utils.py"
MODULE = "vllm/models/deepseek_v32"
MODELS = "vllm/model_executor/models/config.py"
FLASHMLA = "vllm/v1/attention/backends/mla/flashmla_sparse.py"
ARCHITECTURES = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
OVERRIDES = "--model-class-overrides"
PROBED = ("kernel", "attention")  # the `code` of the probes that look at this module


@dataclass(frozen=True)
class Reach:
    """`default`: an architecture is served by the module (None: not known). `short`: for a table, `how`: a sentence."""

    default: bool | None
    short: str
    how: str


def reach(root: Path) -> Reach:
    """How the module of the vLLM at `root` is reached. Raises TargetError for a registry that is no Python."""
    if not (root / MODULE).is_dir():
        return Reach(False, "no such module", "this vLLM has no vllm/models/deepseek_v32")
    served = serving(root)
    if not served:
        return Reach(None, "not known", f"who reaches the module is not known: no {REGISTRY} that lists these models")
    users = [name for name, module in served.items() if "deepseek_v32" in module]
    if users:
        return Reach(True, "by default", f"reached by default: {' and '.join(users)} are served by it")
    others = "; ".join(f"{name} is served by {module}" for name, module in served.items())
    way = OVERRIDES if OVERRIDES in text_of(root / ENGINE) else "code that names it"
    hopper = "" if returns_lse(root) else "; on Hopper FLASHMLA_SPARSE returns no LSE, and DCP is refused"
    return Reach(False, f"only by `{way}`", f"present, reached only by {way}: {others}{hopper}")


def serving(root: Path) -> dict[str, str]:
    """{architecture: module that serves it}, as the registry has it. TargetError for one that is no Python."""
    found = {}
    try:
        tree = ast.parse(text_of(root / REGISTRY))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TargetError(f"{shown(root)}: {REGISTRY} is no Python ({type(error).__name__})") from None
    for table in (node for node in ast.walk(tree) if isinstance(node, ast.Dict)):
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and key.value in ARCHITECTURES and isinstance(value, ast.Tuple):
                found[key.value] = shown(getattr(value.elts[0], "value", "")) if value.elts else ""
    return {name: found[name] for name in ARCHITECTURES if name in found}


def returns_lse(root: Path) -> bool:
    """Whether FLASHMLA_SPARSE, Hopper's backend, can take part in a combine."""
    source = text_of(root / FLASHMLA).replace(" ", "").replace(":bool", "")
    return "can_return_lse_for_decode=True" in source


def glm_comm_backend(root: Path) -> str:
    """The DCP communication backend that this vLLM picks for GLM-5: ag_rs where it says nothing."""
    glm = re.search(r"class GlmMoeDsa\w+\(.*?(?=\nclass |\Z)", text_of(root / MODELS), re.S)
    chosen = re.search(r"comm_backend\s*=\s*['\"](\w+)['\"]", glm[0]) if glm else None
    return chosen[1] if chosen else "ag_rs"


def text_of(path: Path) -> str:
    """The source, empty where there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
