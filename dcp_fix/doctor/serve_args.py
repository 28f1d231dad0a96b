"""Which defects does a `vllm serve` command reach?

    parsed("nohup vllm serve zai-org/GLM-5.2 -tp 4 -dcp 4")        the command, whatever stands in front of it
    reached(command, ["k-rows"], root)  ->  [Answer("k-rows", "reached", "DCP 4; ...")]

Read are the model and the options of OPTIONS. A defect is reached if all that NEEDED says of it holds, not reached if
one thing does not, and where one is not known it cannot be told.

It does not: say that vLLM takes the command (it refuses bad ones itself, at start), or look at other options.
"""

import argparse
import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dcp_fix.base.bounded import MIB, read_bytes, read_json
from dcp_fix.base.errors import UserError, shown
from dcp_fix.doctor.probes.nccl import TRUE, disabled_by
from dcp_fix.doctor.reach import ARCHITECTURES, glm_comm_backend, reach

OPTIONS = {
    "model": ("--model",),
    "dcp": ("--decode-context-parallel-size", "-dcp"),
    "pcp": ("--prefill-context-parallel-size", "-pcp"),
    "comm": ("--dcp-comm-backend",),
    "cache": ("--kv-cache-dtype",),
    "backend": ("--attention-backend", "--attention-config.backend", "-ac.backend"),
    "force_mqa": ("--attention-config.sparse_mla_force_mqa", "-ac.sparse_mla_force_mqa"),
    "attention": ("--attention-config", "-ac"),
    "overrides": ("--model-class-overrides",),
    "hf_overrides": ("--hf-overrides",),
}
# No defect depends on these, so their values are not looked at; they are known so that none is taken for the model.
WITHOUT_EFFECT = (
    ("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp"), ("--cp-kv-cache-interleave-size",),
    ("--block-size",), ("--compilation-config", "-cc"), ("--optimization-level", "-O"), ("--speculative-config", "-sc"),
)  # fmt: skip
BY_NAME = {r"glm5(?!next|v|\d{3})": "GlmMoeDsaForCausalLM", "deepseekv32": "DeepseekV32ForCausalLM"}
DIRECT = "VLLM_USE_DIRECT_DCP_A2A"
SHELL_ONLY = re.compile(r"^(&&?|\|\|?|;|\d?>.*|<.*)$")
ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.S)
OPTION = re.compile(r"^--?[A-Za-z]")
NEEDED = {
    "query-rows": ("dcp", "module"),
    "combine-routing": ("dcp", "no pcp", "module"),
    "k-rows": ("dcp", "module", "dense prefill"),
    "owner-only-writes": ("dcp", "module"),
    "split-workspace": ("flashmla", "fp8 cache"),
    "empty-rows": ("dcp",),
    "silent-collective": ("dcp", "no pcp", "ag_rs", "nccl"),
    "flashinfer-workspace": ("dcp", "flashinfer"),
    "direct-a2a-layout": ("dcp", "a2a", "direct"),
    "scale-contract": ("module", "fp8 cache", "blackwell"),
    "slot-mapping": ("dcp",),
    "index-filter": ("dcp", "module"),
    "mtp-lengths": ("dcp", "module", "speculation"),
    "pcp-partition": ("pcp",),
    "query-preparation": ("module",),
}
Fact = tuple[bool | None, str]  # whether it holds, None where that is not known; a sentence


@dataclass(frozen=True)
class Command:
    """`options`: those of OPTIONS by their short names; `not_read`: the other options of the command, by name."""

    environment: dict[str, str]
    options: argparse.Namespace
    not_read: list[str]


