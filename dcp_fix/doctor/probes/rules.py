"""What a release demands of a DCP run, read from its source as text; nothing of it is executed.

    vllm/model_executor/models/config.py            the communication backend that it picks for GLM
    vllm/v1/worker/gpu/pcp_manager.py               what PCP, and PCP with DCP, refuses
    vllm/v1/attention/backends/registry.py          which attention backends there are
    vllm/v1/attention/backends/mla/<backend>.py     what a backend refuses

A rule is recognised by the condition that raises, so it follows the release and not its number.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

BACKENDS = "vllm/v1/attention/backends/registry.py"
FLASHMLA = "vllm/v1/attention/backends/mla/flashmla_sparse.py"
MODELS = "vllm/model_executor/models/config.py"
PCP = "vllm/v1/worker/gpu/pcp_manager.py"


@dataclass(frozen=True)
class Backend:
    """One attention backend. None: its source does not say."""

    name: str
    cache_dtypes: tuple[str, ...] | None
    returns_lse: bool | None
    batch_invariant: bool
    refuses_pcp_dcp: bool


@dataclass(frozen=True)
class Rules:
    """`min_split_heads`: FlashMLA sparse takes fewer heads per rank than this. `pcp_*`: what PCP does not take."""

    glm_comm_backend: str
    flashmla_wants_ag_rs: bool
    min_split_heads: int | None
    pcp_gathers_kv: bool
    pcp_wants_ag_rs: bool
    pcp_dcp_sparse_only: bool
    pcp_sparse_graphs: str
    backends: dict[str, str]


class NoRules(Exception):
    """This vLLM lacks a file from which the rules are read: the message names it."""


def text_of(root: Path, name: str, needed: bool = False) -> str:
    """The source `name`, empty where there is none. Raises NoRules where it is `needed`."""
    path = root / name
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    if needed:
        raise NoRules(f"this vLLM has no {name}, from which the rules are read")
    return ""


def read_rules(root: Path) -> Rules:
    """The rules of the release at `root`."""
    sparse, pcp = text_of(root, FLASHMLA, needed=True), text_of(root, PCP)
    glm = re.search(r"class GlmMoeDsa\w+\(.*?(?=\nclass |\Z)", text_of(root, MODELS), re.S)
    chosen = re.search(r"comm_backend\s*=\s*['\"](\w+)['\"]", glm[0]) if glm else None
    limit = re.search(r"^MIN_HEADS_FOR_BF16_PREFILL\s*=\s*(\d+)", sparse, re.M)
    return Rules(
        glm_comm_backend=chosen[1] if chosen else "ag_rs",
        flashmla_wants_ag_rs=bool(re.search(r"dcp_comm_backend\s*!=\s*['\"]ag_rs['\"]", sparse)),
        min_split_heads=int(limit[1]) if limit and "decode_context_parallel_size > 1" in sparse else None,
        pcp_gathers_kv="pcp_dcp_kv_gather" in sparse,
        pcp_wants_ag_rs=bool(re.search(r"dcp_comm_backend\s*!=\s*['\"]ag_rs['\"]", pcp)),
        pcp_dcp_sparse_only=bool(re.search(r"decode_context_parallel_size > 1 and not is_sparse_mla", pcp)),
        pcp_sparse_graphs=graph_rule(pcp),
        backends=backend_modules(text_of(root, BACKENDS)),
    )


def graph_rule(pcp: str) -> str:
    """When sparse MLA under PCP takes no CUDA graphs: 'refused', 'refused without DCP', 'other models' or 'free'."""
    found = re.search(r"if \(\s*is_sparse_mla\s+and((?:.(?!\)\s*:\n))*.)\)\s*:\n", pcp, re.S)
    if not found or "cudagraph_mode" not in found[1]:
        return "free"
    if "glm_moe_dsa" in found[1]:
        return "other models"
    return "refused without DCP" if "decode_context_parallel_size == 1" in found[1] else "refused"


def backend_modules(registry: str) -> dict[str, str]:
    """{name of a backend: dotted path of its class}, from the members of AttentionBackendEnum."""
    for node in ast.walk(ast.parse(registry)):
        if isinstance(node, ast.ClassDef) and node.name == "AttentionBackendEnum":
            members = (n for n in node.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant))
            return {n.targets[0].id: n.value.value or "" for n in members if isinstance(n.targets[0], ast.Name)}
    return {}


# --- one backend ------------------------------------------------------------------------------------------------------


def read_backend(root: Path, rules: Rules, name: str) -> Backend:
    """What the source of the backend `name` says of it."""
    module, _, backend = rules.backends.get(name, "").rpartition(".")
    source = text_of(root, module.replace(".", "/") + ".py") if module else ""
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    dtypes = attribute(classes, backend, "supported_kv_cache_dtypes")
    elements = dtypes.elts if isinstance(dtypes, ast.List | ast.Tuple) else None
    return Backend(
        name,
        None if elements is None else tuple(e.value for e in elements if isinstance(e, ast.Constant)),
        truth(attribute(classes, implementation(classes, backend), "can_return_lse_for_decode")),
        "supports_batch_invariance" in names_in(classes, backend),
        bool(re.search(r"does not support combined PCP\+DCP", source)),
    )


def truth(value) -> bool | None:
    """True or False where the source says so, else None."""
    return bool(value.value) if isinstance(value, ast.Constant) else None


def implementation(classes: dict, backend: str) -> str:
    """The class that `get_impl_cls` of a backend returns."""
    for node in ast.walk(method(classes, backend, "get_impl_cls") or ast.Module([], [])):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name):
            return node.value.id
    return ""


def lineage(classes: dict, name: str) -> list[ast.ClassDef]:
    """The class `name` and its bases, as far as they are in the same module."""
    seen, left = [], [name]
    while left:
        node = classes.get(left.pop(0))
        if node is not None and node not in seen:
            seen.append(node)
            left += [ast.unparse(base).split("[")[0] for base in node.bases]
    return seen


def names_in(classes: dict, name: str) -> set[str]:
    """The methods that a class and its bases define."""
    return {n.name for node in lineage(classes, name) for n in node.body if isinstance(n, ast.FunctionDef)}


def method(classes: dict, name: str, wanted: str):
    """The nearest definition of a method."""
    found = (n for node in lineage(classes, name) for n in node.body if isinstance(n, ast.FunctionDef))
    return next((n for n in found if n.name == wanted), None)


def attribute(classes: dict, name: str, wanted: str):
    """The nearest value of a class attribute, as a syntax tree."""
    for node in lineage(classes, name):
        for n in node.body:
            targets = n.targets if isinstance(n, ast.Assign) else [n.target] if isinstance(n, ast.AnnAssign) else []
            if any(isinstance(t, ast.Name) and t.id == wanted for t in targets) and n.value is not None:
                return n.value
    return None
