"""Would this release accept these `vllm serve` arguments under DCP, and would it do the right thing with them?

Nothing is launched and nothing of the target is executed: its options (serve_options.py) and its rules (rules.py) are
read from its source as text, and the arguments are checked against them before a model is downloaded or a GPU touched.

    defect     this release refuses the arguments, or takes them and computes something else
    not-run    nothing is wrong as far as it was checked, but something that matters could not be checked
    ok         every check below was made; the evidence says what it rests on

Checked: TP, PCP and DCP sizes, heads per rank, `--dcp-comm-backend`, `--attention-backend` (FLASHMLA_SPARSE and
FLASHINFER_MLA_SPARSE in full), KV cache format, CUDA graphs under PCP, VLLM_BATCH_INVARIANT.
"""

import math
import os
from pathlib import Path

from dcp_fix.base.errors import UserError
from dcp_fix.doctor.probes.arguments import Arguments, Command, read
from dcp_fix.doctor.probes.rules import Backend, NoRules, Rules, read_backend, read_rules
from dcp_fix.doctor.serve_options import UnknownOptions

KNOWN = ("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE")
LATENT_CACHES = ("fp8_ds_mla", "fp8", "nvfp4_ds_mla")
TRUE = ("true", "1")  # what upstream takes for yes in a variable, in any case


def configuration(command: Command, root: Path) -> tuple[str, str]:
    """(verdict, evidence) of this command for the release at `root`."""
    try:
        a, rules = read(command, root), read_rules(root)
        if a.dcp == 1 and a.pcp == 1:
            return "ok", f"TP {a.tp}, DCP 1: no combination of DCP options to reject"
        return judged(a, rules, root, invariant(command))
    except UnknownOptions as lacking:
        return "not-run", f"the options of this vLLM could not be read: {lacking}"
    except NoRules as lacking:
        return "not-run", str(lacking)
    except UserError as refusal:
        return "defect", f"`vllm serve` of this release refuses the arguments: {refusal}"
    except (SyntaxError, RecursionError) as damage:
        return "not-run", f"a file with the rules of this vLLM is no Python ({damage})"


def invariant(command: Command) -> bool:
    """Whether VLLM_BATCH_INVARIANT is set, in front of the command or in this environment."""
    value = command.environment.get("VLLM_BATCH_INVARIANT", os.environ.get("VLLM_BATCH_INVARIANT", "0"))
    return value.lower() in TRUE


def judged(a: Arguments, rules: Rules, root: Path, batch_invariant: bool) -> tuple[str, str]:
    """The verdict of arguments that were read."""
    name = a.backend or ("FLASHMLA_SPARSE" if a.kv_cache_dtype == "fp8_ds_mla" else None)
    found, open_questions = check_sizes(a) + check_pcp(a, rules), list(not_followed(a))
    if name is not None and name not in rules.backends:
        found.append(f"this release has no attention backend {name[:60]}")
    elif name is None:
        open_questions.append("--attention-backend is not given, and which one vLLM takes depends on the GPU")
    else:
        backend = read_backend(root, rules, name)
        found += check_backend(a, rules, backend) + check_invariance(backend, batch_invariant)
        open_questions += [] if name in KNOWN else [f"the rules of {name} are not known here"]
        if batch_invariant and backend.batch_invariant:
            open_questions.append(
                f"{name} takes VLLM_BATCH_INVARIANT, and no rule of this release speaks of it together with DCP: "
                "whether the combine over ranks keeps that promise is not known here"
            )
    if found:
        return "defect", "; ".join(found)
    size = f"TP {a.tp}, PCP {a.pcp}, DCP {a.dcp}" if a.pcp > 1 else f"TP {a.tp}, DCP {a.dcp}"
    rest = f"{size}, {comm_backend(a, rules)[0]}, {name or 'default backend'}, {a.kv_cache_dtype}, {a.model.summary}"
    if open_questions:
        return "not-run", f"nothing wrong as far as it was checked ({rest}), but: {'; '.join(open_questions)}"
    return "ok", f"{rest}: accepted; rests on the options and the rules in this release's source"


def not_followed(a: Arguments):
    """What in the arguments or about the model is not known."""
    if a.model.heads is None:
        yield f"heads per rank not checked ({a.model.said_by})"
    for option in a.opaque:
        yield f"{option} may change what was checked, and is not followed here"


def comm_backend(a: Arguments, rules: Rules) -> tuple[str, str]:
    """(the communication backend, why it is that)"""
    if a.comm_backend:
        return a.comm_backend, "given"
    return (rules.glm_comm_backend, "this release's default for GLM") if a.model.is_glm else ("ag_rs", "the default")


# --- the checks: sentences, each with what to change ------------------------------------------------------------------


