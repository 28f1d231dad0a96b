"""A command that starts a server, as a person would paste it: its environment and its words.

    split("CUDA_VISIBLE_DEVICES=0,1 vllm serve MODEL -tp 4 \\\\\\n -dcp 4")
        ->  ({"CUDA_VISIBLE_DEVICES": "0,1"}, ["MODEL", "-tp", "4", "-dcp", "4"])

`prepared` then does to the words what vLLM does before argparse sees them: underscores in option names become dashes,
`--config FILE` is replaced by what the file says, -O3 is spelled out, `-ac.backend X` is `-ac '{"backend": "X"}'`.

Not here: which options there are (serve_options.py), and what a shell alone could know: variables, wildcards, pipes.
"""

import json
import re
import shlex
from pathlib import Path

from dcp_fix.base.errors import UserError

SHELL_ONLY = re.compile(r"^(&&?|\|\|?|;|\d?>.*|<.*)$")
ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.S)
STARTERS = (("vllm", "serve"), ("python", "-m", "vllm.entrypoints.openai.api_server"))
LONGEST = 1 << 20  # characters of a command, bytes of a --config file
DEEPEST = 32  # parts of a dotted option


def split(text: str) -> tuple[dict[str, str], list[str]]:
    """(variables set in front of the command, the words after `vllm serve`). Raises UserError."""
    if len(text) > LONGEST or "\0" in text:
        raise UserError(f"--serve-args: {len(text)} characters, or one that no shell takes; give one command")
    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", text))
    except ValueError as error:
        raise UserError(f"--serve-args {text[:80]!r}: {error}") from error
    if odd := next(filter(SHELL_ONLY.match, words), None):
        raise UserError(f"--serve-args: {odd!r} is for a shell; give one command, without redirections and pipes")
    environment = {}
    while words and (words[0] == "env" or ASSIGNMENT.match(words[0])):
        if found := ASSIGNMENT.match(words.pop(0)):
            environment[found[1]] = found[2]
    return environment, without_program(words)


def without_program(words: list[str]) -> list[str]:
    """`words` without `vllm serve`, or the module that once was its name, whatever path it is called by."""
    for start in STARTERS:
        called = [Path(words[0]).name.rstrip("0123456789."), *words[1 : len(start)]] if words else []
        if tuple(called) == start:
            return words[len(start) :]
    return words


def prepared(words: list[str], names: set[str]) -> list[str]:
    """What argparse is to see of `words`; `names` are the options that exist, for booleans of a --config file."""
    words = [word for each in with_config(words, names) for word in spelled_out(each)]
    model = named_model(words)
    return [*([model[0]] if model else []), *undotted(model[1] if model else words)]


def named_model(words: list[str]) -> tuple[str, list[str]] | None:
    """(the value of `--model`, the other words): `vllm serve` takes it for its first word."""
    for at, word in enumerate(words):
        if word.startswith("--model="):
            return word.removeprefix("--model="), [*words[:at], *words[at + 1 :]]
        if word == "--model" and at + 1 < len(words):
            return words[at + 1], [*words[:at], *words[at + 2 :]]
    return None


def spelled_out(word: str) -> list[str]:
    """One word with dashes in its option's name, and -O3 in full."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        head, dot, tail = name.partition(".")
        return [head.replace("_", "-") + dot + tail + equals + value]
    if re.fullmatch(r"-O=?\w+", word):
        return ["--optimization-level", word[2:].removeprefix("=")]
    return ["--optimization-level"] if word == "-O" else [word]


def undotted(words: list[str]) -> list[str]:
    """Dotted options gathered into one JSON value each, at the end."""
    kept, gathered, left = [], {}, list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("-") or "." not in name or re.fullmatch(r"-[\d.e+-]+", word):
            kept.append(word)
            continue
        if not equals:
            if not left:
                raise UserError(f"--serve-args: {word} expects a value")
            value = left.pop(0)
        option, *keys = name.split(".")
        place(gathered.setdefault(option, {}), name, keys, value_of(value))
    return [*kept, *(word for option, value in gathered.items() for word in (option, json.dumps(value)))]


def place(tree: dict, name: str, keys: list[str], value) -> None:
    """tree[keys[0]][keys[1]]... = value; a key that ends in + appends the comma-separated values to a list."""
    if len(keys) > DEEPEST:
        raise UserError(f"--serve-args: {name[:60]}... is nested more than {DEEPEST} deep")
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise UserError(f"--serve-args: {name} is inside something that has another value already")
    if keys[-1].endswith("+"):
        present = tree.setdefault(keys[-1][:-1], [])
        if not isinstance(present, list):
            raise UserError(f"--serve-args: {name} adds to something that is no list")
        present += str(value).split(",")
    else:
        tree[keys[-1]] = value


def value_of(text: str):
    """JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def with_config(words: list[str], names: set[str]) -> list[str]:
    """`--config FILE` replaced by the file's options, which stand before the command's own: those win.

    `--config=FILE` stays as it is, since vLLM does not look at the file then.
    """
    if "--config" not in words[:-1]:
        return words
    at = words.index("--config")
    rest = [*words[:at], *words[at + 2 :]]
    first = 1 if rest and not rest[0].startswith("-") else 0
    return [*rest[:first], *config_words(Path(words[at + 1]), names), *rest[first:]]


def config_words(path: Path, names: set[str]) -> list[str]:
    """The options of a YAML file, as words. Raises UserError."""
    import yaml

    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        raise UserError(f"--serve-args: --config {path}: no YAML file of that name, which ends in .yaml or .yml")
    try:
        with open(path, "rb") as file:
            content = yaml.safe_load(file.read(LONGEST)) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"--serve-args: --config {path}: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, dict):
        raise UserError(f"--serve-args: --config {path}: a mapping of options is wanted, not {type(content).__name__}")
    return [word for key, value in content.items() for word in option_words(f"--{key}".replace("_", "-"), value, names)]


def option_words(option: str, value, names: set[str]) -> list[str]:
    """One entry of a --config file."""
    if isinstance(value, bool):
        negative = option.replace("--", "--no-", 1)
        return [option] if value else [negative] if negative in names else []
    if isinstance(value, list):
        return [option, *map(str, value)] if value else []
    return [option, json.dumps(value) if isinstance(value, dict) else str(value)]
