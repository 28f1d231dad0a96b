"""The rungs of the ladder in real vLLM: what each one boots, and what vLLM is told (real_ladder.py lists them).

Arguments of `LLM` are those that were measured to work on two H200s; a rung's own come after them, the user's between.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from dcp_fix.base.errors import UserError
from dcp_fix.ladder import ladder
from dcp_fix.plugin import put_back
from dcp_fix.real_vllm import preflight, questions
from dcp_fix.tiny import corpus

REFERENCE, INSTALLED, WORKAROUND, PLUGIN = "DCP1", "as installed", "forced MQA", "with the plugin"
NAMED = {"dcp1": REFERENCE, "installed": INSTALLED, "workaround": WORKAROUND, "plugin": PLUGIN}
CLIMBED = ("unpatched", "+query norm", "+combine routing")  # all three put back, then one fewer each time
FORCE_MQA = {"sparse_mla_force_mqa": True}
TOGETHER = 64  # requests that vLLM runs at once in one batch
BLOCK = 64  # tokens of a cache block of fp8_ds_mla
SWITCHED_OFF = {"DCP_FIX_PLUGIN": "0"}
# vLLM's settings that the rungs rely on, and those that a host without network needs.
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_CONFIGURE_LOGGING": "1", "PYTHONUNBUFFERED": "1"}
DEFAULTS = {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


@dataclass(frozen=True)
class Settings:
    """One run of the command. Without `model` the checkpoint folder is served, with the corpus's own token ids."""

    tp: int = 2
    dcp: int = 2
    pcp: int = 1
    model: str | None = None
    checkpoint: Path = corpus.CHECKPOINT
    prompts: int = 1
    classes: tuple[str, ...] = ("512", "1536", "1024+1536")
    put_back: tuple[str, ...] = ()
    rungs: tuple[str, ...] = ()
    one_batch: bool = False
    cuda_graphs: bool = False
    llm: dict = field(default_factory=dict)
    timeout: float = 600.0
    logs: Path | None = None


@dataclass(frozen=True)
class Rung:
    """One boot: its name, the defects put back, arguments of `LLM` of its own, environment of its own."""

    name: str
    put_back: tuple[str, ...] = ()
    llm: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)


def climb(settings: Settings) -> list[Rung]:
    """The rungs that the settings ask for, DCP1 first. Raises UserError for one that is unknown."""
    names = settings.rungs or ("dcp1", "installed", *backs(settings.put_back), "plugin")
    return [rung(name, settings) for name in names]


def backs(defects: tuple[str, ...]) -> list[str]:
    """All of the defects, then without the first, and so on: each as the name of a rung."""
    return ["+".join(defects[i:]) for i in range(len(defects))]


def rung(name: str, settings: Settings) -> Rung:
    """A rung by the name that `--rungs` takes."""
    parallel = {"tensor_parallel_size": settings.tp}
    if name == "dcp1":
        return Rung(REFERENCE, llm=parallel, environment=SWITCHED_OFF)
    if settings.pcp > 1:
        parallel |= {"prefill_context_parallel_size": settings.pcp}
    if settings.dcp > 1:
        parallel |= {"decode_context_parallel_size": settings.dcp, "dcp_comm_backend": "ag_rs"}
    if name == "installed":
        return Rung(INSTALLED, llm=parallel, environment=SWITCHED_OFF)
    if name == "workaround":
        attention = {**settings.llm.get("attention_config", {}), **FORCE_MQA}
        return Rung(WORKAROUND, llm=parallel | {"attention_config": attention}, environment=SWITCHED_OFF)
    if name == "plugin":
        return Rung(PLUGIN, llm=parallel)
    defects = defects_of(name)
    return Rung(back_name(defects), defects, parallel, {put_back.VARIABLE: ",".join(defects)})


def defects_of(name: str) -> tuple[str, ...]:
    """`query-norm+k-rows` as defects. Raises UserError for any other word."""
    try:
        defects = put_back.parse(name)
    except ValueError:
        defects = ()
    if not defects:
        known = ", ".join(NAMED)
        raise UserError(f"--rungs: {name!r} is none of {known}, nor defects joined by + such as query-norm+k-rows")
    return defects


