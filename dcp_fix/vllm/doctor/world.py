"""Run single modules of a vLLM source tree without importing vLLM: the only place where a target's code is loaded.

`World(root, real, stand_ins)` answers every import of `vllm` and its submodules while it is open:

- a module in `stand_ins` is the object given there;
- a module that matches `real` is the target's own file, executed;
- anything else, and any name inside it, is a `Missing`: it can be imported, stand in an annotation and be a base class,
  and raises `StandInReached` with its own name as soon as somebody calls it, reads it or asks whether it is true.

So a stand-in never answers what it does not know: a target that needs more than we foresaw stops with the name of what
it needed, instead of getting a wrong verdict. No `__init__.py` of the target is executed.

Runs in the child process only, see `runner.py`. It confines nothing: the target's code is executed.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import sys
import types
from pathlib import Path

# They register types and operators with torch, which refuses a second time: loaded once, and kept between probes.
LOADED_ONCE = ("vllm.utils.", "vllm.envs")


class StandInReached(BaseException):
    """The target used a collaborator that has no stand-in. A BaseException, so that the target cannot swallow it."""


class Missing:
    """A name of a module that is not loaded. Good for imports, annotations and base classes, and nothing else."""

    def __init__(self, name: str):
        self.__dict__["_name"] = name

    def _reached(self, *args, **kwargs):
        raise StandInReached(self._name)

    def __getattr__(self, attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Missing(f"{self._name}.{attribute}")

    def __or__(self, other):
        return self

    __ror__ = __or__

    def __getitem__(self, item):
        return self

    def __mro_entries__(self, bases):
        return ()

    def __hash__(self):
        return hash(self._name)

    __call__ = __bool__ = __iter__ = __len__ = __eq__ = __setattr__ = __contains__ = __enter__ = _reached
    __instancecheck__ = __subclasscheck__ = _reached
    __lt__ = __gt__ = __le__ = __ge__ = __add__ = __radd__ = __mul__ = __index__ = __int__ = __float__ = _reached


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
        module.__getattr__ = lambda name: self.world.late(spec.name, name)
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
        import torch

        self.compile, torch.compile = torch.compile, _not_compiled
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *exc):
        import torch

        torch.compile = self.compile
        sys.meta_path.remove(self)
        for name in [n for n in sys.modules if self._mine(n) and not n.startswith(LOADED_ONCE)]:
            del sys.modules[name]

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


def module(**names) -> types.ModuleType:
    """A stand-in module that holds exactly `names`; reading any other name raises StandInReached when it is used."""
    result = types.ModuleType("stand-in")
    result.__getattr__ = lambda name: _unknown(result, name)
    vars(result).update(names)
    return result


def _not_compiled(function=None, **options):
    """`torch.compile` while a target loads: nothing we run is compiled, and importing the compiler takes seconds."""
    return (lambda decorated: decorated) if function is None else function


def _unknown(owner, name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"{owner.__name__}.{name}")


class QuietLogger(logging.Logger):
    """vLLM's logger has three methods more than Python's."""

    def _once(self, *args, **kwargs):
        return None

    debug_once = info_once = warning_once = _once


class Hopper:
    """`vllm.platforms.current_platform` of one kind of machine: CUDA, compute capability 9.0, no PDL."""

    def is_cuda(self):
        return True

    def is_cuda_alike(self):
        return True

    def is_rocm(self):
        return False

    def is_xpu(self):
        return False

    def is_cpu(self):
        return False

    def is_arch_support_pdl(self):
        return False

    def is_pin_memory_available(self):
        return False

    simple_compile_backend = "eager"

    def is_device_capability_family(self, capability):
        return capability == 90

    def fp8_dtype(self):
        import torch

        return torch.float8_e4m3fn


def default_stand_ins() -> dict[str, types.ModuleType]:
    """What every probe needs: the real Triton, a quiet logger, a platform. transformers is only used in annotations."""
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    logger = QuietLogger("target")
    logger.addHandler(logging.NullHandler())
    platform = module(current_platform=Hopper())
    return {
        "vllm.triton_utils": module(triton=triton, tl=tl, tldevice=libdevice, HAS_TRITON=True),
        "vllm.platforms": platform,
        "vllm.logger": module(init_logger=lambda name: logger, logger=logger),
        "transformers": module(),
    }


def complete_interpreter():
    """Give interpreted kernels the one attribute of compiled ones that launchers of vLLM read: `constexprs`."""
    import triton.runtime.interpreter as interpreter

    def constexprs(kernel):
        parameters = inspect.signature(kernel.fn).parameters.values()
        return [number for number, p in enumerate(parameters) if "constexpr" in str(p.annotation)]

    if not hasattr(interpreter.InterpretedFunction, "constexprs"):
        interpreter.InterpretedFunction.constexprs = property(constexprs)


@contextlib.contextmanager
def unwritten_memory_is_nan():
    """torch.empty and its kin give NaN (or the largest integer), to tell a row nobody wrote from one of zeros."""
    import torch

    makers = {name: getattr(torch, name) for name in ("empty", "empty_like", "empty_strided")}
    for name, make in makers.items():
        setattr(torch, name, lambda *a, _make=make, **k: poison(_make(*a, **k)))
    try:
        yield
    finally:
        for name, make in makers.items():
            setattr(torch, name, make)


def poison(x):
    """Fill x, which may be of any dtype and stride, with NaN or the largest integer."""
    import torch

    if x.dtype.is_floating_point and x.element_size() > 1:
        return x.fill_(torch.nan)
    return x.view(torch.uint8).fill_(0x7F).view(x.dtype) if x.element_size() == 1 else x.fill_(torch.iinfo(x.dtype).max)
