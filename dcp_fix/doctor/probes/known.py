"""Call only what we know: a name that is gone, or a signature with news, is `not-run` and never `ok`."""

import inspect
from collections.abc import Callable

from dcp_fix.doctor.attempt import NotRun
from dcp_fix.doctor.world import World


def load(world: World, module: str, *names: str):
    """The target's module. NotRun unless it exists and has every one of `names`; `Class.method` is a name too."""
    if not world.path_of(module).with_suffix(".py").is_file():
        raise NotRun(f"this vLLM has no {module}")
    loaded = world.load(module)
    for name in names:
        found = loaded
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            raise NotRun(f"{module} of this release has no {name}")
    return loaded


def parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """By name; of a Triton kernel those of the function that was decorated."""
    return dict(inspect.signature(getattr(function, "fn", function)).parameters)


def arguments(function: Callable, what: str, needed: dict, optional: dict | None = None) -> dict:
    """`needed`, and those of `optional` that `function` takes. NotRun for a parameter that is neither, unless it has a
    default, and for a needed one that is gone."""
    takes, optional = parameters(function), optional or {}
    required = [name for name, p in takes.items() if p.default is p.empty and name != "self"]
    new = [name for name in required if name not in needed and name not in optional]
    gone = [name for name in needed if name not in takes]
    if new or gone:
        raise NotRun(f"unknown signature of {what}: new {new or 'nothing'}, gone {gone or 'nothing'}")
    return needed | {name: value for name, value in optional.items() if name in takes}