def back_name(defects: tuple[str, ...]) -> str:
    """The rung's name in the table: that of today's ladder where the defects are history, else their names."""
    if defects == put_back.HISTORY[-len(defects) :]:
        return CLIMBED[len(put_back.HISTORY) - len(defects)]
    return f"put back: {', '.join(defects)}"


# --- what vLLM is told ------------------------------------------------------------------------------------------------


def arguments(settings: Settings, rung: Rung, asked: list[questions.Question]) -> dict:
    """Arguments of `LLM`: what was measured to work, the rung's own, the user's last."""
    ours = {
        "model": settings.model or str(settings.checkpoint),
        "kv_cache_dtype": "fp8_ds_mla",
        "block_size": BLOCK,
        "enforce_eager": not settings.cuda_graphs,
        "max_model_len": -(-(max(len(q.ids) for q in asked) + ladder.NEW_TOKENS) // BLOCK) * BLOCK,
        "max_num_seqs": min(len(asked), TOGETHER) if settings.one_batch else 4,
        "enable_prefix_caching": True,
    }
    if not settings.model:
        ours |= {"skip_tokenizer_init": True, "gpu_memory_utilization": 0.3}
    return ours | settings.llm | rung.llm


def sampling(settings: Settings) -> dict:
    """Arguments of `SamplingParams`: greedy, with the margin to the second best token."""
    greedy = {"temperature": 0.0, "max_tokens": ladder.NEW_TOKENS, "logprobs": 2}
    if settings.model:
        return greedy
    ends = json.loads((settings.checkpoint / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
    return greedy | {"detokenize": False, "stop_token_ids": ends if isinstance(ends, list) else [ends]}


def groups(settings: Settings, asked: list[questions.Question]) -> list[list[dict]]:
    """Requests that are sent together: each alone, then all at once if asked."""
    alone = [[request(question, batch=False)] for question in asked]
    return alone + [[request(question, batch=True) for question in asked]] * settings.one_batch


def request(question: questions.Question, batch: bool) -> dict:
    """What llm_child.py takes for one question."""
    return {"id": identity(question, batch), "ids": question.ids, "cached": question.cached}


def identity(question: questions.Question, batch: bool) -> str:
    """Names an answer in the file of answers."""
    return f"{'batch' if batch else 'alone'} {question.prompt_class} {question.number}"


def child_environment(settings: Settings, rung: Rung) -> dict[str, str]:
    """The caller's environment, with what the rung is about and nothing left over from another one."""
    inherited = {k: v for k, v in preflight.environment().items() if k not in ("DCP_FIX_PLUGIN", put_back.VARIABLE)}
    offline = {"HF_HUB_OFFLINE": "1"} if not settings.model or Path(settings.model).is_dir() else {}
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if rung.llm.get("prefill_context_parallel_size", 1) > 1 else {}
    return DEFAULTS | offline | runner | inherited | ENVIRONMENT | rung.environment


def needs_plugin(rung: Rung) -> bool:
    """Whether the plugin has to be loaded for a rung to be what its name says."""
    return rung.environment != SWITCHED_OFF


def serve_args(settings: Settings) -> str:
    """The largest rung as arguments of `vllm serve`, for the doctor's rules."""
    import shlex

    told = {"kv_cache_dtype": "fp8_ds_mla", "dcp_comm_backend": "ag_rs"} | settings.llm
    words = ["--model", settings.model or str(settings.checkpoint), "--tensor-parallel-size", str(settings.tp)]
    words += ["-dcp", str(settings.dcp), "-pcp", str(settings.pcp), "--kv-cache-dtype", str(told["kv_cache_dtype"])]
    words += ["--dcp-comm-backend", str(told["dcp_comm_backend"])]
    if told.get("attention_backend"):
        words += ["--attention-backend", str(told["attention_backend"])]
    return shlex.join(words)
