"""The rungs of the ladder in real vLLM: what each one boots, and what vLLM is told (real_ladder.py lists them).

Arguments of `LLM` are those that were measured to work on two H200s; the user's go
before them, and a rung's own before both. What an option of the command decides is refused as an argument of `LLM`.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcp_fix.base.bounded import parse_json
from dcp_fix.base.errors import UserError, shown
from dcp_fix.engine.checkpoint import check_folder
from dcp_fix.ladder import ladder
from dcp_fix.plugin import put_back
from dcp_fix.real_vllm import boot
from dcp_fix.real_vllm.questions import Question
from dcp_fix.tiny import corpus

REFERENCE, INSTALLED, WORKAROUND, PLUGIN = "DCP1", "as installed", "forced MQA", "with the plugin"
NAMED = ("dcp1", "installed", "workaround", "plugin")
CLIMBED = ("unpatched", "+query norm", "+combine routing")  # all three put back, then one fewer each time
TOGETHER = 64  # requests that vLLM runs at once in one batch
BLOCK = 64  # tokens of a cache block of fp8_ds_mla
SWITCHED_OFF = {"DCP_FIX_PLUGIN": "0"}
# vLLM's settings that the rungs rely on, and those that a host without network needs.
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_CONFIGURE_LOGGING": "1", "PYTHONUNBUFFERED": "1"}
DEFAULTS = {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
DECIDED = (  # by the command's own options and by the rung
    "model", "tensor_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size", "enforce_eager",
    "dcp_comm_backend",
)  # fmt: skip


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

    @property
    def ways(self) -> tuple[bool, ...]:
        """How each prompt is asked: alone (False), and in one batch (True)."""
        return (False, True) if self.one_batch else (False,)


@dataclass(frozen=True)
class Rung:
    """One boot: its name, the defects put back, arguments of `LLM` of its own, environment of its own."""

    name: str
    put_back: tuple[str, ...] = ()
    llm: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)

    @property
    def plugin(self) -> bool:
        """Whether the plugin has to be loaded for this rung to be what its name says."""
        return self.environment != SWITCHED_OFF


def climb(settings: Settings) -> list[Rung]:
    """The rungs that the settings ask for. Raises UserError for one that is unknown.

    Defects to be put back: all of them, then without the first, and so on.
    """
    backs = ("+".join(settings.put_back[i:]) for i in range(len(settings.put_back)))
    return [rung(name, settings) for name in settings.rungs or ("dcp1", "installed", *backs, "plugin")]


def rung(name: str, settings: Settings) -> Rung:
    """A rung by the name that `--rungs` takes."""
    parallel: dict[str, Any] = {"tensor_parallel_size": settings.tp}
    if name == "dcp1":
        return Rung(REFERENCE, llm=parallel, environment=SWITCHED_OFF)
    if settings.pcp > 1:
        parallel |= {"prefill_context_parallel_size": settings.pcp}
    parallel |= {"decode_context_parallel_size": settings.dcp, "dcp_comm_backend": "ag_rs"}
    if name == "installed":
        return Rung(INSTALLED, llm=parallel, environment=SWITCHED_OFF)
    if name == "workaround":
        attention = {**settings.llm.get("attention_config", {}), "sparse_mla_force_mqa": True}
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
        raise UserError(f"--rungs: {shown(name)!r} is none of {known}, nor defects such as query-norm+k-rows")
    return defects


def back_name(defects: tuple[str, ...]) -> str:
    """The rung's name in the table: that of today's ladder where the defects are history, else their names."""
    if defects == put_back.HISTORY[-len(defects) :]:
        return CLIMBED[-len(defects)]
    return f"put back: {', '.join(defects)}"


# --- what vLLM is told ------------------------------------------------------------------------------------------------


def llm_arguments(words: list[str]) -> dict:
    """Arguments of `LLM` as the command line has them. Raises UserError for one that would not count."""
    told = dict(pair(word) for word in words)
    for name in DECIDED:
        if name in told:
            raise UserError(f"--llm {name}: the command's own options decide that, so it would count for nothing")
    if not isinstance(told.get("attention_config", {}), dict):
        raise UserError('--llm attention_config: allowed: an object, such as {"backend": "FLASHMLA_SPARSE"}')
    return told


def pair(word: str) -> tuple[str, object]:
    """`key=value` of an argument of `LLM`: the value as JSON, or as text where it is none."""
    key, equals, value = word.partition("=")
    key = key.replace("-", "_")
    if not equals or not key.isidentifier():
        raise UserError(f"--llm {shown(word)!r}: write key=value, such as max_num_seqs=8 or hf_overrides='{{}}'")
    try:
        json.loads(value)
    except RecursionError:
        pass  # said below
    except ValueError:
        return key, value
    return key, parse_json(value.encode("utf-8", "surrogateescape"), f"--llm {key}")


def arguments(settings: Settings, rung: Rung, asked: list[Question]) -> dict:
    """Arguments of `LLM`: what was measured to work, the user's, the rung's own last."""
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


def job(settings: Settings, rung: Rung, asked: list[Question]) -> dict:
    """What llm_child.py is to do: greedy answers with the margin to the second best; each alone, then all at once."""
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": ladder.NEW_TOKENS, "logprobs": 2}
    if not settings.model:
        ends = check_folder(settings.checkpoint).eos_token_id
        sampling |= {"detokenize": False, "stop_token_ids": [ends] if isinstance(ends, int) else list(ends)}
    groups = []
    for batch in settings.ways:
        requests = [{"id": q.identity(batch), "ids": q.ids, "cached": q.cached} for q in asked]
        groups += [requests] if batch else [[one] for one in requests]
    return {"llm": arguments(settings, rung, asked), "sampling": sampling, "groups": groups}


def child_environment(settings: Settings, rung: Rung) -> dict[str, str]:
    """The caller's environment, with what the rung is about and nothing left over from another one."""
    inherited = {k: v for k, v in boot.environment().items() if k not in ("DCP_FIX_PLUGIN", put_back.VARIABLE)}
    offline = {"HF_HUB_OFFLINE": "1"} if not settings.model or Path(settings.model).is_dir() else {}
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if rung.llm.get("prefill_context_parallel_size", 1) > 1 else {}
    return DEFAULTS | offline | runner | inherited | ENVIRONMENT | rung.environment
