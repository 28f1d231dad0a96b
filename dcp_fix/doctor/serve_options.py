"""The options of `vllm serve` in a release, read from its source: their names, and how many words each takes.

vLLM makes most options from the fields of its config classes. Here the same table is read with `ast`, so that a command
is parsed as that release would parse it, without importing it:

    arg_utils.py    `group.add_argument("--name", "-n", **x_kwargs["field"])`, `x_kwargs = get_kwargs(Class)`
    config/*.py     `class Class: field: annotation`                                 the annotation decides what follows
    cli_args.py     the classes FrontendArgs, each field of which is an option, and `make_arg_parser`

Values are not checked, but for whole numbers and for annotations that list what is allowed.
"""

import argparse
import ast
import functools
from dataclasses import dataclass
from pathlib import Path

from dcp_fix.base.errors import UserError

ENGINE = "vllm/engine/arg_utils.py"
FRONTEND = tuple(f"vllm/entrypoints/{folder}/cli_args.py" for folder in ("common", "launchers", "openai"))
CONFIG = "vllm/config"
SERVE = ("add_cli_args", "make_arg_parser")
# Fields that the release hands to its parser in another way than their annotations say.
OTHERWISE = {"middleware": "append", "allowed_origins": "one", "allowed_methods": "one", "allowed_headers": "one"}
SUFFIXED = {"max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes", "max_num_scheduled_tokens"}  # 8k, 2M


class UnknownOptions(Exception):
    """The source does not look as this module expects: the message says what is missing."""


@dataclass(frozen=True)
class Option:
    """`takes`: flag, one, maybe, many or append; `kind` int where only whole numbers will do."""

    names: tuple[str, ...]
    takes: str
    kind: type = str
    choices: tuple | None = None


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of exiting."""

    def error(self, message):
        raise UserError(message)


def parser_of(root: Path) -> Parser:
    """A parser with the options of the release at `root`. Raises UnknownOptions."""
    parser = Parser(prog="vllm serve", add_help=False)
    for option in options(root):
        add(parser, option)
    return parser


def add(parser: Parser, option: Option) -> None:
    """One option; a name that is there already stays what it was. The model, which has no dash, is left to the caller:
    where it may stand among the options depends on the version of Python.
    """
    names = [n for n in option.names if n.startswith("-") and n not in parser._option_string_actions]
    if not names:
        return
    if option.takes == "flag":
        parser.add_argument(*names, action=Flag)
        return
    how = {"maybe": {"nargs": "?", "const": True}, "many": {"nargs": "+"}, "append": {"action": "append"}}
    kind = {} if option.kind is str else {"type": option.kind}
    parser.add_argument(*names, choices=option.choices, **kind, **how.get(option.takes, {}))


class Flag(argparse.BooleanOptionalAction):
    """--x and --no-x; from 0.33.0 on --enable-x has --disable-x as well. One spelling too many refuses no command."""

    def __init__(self, option_strings, dest, **options):
        super().__init__(option_strings, dest, **options)
        pairs = {"--enable-": "--disable-", "--disable-": "--enable-"}
        self.inverse = [pairs[p] + n.removeprefix(p) for n in option_strings for p in pairs if n.startswith(p)]
        self.option_strings = [*self.option_strings, *self.inverse]

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, not (option_string.startswith("--no-") or option_string in self.inverse))


# --- reading them -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def options(root: Path) -> tuple[Option, ...]:
    """Every option of `vllm serve` at `root`, in the order of its source."""
    frontend = next((root / name for name in FRONTEND if (root / name).is_file()), None)
    if frontend is None or not (root / ENGINE).is_file():
        raise UnknownOptions(
            f"this vLLM has no {ENGINE}" if frontend else f"this vLLM has none of {', '.join(FRONTEND)}"
        )
    sources, tables = [parsed(frontend), parsed(root / ENGINE)], config_tables(root)
    tables.add(*sources)
    found = [*served(sources[0], tables), *served(sources[1], tables), *tables.of_class("FrontendArgs")]
    known = {name for option in found for name in option.names}
    if missing := {"--tensor-parallel-size", "--decode-context-parallel-size", "--kv-cache-dtype", "--port"} - known:
        raise UnknownOptions(f"its source does not show the option {sorted(missing)[0]}")
    return tuple(found)


@functools.lru_cache(maxsize=4)
def config_tables(root: Path) -> "Tables":
    """The fields of the config classes of the release at `root`."""
    tables = Tables()
    tables.add(*(parsed(path) for path in sorted((root / CONFIG).glob("*.py"))))
    return tables


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file of the target. Raises UnknownOptions for what is no Python."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UnknownOptions(f"its {path.name} cannot be read ({error})") from error


def served(tree: ast.Module, tables: "Tables") -> list[Option]:
    """The options that calls of `add_argument` inside the functions SERVE name."""
    found = []
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in SERVE):
        classes = dict(filter(None, map(keyword_source, ast.walk(function))))
        calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
        found += [option for call in calls if (option := option_of(call, classes, tables))]
    return found


def keyword_source(node) -> tuple[str, str] | None:
    """('x_kwargs', 'Class') of `x_kwargs = get_kwargs(Class)`."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
        called, argument = ast.unparse(node.value.func), node.value.args[0]
        if called == "get_kwargs" and isinstance(argument, ast.Name) and isinstance(node.targets[0], ast.Name):
            return node.targets[0].id, argument.id
    return None