def divisors(number: int) -> list[int]:
    """All of them, in order; in steps of the square root."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def check_sizes(a: Arguments) -> list[str]:
    """TP, PCP and DCP sizes against each other and against the heads."""
    found = []
    if a.pcp == 1 and a.tp % a.dcp:
        found.append(f"TP {a.tp} is not divisible by DCP {a.dcp}: use a DCP size of {divisors(a.tp)[:20]}")
    if a.pcp > 1 and a.dcp not in (1, a.pcp, a.tp * a.pcp):
        found.append(f"with PCP {a.pcp} and TP {a.tp} DCP must be 1, {a.pcp} or {a.tp * a.pcp}, not {a.dcp}")
    if a.model.heads and a.model.heads % a.tp:
        found.append(f"{a.model.heads} attention heads do not divide over TP {a.tp}")
    return found


def check_pcp(a: Arguments, rules: Rules) -> list[str]:
    """What prefill context parallelism asks for."""
    if a.pcp == 1:
        return []
    found = []
    backend, why = comm_backend(a, rules)
    if a.dcp > 1 and rules.pcp_wants_ag_rs and backend != "ag_rs":
        found.append(f"PCP with DCP takes only ag_rs and gets {backend} ({why}): pass --dcp-comm-backend ag_rs")
    if a.dcp > 1 and rules.pcp_dcp_sparse_only and a.model.heads and not a.model.sparse:
        found.append("PCP with DCP is for sparse MLA models only, whose config has index_topk: use one of the two")
    refused = {"refused": True, "refused without DCP": a.dcp == 1}.get(rules.pcp_sparse_graphs, False)
    if a.model.sparse and a.graphs and refused:
        found.append("sparse MLA under PCP takes no CUDA graphs in this release: pass -cc.cudagraph_mode=NONE")
    return found


def check_backend(a: Arguments, rules: Rules, backend: Backend) -> list[str]:
    """What the attention backend asks of a DCP run."""
    if a.dcp == 1:
        return []
    if backend.returns_lse is False or (backend.name in KNOWN and not backend.returns_lse):
        return [f"{backend.name} of this release returns no LSE and refuses DCP once the model is loaded: use 0.30.0"]
    found = check_flashmla(a, rules) if backend.name == "FLASHMLA_SPARSE" else []
    if backend.cache_dtypes and a.kv_cache_dtype not in backend.cache_dtypes:
        wanted = ", ".join(backend.cache_dtypes)
        found.append(f"{backend.name} takes --kv-cache-dtype {wanted}, not {a.kv_cache_dtype[:40]}")
    if a.pcp > 1 and backend.refuses_pcp_dcp:
        found.append(f"{backend.name} refuses PCP together with DCP: use FLASHMLA_SPARSE, or one of the two")
    return found


def check_flashmla(a: Arguments, rules: Rules) -> list[str]:
    """What FLASHMLA_SPARSE asks on top."""
    found, (resolved, why) = [], comm_backend(a, rules)
    if rules.flashmla_wants_ag_rs and resolved != "ag_rs":
        found.append(f"FLASHMLA_SPARSE takes only ag_rs and gets {resolved} ({why}): pass --dcp-comm-backend ag_rs")
    together = a.pcp > 1 and rules.pcp_gathers_kv
    if a.kv_cache_dtype not in (LATENT_CACHES[:2] if together else LATENT_CACHES):
        under = "PCP with DCP" if together else "DCP"
        found.append(f"FLASHMLA_SPARSE under {under} needs --kv-cache-dtype fp8_ds_mla, not {a.kv_cache_dtype[:40]}")
    return found + check_heads(a, rules)


def check_heads(a: Arguments, rules: Rules) -> list[str]:
    """Heads per rank against the kernels that FLASHMLA_SPARSE has under DCP."""
    heads = a.model.heads
    if not heads or heads % a.tp:
        return []
    local, together = heads // a.tp, a.pcp > 1 and rules.pcp_gathers_kv
    if not together and rules.min_split_heads and local >= rules.min_split_heads:
        enough = [tp for tp in divisors(heads) if tp >= a.tp and heads // tp < rules.min_split_heads]
        limit = f"FLASHMLA_SPARSE under DCP takes fewer than {rules.min_split_heads}"
        return [f"{local} heads per rank: {limit}, use TP {enough[0]}"]
    gathered = local * a.dcp
    if together:  # PCP ranks hold the same heads: only the TP ranks among the DCP ranks add some
        gathered = local * a.tp if a.dcp > a.pcp else local
    if padded(local) != padded(gathered):
        return [f"{local} local and {gathered} gathered heads pad to different kernel sizes: use a smaller DCP"]
    return []


def padded(heads: int) -> int:
    """The head count that FlashMLA's fp8 decode kernel runs."""
    return 64 if heads <= 64 else 128


def check_invariance(backend: Backend, batch_invariant: bool) -> list[str]:
    """VLLM_BATCH_INVARIANT against a backend that does not promise it."""
    if not batch_invariant or backend.batch_invariant:
        return []
    return [f"{backend.name} refuses VLLM_BATCH_INVARIANT: unset it, or pass another --attention-backend"]
