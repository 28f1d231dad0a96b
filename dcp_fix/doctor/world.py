"""Run single modules of a vLLM source tree without importing vLLM: the only place where a target's code is loaded.

`World(root, real, stand_ins)` answers every import of `vllm` and its submodules while it is open:

- a module in `stand_ins` is the object given there;
- a module that matches `real` is the target's own file, executed; no `__init__.py` is;
- anything else, and any name inside it, is a `Missing`: it can be imported, stand in an annotation and be a base class,
  and raises `StandInReached` with its own name as soon as somebody calls it, reads it or asks whether it is true.

It confines nothing: the target's code is executed with the caller's rights.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from unittest import mock

from dcp_fix.doctor.stand_ins import Missing, default_stand_ins

WARMUP = "vllm.model_executor.warmup."  # holds decorators of kernels
# They register types and operators with torch, which refuses a second time: loaded once, and kept between probes.
LOADED_ONCE = ("vllm.utils.", "vllm.envs")


class _Source(importlib.machinery.SourceFileLoader):
    """Always compiles the source: a stale .pyc must not decide a verdict."""

    def path_stats(self, path):
        raise OSError("bytecode is not used")


class _Empty(importlib.abc.Loader):
    """Loads a package or an unknown module as a shell: names are found late, submodules by import."""

    def __init__(self, world):
        self.world = world

    def create_module(self, spec):
        if spec.name in self.world.stand_ins:
            module = self.world.stand_ins[spec.name]
            module.__name__ = spec.name
            return module
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: self.world.late(spec.name, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module):
        pass


class World(importlib.abc.MetaPathFinder):
    """The imports of one probe. `real` holds module names, or prefixes that end in a dot; see the module docstring."""

    def __init__(self, root: Path, real: tuple[str, ...] = (), stand_ins: dict[str, types.ModuleType] | None = None):
        self.root = Path(root)
        self.real = real
        self.stand_ins = {**default_stand_ins(), **(stand_ins or {})}

    def __enter__(self):
        self.aside = {name: sys.modules.pop(name) for name in self._loaded()}  # a vLLM that was imported before
        self.compile = mock.patch("torch.compile", _not_compiled)
        self.compile.start()
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *exc):
        self.compile.stop()
        sys.meta_path.remove(self)
        for name in self._loaded():
            del sys.modules[name]
        sys.modules.update(self.aside)

    def _loaded(self) -> list[str]:
        return [name for name in sys.modules if self._mine(name) and not name.startswith(LOADED_ONCE)]

    def _mine(self, name):
        return name == "vllm" or name.startswith("vllm.") or name.split(".")[0] in self.stand_ins

    def path_of(self, name: str) -> Path:
        return self.root.joinpath(*name.split("."))

    def _is_real(self, name):
        return any(name.startswith(r) if r.endswith(".") else name == r for r in self.real)

    def find_spec(self, fullname, path=None, target=None):
        if not self._mine(fullname):
            return None
        stem = self.path_of(fullname)
        source = stem.with_suffix(".py")
        if fullname not in self.stand_ins and self._is_real(fullname) and source.is_file():
            return importlib.util.spec_from_file_location(fullname, source, loader=_Source(fullname, str(source)))
        spec = importlib.machinery.ModuleSpec(fullname, _Empty(self), is_package=True)
        spec.submodule_search_locations = [str(stem)]
        return spec

    def late(self, module: str, name: str):
        """An attribute of a shell: the submodule of that name if the target has it, else a Missing."""
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{module}.{name}"
        if full in self.stand_ins or self.path_of(full).with_suffix(".py").is_file() or self.path_of(full).is_dir():
            return importlib.import_module(full)
        return Missing(full)

    def load(self, name: str) -> types.ModuleType:
        """Execute the target's module `name` and what it imports."""
        return importlib.import_module(name)


def load_module(root: Path, name: str, stand_ins: dict[str, types.ModuleType]) -> types.ModuleType:
    """The module `name` of the vLLM in `root`, alone among stand-ins."""
    with World(root, (name, WARMUP), stand_ins) as world:
        return world.load(name)


def _not_compiled(function=None, **options):
    """`torch.compile` while a target loads: nothing we run is compiled, and importing the compiler takes seconds."""
    return (lambda decorated: decorated) if function is None else function
