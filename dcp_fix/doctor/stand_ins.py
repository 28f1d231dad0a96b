"""What a target meets in the place of the vLLM modules that are not loaded.

    Missing         a name that may be imported, annotated with and derived from, and nothing else
    module(...)     a module that holds exactly what a probe has foreseen
    default_stand_ins()    what every probe needs: the real Triton, a quiet logger, a Hopper

So a stand-in never answers what it does not know: a target that needs more than we foresaw stops with the name of what
it needed (`StandInReached`), instead of getting a wrong verdict.
"""

import inspect
import logging
import types


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


def module(**names) -> types.ModuleType:
    """A stand-in module that holds exactly `names`; reading any other name raises StandInReached when it is used."""
    result = types.ModuleType("stand-in")
    result.__getattr__ = lambda name: _unknown(result, name)  # type: ignore[method-assign]
    vars(result).update(names)
    return result


def _unknown(owner, name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"{owner.__name__}.{name}")


class QuietLogger(logging.Logger):
    """vLLM's logger has three methods more than Python's."""

    debug_once = info_once = warning_once = lambda self, *args, **kwargs: None


class Hopper:
    """`vllm.platforms.current_platform` of one kind of machine: CUDA, compute capability 9.0, no PDL."""

    simple_compile_backend = "eager"
    is_cuda = is_cuda_alike = lambda self: True
    is_rocm = is_xpu = is_cpu = is_arch_support_pdl = is_pin_memory_available = lambda self: False

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
    return {
        "vllm.triton_utils": module(triton=triton, tl=tl, tldevice=libdevice, HAS_TRITON=True),
        "vllm.platforms": module(current_platform=Hopper()),
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