@dataclass(frozen=True)
class Answer:
    """Of one defect: `reach` is "reached", "not reached" or "cannot tell"."""

    id: str
    reach: str
    why: str


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of exiting."""

    def error(self, message: str):
        raise UserError(f"--serve-args: {shown(message)}")


# --- reading a command ------------------------------------------------------------------------------------------------


def parsed(text: str) -> Command:
    """The command in `text`. Raises UserError for one that cannot be read."""
    environment, own = split(text)
    words = own
    if "--config" in own[:-1]:
        at = own.index("--config")
        own = [*own[:at], *own[at + 2 :]]
        words = [*config_words(Path(words[at + 1])), *own]  # the command's own options come last, and win
    options, rest = parser().parse_known_args(words)
    inside = json_object(options.attention or "{}")
    options.backend = str(options.backend or inside.get("backend") or "auto").upper()
    options.force_mqa = str(options.force_mqa or inside.get("sparse_mla_force_mqa")).lower() in TRUE
    options.model = own[0] if own and not own[0].startswith("-") else options.model or only_model(rest)
    unread = [names[0] for names in WITHOUT_EFFECT if getattr(options, names[0]) is not None]
    return Command(environment, options, [*unread, *(word.partition("=")[0] for word in rest if OPTION.match(word))])


def split(text: str) -> tuple[dict[str, str], list[str]]:
    """(variables of the environment and of the command, the words after `vllm serve`)"""
    lines = re.sub(r"(?m)^\s*#.*$", "", text)
    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", lines))
    except ValueError as error:
        raise UserError(f"--serve-args {shown(text, 80)!r}: {error}") from None
    if odd := next(filter(SHELL_ONLY.match, words), None):
        raise UserError(
            f"--serve-args: {shown(odd)!r} is for a shell; give one command, without redirections and pipes"
        )
    start = start_of(words)
    assigned = dict(found.groups() for word in words[:start] if (found := ASSIGNMENT.match(word)))
    return {**os.environ, **assigned}, list(map(with_dashes, words[start:]))


def start_of(words: list[str]) -> int:
    """Where the words of `vllm serve` begin, whatever stands in front: assignments, nohup, sudo -E, uv run, a path."""
    for at, word in enumerate(words[1:], start=1):
        before = words[at - 1].rpartition("/")[2]
        if (before, word) == ("vllm", "serve") or (before, word) == ("-m", "vllm.entrypoints.openai.api_server"):
            return at + 1
    return next((at for at, word in enumerate(words) if not ASSIGNMENT.match(word)), len(words))


def with_dashes(word: str) -> str:
    """An option's name with dashes, as vLLM takes both."""
    return re.sub(r"^--[\w-]+", lambda name: name[0].replace("_", "-"), word)


def parser() -> Parser:
    """Of the options of the two tables."""
    made = Parser(prog="vllm serve", add_help=False)
    for field, names in OPTIONS.items():
        size = {"type": int, "default": 1} if field in ("dcp", "pcp") else {}
        made.add_argument(*names, dest=field, **size)
    for names in WITHOUT_EFFECT:
        made.add_argument(*names, dest=names[0])
    return made


def only_model(rest: list[str]) -> str | None:
    """The one word that is no option and follows none: after one that is not known here a word may be its value."""
    bare, before = [], ""
    for word in rest:
        may_be_value = OPTION.match(before) and "=" not in before
        bare += [word] if not OPTION.match(word) and not may_be_value else []
        before = word
    return bare[0] if len(bare) == 1 else None


def config_words(path: Path) -> Iterator[str]:
    """The options of a --config file as words, as far as their values are text or an object of texts."""
    import yaml

    try:
        text = read_bytes(path, MIB)
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise UserError("aliases, which make a small file large, are not read")
        content = yaml.load(text, yaml.BaseLoader) or {}  # to which dates and numbers are text
        if not isinstance(content, dict):
            raise UserError("a mapping of options is wanted")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"--serve-args: --config {shown(path)}: {shown(' '.join(str(error).split()))}") from None
    for key, value in content.items():
        inner = value.items() if isinstance(value, dict) else ()
        yield from (with_dashes(f"--{key}.{field}={text}") for field, text in inner if isinstance(text, str))
        if isinstance(value, str) and value.lower() != "false":
            yield with_dashes(f"--{key}" if value.lower() == "true" else f"--{key}={value}")


