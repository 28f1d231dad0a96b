"""The arguments of `vllm serve` that matter under DCP, as the examined release reads them.

`checked(text)` finds at the door what no release takes: a command that no shell takes either, sizes below 1, JSON that
is none. `read(command, root)` parses the rest with the options of the release at `root` (serve_options.py).
"""

import json
from dataclasses import dataclass
from pathlib import Path

from dcp_fix.base.errors import UserError
from dcp_fix.doctor import serve_line
from dcp_fix.doctor.serve_options import Parser, Tables, config_tables, parser_of
from dcp_fix.doctor.served_model import ServedModel, describe

LARGEST = 1 << 20  # of a parallel size
DOOR = (
    ("--tensor-parallel-size", "-tp"),
    ("--decode-context-parallel-size", "-dcp"),
    ("--prefill-context-parallel-size", "-pcp"),
)
# Options that change what the checks rest on in ways that are not followed here.
OPAQUE = ("hf_overrides", "hf_config_path", "model_class_overrides", "speculative_config", "kv_transfer_config")


@dataclass(frozen=True)
class Command:
    """A command as it was given: the variables in front of it, and its words."""

    environment: dict[str, str]
    words: tuple[str, ...]


@dataclass(frozen=True)
class Arguments:
    """`backend` in capitals, None where it is left to vLLM; `graphs`: are CUDA graphs on? `opaque`: see OPAQUE."""

    tp: int
    dcp: int
    pcp: int
    comm_backend: str | None
    backend: str | None
    kv_cache_dtype: str
    graphs: bool
    model: ServedModel
    opaque: tuple[str, ...] = ()


def checked(text: str) -> Command:
    """The command in `text`. UserError for what is wrong under any release."""
    environment, words = serve_line.split(text)
    door = Parser(add_help=False, allow_abbrev=False)
    for names in DOOR:
        door.add_argument(*names, type=int, default=1)
    door.add_argument("--dcp-comm-backend", choices=["ag_rs", "a2a"])
    door.add_argument("--attention-config", "-ac", default="{}")
    try:
        known, _ = door.parse_known_args(serve_line.prepared(words, set()))
        sizes = [getattr(known, names[0].strip("-").replace("-", "_")) for names in DOOR]
        if not 1 <= min(sizes) <= max(sizes) <= LARGEST:
            wrong = next(size for size in sizes if not 1 <= size <= LARGEST)
            raise UserError(f"parallel sizes go from 1 to {LARGEST}, not {wrong}")
        json_object("--attention-config", known.attention_config)
    except UserError as error:
        said = str(error)
        raise UserError(said if said.startswith("--serve-args") else f"--serve-args: {said}") from None
    return Command(environment, tuple(words))


def json_object(option: str, text: str) -> dict:
    """The object in `text`. UserError for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f'{option} takes a JSON object such as \'{{"backend": "FLASHMLA_SPARSE"}}\', not {text[:80]!r}')
    return value


def read(command: Command, root: Path) -> Arguments:
    """As the release at `root` reads it. UserError where it refuses, UnknownOptions where its options are not known."""
    parser = parser_of(root)
    words = serve_line.prepared(list(command.words), set(parser._option_string_actions))
    known, rest = parser.parse_known_args(words)
    if unknown := [word for word in rest if word.startswith("-")]:
        raise UserError(f"unrecognized arguments: {' '.join(unknown)[:200]}")
    if len(rest) > 1:
        raise UserError(f"one model is served, and these are {len(rest)}: {' '.join(rest)[:200]}")
    attention = json_object("--attention-config", known.attention_config or "{}")
    check_keys("--attention-config", attention, config_tables(root), "AttentionConfig")
    return Arguments(
        known.tensor_parallel_size or 1,
        known.decode_context_parallel_size or 1,
        known.prefill_context_parallel_size or 1,
        known.dcp_comm_backend,
        named_backend(known.attention_backend, attention.get("backend")),
        known.kv_cache_dtype or "auto",
        graphs(known),
        describe(rest[0] if rest else ""),
        tuple(f"--{name.replace('_', '-')}" for name in OPAQUE if getattr(known, name, None)),
    )


def check_keys(option: str, given: dict, tables: Tables, name: str) -> None:
    """UserError for a key that the config class `name` has no field for."""
    fields = tables.fields.get(name, {})
    if fields and (unknown := [key for key in given if key not in fields]):
        raise UserError(f"{option} has no {unknown[0][:60]!r}; it has {', '.join(fields)}")


def named_backend(option: str | None, inside) -> str | None:
    """The attention backend, by vLLM's own name for it; None for `auto` and for none at all."""
    if option is not None and inside is not None:
        raise UserError("--attention-backend and the backend of --attention-config exclude each other")
    name = inside if option is None else option
    if name is not None and not isinstance(name, str):
        raise UserError(f"the backend of --attention-config is a name, not {str(name)[:60]!r}")
    return None if name is None or name.lower() == "auto" else name.upper()


def graphs(known) -> bool:
    """Whether CUDA graphs are recorded: not with --enforce-eager, nor with a compilation config that says NONE."""
    config = json_object("--compilation-config", known.compilation_config) if is_json(known.compilation_config) else {}
    return not known.enforce_eager and str(config.get("cudagraph_mode", "")).upper() != "NONE"


def is_json(text: str | None) -> bool:
    """Whether a compilation config is written as an object; a bare level changes no graphs."""
    return bool(text) and text.lstrip().startswith("{")