def option_of(call: ast.Call, classes: dict, tables: "Tables") -> Option | None:
    """The option that a call of add_argument makes."""
    names = tuple(a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
    if not names or not isinstance(call.func, ast.Attribute) or call.func.attr != "add_argument":
        return None
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if (unpacked := given.pop(None, "")) and "[" in unpacked:
        variable, field = unpacked.split("[", 1)[0], unpacked.split("[", 1)[1].strip("]'\"")
        if variable in classes and (option := tables.option(names, classes[variable], field)):
            return option
    if "action" in given:
        return Option(names, "append" if "append" in given["action"] else takes_of(given["action"]))
    return Option(names, "one", int if given.get("type") == "int" else str)


def takes_of(action: str) -> str:
    """Whether an action of argparse takes a word."""
    return "flag" if action.strip("'\"") in ("store_true", "store_false") or "Boolean" in action else "one"


class Tables:
    """Fields and type aliases of all config classes."""

    def __init__(self):
        self.fields, self.bases, self.aliases = {}, {}, {}

    def add(self, *trees: ast.Module) -> None:
        """Take in what the modules define."""
        for node in (node for tree in trees for node in tree.body):
            if isinstance(node, ast.ClassDef):
                inside = (n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name))
                self.fields[node.name] = {n.target.id: n.annotation for n in inside}
                self.bases[node.name] = [ast.unparse(base) for base in node.bases]
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.aliases.setdefault(node.targets[0].id, node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                self.aliases.setdefault(node.target.id, node.value)

    def annotation(self, name: str, field: str):
        """Of a field, also of one that a base class declares; None if there is none."""
        found = self.fields.get(name, {}).get(field)
        return found or next((a for base in self.bases.get(name, ()) if (a := self.annotation(base, field))), None)

    def of_class(self, name: str) -> list[Option]:
        """An option for each field of a class and of its bases."""
        own = [self.option((f"--{field.replace('_', '-')}",), name, field) for field in self.fields.get(name, ())]
        return [option for option in own if option] + [o for b in self.bases.get(name, ()) for o in self.of_class(b)]

    def option(self, names, name: str, field: str) -> Option | None:
        """The option of a field, None where the field is not known."""
        annotation = self.annotation(name, field)
        if annotation is None:
            return None
        kinds = self.kinds(annotation)
        literals = tuple(sorted((kind[1] for kind in kinds if isinstance(kind, tuple)), key=str))
        named = {kind for kind in kinds if isinstance(kind, str)} - {"None"}
        if field in OTHERWISE:
            return Option(names, OTHERWISE[field])
        if named == {"bool", "str"}:
            return Option(names, "maybe")
        if "bool" in named:
            return Option(names, "flag")
        if {"list", "set", "tuple"} & named:
            return Option(names, "many")
        if literals and not named:
            return Option(names, "one", int if all(isinstance(value, int) for value in literals) else str, literals)
        return Option(names, "one", int if named == {"int"} and field not in SUFFIXED else str)

    def kinds(self, node, depth: int = 8) -> set:
        """The types of a union by name, without their arguments; ('literal', value) for each value that is allowed."""
        if isinstance(node, ast.BinOp):
            return self.kinds(node.left, depth) | self.kinds(node.right, depth)
        if isinstance(node, ast.Subscript):
            return self.generic(node, depth)
        name = ast.unparse(node).rsplit(".", 1)[-1]
        if depth and isinstance(node, ast.Name) and isinstance(self.aliases.get(name), ast.Subscript | ast.BinOp):
            return self.kinds(self.aliases[name], depth - 1)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self.kinds(ast.parse(node.value, mode="eval").body, depth - 1) if depth else {"str"}
        return {name}

    def generic(self, node: ast.Subscript, depth: int) -> set:
        """As `kinds`, of `Name[arguments]`."""
        name = ast.unparse(node.value).rsplit(".", 1)[-1]
        arguments = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name == "Literal":
            constants = [a for a in arguments if isinstance(a, ast.Constant)]
            rest = [a for a in arguments if not isinstance(a, ast.Constant)]
            return {("literal", a.value) for a in constants} | {k for a in rest for k in self.kinds(a, depth)}
        if name in ("Union", "Optional"):
            return {kind for a in arguments for kind in self.kinds(a, depth)} | (
                {"None"} if name == "Optional" else set()
            )
        if name in ("Annotated", "SkipValidation", "InitVar", "Final"):
            return self.kinds(arguments[0], depth)
        return {name}