def json_object(text: str) -> dict:
    """The object in the value of --attention-config."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f"--serve-args: --attention-config takes a JSON object, not {shown(text, 80)!r}")
    return value


# --- what decides -----------------------------------------------------------------------------------------------------


def reached(command: Command, defects: list[str], root: Path) -> list[Answer]:
    """An answer for each of `defects`, ids of probes, of the vLLM in `root`."""
    known = facts(command, root)
    return [answer(defect, [known[name] for name in NEEDED[defect]]) for defect in defects]


def answer(defect: str, found: list[Fact]) -> Answer:
    """What the facts about one defect come to."""
    for wanted, word in ((False, "not reached"), (None, "cannot tell")):
        if why := [sentence for holds, sentence in found if holds is wanted]:
            return Answer(defect, word, "; ".join(why))
    return Answer(defect, "reached", "; ".join(sentence for _, sentence in found))


def facts(command: Command, root: Path) -> dict[str, Fact]:
    """What NEEDED speaks of."""
    o, model = command.options, architecture(command.options)
    comm, backend, cache = combine(o, model, root), attention_backend(o), o.cache or "auto"
    fp8 = None if cache in ("auto", "nvfp4_ds_mla") else cache.startswith("fp8")
    direct = command.environment.get(DIRECT, "1")  # on by itself where the GPUs share symmetric memory
    disabled = disabled_by(command.environment)
    prefill = "avoids the dense prefill" if o.force_mqa else "is not given: short prompts take the dense prefill"
    return {
        "dcp": (o.dcp > 1, f"DCP {o.dcp}"),
        "no pcp": (o.pcp == 1, f"PCP {o.pcp}{', which combines in another way' if o.pcp > 1 else ''}"),
        "pcp": (o.pcp > 1, f"PCP {o.pcp}"),
        "module": served_by_module(o, model, root),
        "dense prefill": (not o.force_mqa, f"sparse_mla_force_mqa {prefill}"),
        "flashmla": is_named(backend, "FLASHMLA_SPARSE", "the attention backend", "depends on the GPU"),
        "flashinfer": is_named(backend, "FLASHINFER_MLA_SPARSE", "the attention backend", "depends on the GPU"),
        "fp8 cache": (fp8, f"the cache is {shown(cache, 40)}"),
        "ag_rs": is_named(comm, "ag_rs", "the combine", "depends on the model"),
        "a2a": is_named(comm, "a2a", "the combine", "depends on the model"),
        "nccl": (True, disabled or "wrong where vLLM's NCCL does not load, as its log says"),
        "blackwell": (None, "Blackwell alone reads it wrong, and the GPU is not part of the command"),
        "speculation": (None, "speculative decoding is not looked at"),
        "direct": (direct.lower() in TRUE, f"{DIRECT}={shown(direct, 20)}"),
    }


def is_named(name: str | None, wanted: str, what: str, otherwise: str) -> Fact:
    """Whether a backend is the wanted one; None for one that was not given."""
    return (None, f"{what} {otherwise}") if name is None else (name == wanted, f"{what} is {shown(name, 40)}")


def architecture(options: argparse.Namespace) -> str | None:
    """By the config.json of a local folder, else by a name that is known here."""
    if options.model is None or options.hf_overrides:
        return None
    try:
        named = read_json(Path(options.model, "config.json"), 4 * MIB, nan=True)["architectures"][0]
        return named if isinstance(named, str) else None
    except FileNotFoundError:
        plain = re.sub(r"[^a-z0-9]", "", options.model.lower())
        return next((name for pattern, name in BY_NAME.items() if re.search(pattern, plain)), None)
    except (UserError, KeyError, TypeError, IndexError):
        return None


def attention_backend(options: argparse.Namespace) -> str | None:
    """None where it is left to vLLM and the cache's format does not decide it."""
    if options.backend != "AUTO":
        return options.backend
    return "FLASHMLA_SPARSE" if options.cache == "fp8_ds_mla" else None


def combine(options: argparse.Namespace, model: str | None, root: Path) -> str | None:
    """The DCP communication backend: GLM has a default of its own in some releases."""
    default = glm_comm_backend(root)
    if options.comm or model == "GlmMoeDsaForCausalLM":
        return options.comm or default
    return None if model is None and default != "ag_rs" else "ag_rs"


def served_by_module(options: argparse.Namespace, model: str | None, root: Path) -> Fact:
    """Whether the fused DeepSeek-V3.2 / GLM-5 module serves the model."""
    if options.overrides:
        names_it = "deepseek_v32" in options.overrides
        return names_it or None, f"--model-class-overrides names {'the module' if names_it else 'another one'}"
    who = reach(root)
    if not who.default:
        return who.default, who.how
    if model is None:
        return None, f"whether the module serves {shown(options.model or 'the model', 60)} is not known here"
    served = model in ARCHITECTURES
    return served, f"{shown(model, 60)} is {'' if served else 'not '}served by the module"
