"""What the target's communicator does when its NCCL cannot be loaded, and whether this environment's can.

The target's `PyNcclCommunicator` is constructed for two ranks while its NCCL library refuses to load, and handed to the
target's `CudaCommunicator.reduce_scatter`, with every torch.empty poisoned. Good is an error at either step, or the sum
through torch.distributed (a stand-in that knows it). Returning the poison is the defect: the DCP combine then yields
stale memory, while every other part of the run looks healthy.

Which symbols the target asks of NCCL is found by loading its wrapper on a library that lacks one symbol at a time. The
environment's NCCL is looked for where vLLM looks (nccl.py).
"""

from types import SimpleNamespace
from unittest import mock

import torch

from dcp_fix.doctor.attempt import NotRun, attempt, one_line
from dcp_fix.doctor.probes import nccl
from dcp_fix.doctor.stand_ins import module
from dcp_fix.doctor.unwritten import unwritten_memory_is_nan
from dcp_fix.doctor.world import World

FOLDER = "vllm.distributed.device_communicators"
REAL = tuple(
    f"{FOLDER}.{name}" for name in ("pynccl", "pynccl_wrapper", "cuda_communicator", "base_device_communicator")
)
RANKS, ROWS = 2, 6
# The first NCCL that exports a symbol, for those that came late.
SINCE = {"ncclCommWindowRegister": (2, 27, 3), "ncclCommSuspend": (2, 29, 7), "ncclCommResume": (2, 29, 7)}


class Group:
    """Stand-in for vLLM's StatelessProcessGroup: two ranks, this is rank 0."""

    rank, world_size = 0, RANKS

    def broadcast_obj(self, value, src):
        return value


def stand_ins() -> dict:
    """The symmetric-memory path is off unless it is asked for, as in vLLM."""
    return {
        "vllm.distributed.utils": module(StatelessProcessGroup=Group),
        f"{FOLDER}.all_reduce_utils": module(should_nccl_symm_mem_ag_rs=lambda: False),
        f"{FOLDER}.pynccl_allocator": module(is_symmetric_memory_enabled=lambda: False),
    }


def load_communicators(world: World):
    """(pynccl, pynccl_wrapper, cuda_communicator) of the target."""
    for name in REAL:
        if not world.path_of(name).with_suffix(".py").is_file():
            raise NotRun(f"this vLLM has no {name}")
    return tuple(world.load(name) for name in REAL[:3])


def refuse(*arguments):
    """Stands in for loading NCCL, as where the library is missing."""
    raise OSError("libnccl.so.2: cannot open shared object file")


def disabled_communicator(pynccl):
    """A PyNcclCommunicator whose library did not load, or the exception that it raised instead."""
    pynccl.NCCLLibrary = refuse
    return attempt(lambda: pynccl.PyNcclCommunicator(Group(), torch.device("cpu")))


def reduce_scatter(communicators, pynccl_comm):
    """The target's reduce_scatter of two ranks' equal inputs, through torch.distributed where it goes there."""
    communicator = object.__new__(communicators.CudaCommunicator)
    fields = dict(world_size=RANKS, rank_in_group=0, rank=0, pynccl_comm=pynccl_comm, device_group=None, ca_comm=None)
    vars(communicator).update(fields)
    with unwritten_memory_is_nan(), mock.patch.object(torch.distributed, "reduce_scatter_tensor", two_ranks_sum):
        return attempt(lambda: communicator.reduce_scatter(contribution(), dim=0))


def contribution():
    """What each of the two ranks puts into reduce_scatter, [6, 3]."""
    return torch.arange(ROWS * 3, dtype=torch.float32).view(ROWS, 3)


def two_ranks_sum(output, input, *arguments, **options):
    """`torch.distributed.reduce_scatter_tensor` of two ranks that hold the same input, seen from rank 0."""
    output.copy_(RANKS * input[: output.shape[0]])


# --- NCCL -------------------------------------------------------------------------------------------------------------


class Library:
    """A library that exports every symbol but one."""

    def __init__(self, without: str):
        self.without = without

    def __getattr__(self, symbol):
        if symbol == self.without:
            raise AttributeError(symbol)
        return SimpleNamespace()


def required_symbols(wrapper) -> list[str]:
    """The symbols without which the target's NCCLLibrary refuses to load."""
    names = [function.name for function in wrapper.NCCLLibrary.exported_functions]
    return [name for name in names if not loads_without(wrapper, name)]


def loads_without(wrapper, symbol: str) -> bool:
    """Whether the target's NCCLLibrary accepts a library that lacks a symbol."""
    with mock.patch.object(wrapper, "ctypes", SimpleNamespace(CDLL=lambda path: Library(symbol))):
        return attempt(lambda: wrapper.NCCLLibrary(f"without {symbol}")).raised is None


def about_nccl(wrapper, environment) -> tuple[bool, str]:
    """(no reason to expect a disabled communicator here, a sentence)"""
    if setting := nccl.disabled_by(environment):
        return False, f"{setting} disables it in this environment"
    outcome = attempt(lambda: required_symbols(wrapper))
    if outcome.raised:
        return True, f"which NCCL this vLLM needs is unknown ({one_line(outcome.raised)})"
    needed = max((SINCE[name] for name in outcome.value if name in SINCE), default=None)
    wanted = "it needs NCCL " + (".".join(map(str, needed)) + " or newer" if needed else "of any version")
    loaded = nccl.loaded_nccl(environment)
    missing = [name for name in outcome.value if loaded and not hasattr(loaded.library, name)]
    return not missing, f"{wanted}, and {nccl.describe(loaded, missing, nccl.installed_nccl())}"


def silent_collective(modules, environment: dict[str, str], progress) -> tuple[str, str]:
    """`environment`: the caller's settings of NCCL, which the target itself does not see."""
    pynccl, wrapper, communicators = modules
    progress("symbols wanted of NCCL", control=True)
    enough, about = about_nccl(wrapper, environment)
    progress("reduce_scatter of a disabled communicator", control=True)
    made = disabled_communicator(pynccl)
    result = made if made.raised else reduce_scatter(communicators, made.value)
    if not made.raised and isinstance(result.raised, AttributeError | TypeError | NameError):
        raise NotRun(f"reduce_scatter asks its collaborators for something new: {one_line(result.raised)}")
    if result.raised:
        where = "a communicator without NCCL" if made.raised else "reduce_scatter without NCCL"
        return ("ok" if enough else "defect"), f"{where} raises {one_line(result.raised)}; {about}"
    if torch.equal(result.value, RANKS * contribution()[: ROWS // RANKS]):
        return ("ok" if enough else "defect"), f"reduce_scatter without NCCL gives the right sum; {about}"
    what = "unwritten memory" if result.value.isnan().any() else "a wrong sum"
    silent = "without NCCL the communicator disables itself silently and reduce_scatter returns"
    return "defect", f"{silent} {what}; {about}"
