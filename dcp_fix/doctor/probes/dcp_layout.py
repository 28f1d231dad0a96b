"""Does the target's DCP manager hand the direct all-to-all only what its compiled op takes?

The direct symmetric-memory path writes packed heads: the last two dimensions of the partial output and the heads of
its LSE must be contiguous. An attention backend that pads its heads, or keeps them first, returns a view that is not.
The target's `MLADCPManager` is asked for its combine with a workspace that records what it is given:

    packed output        goes to the direct workspace                                           (the control)
    head-major output    must come as a packed copy, or take the plain collective               (else the op refuses it)
"""

import torch

from dcp_fix.doctor.attempt import NotRun, attempt, one_line
from dcp_fix.doctor.world import World

MANAGERS = ("vllm.v1.attention.ops.dcp", "vllm.v1.attention.ops.dcp_utils")
TOKENS, HEADS, DIM, WORLD = 3, 4, 8, 2


class Group:
    """A DCP group of two ranks, seen from rank 0."""

    world_size, rank_in_group, device_group = WORLD, 0, None


class Workspace:
    """Stand-in for the direct workspace."""

    max_num_tokens = 64

    def __init__(self):
        self.given = None

    def lse_reduce(self, partial_output, partial_lse, *arguments, **options):
        self.given = (partial_output, partial_lse)
        return partial_output[:, : HEADS // WORLD]


def load_manager(world: World):
    """The target's module that defines MLADCPManager, None where there is no such thing."""
    for name in MANAGERS:
        if world.path_of(name).with_suffix(".py").is_file():
            module = world.load(name)
            return module if hasattr(module, "MLADCPManager") else None
    return None


def combined(module, output, lse) -> str:
    """'direct' or 'direct, packed' or 'plain': where the manager sends one partial result."""
    workspace, plain = Workspace(), []
    module.get_direct_dcp_a2a_workspace = lambda *arguments, **options: workspace
    module.dcp_a2a_lse_reduce = lambda out, *arguments, **options: plain.append(out)
    manager = object.__new__(module.MLADCPManager)
    vars(manager).update(group=Group(), device=torch.device("cpu"), use_a2a=True, num_ubatches=1, max_num_tokens=64)
    combine = manager._init_combine(HEADS, DIM, torch.bfloat16, True, False)
    combine(output, lse, seq_lens=None, query_start_loc=None)
    if workspace.given is None:
        return "plain" if plain else "nowhere"
    return "direct, packed" if all(map(packed, workspace.given, (2, 1))) else "direct"


def packed(x, dimensions: int) -> bool:
    """Whether the last `dimensions` of x are contiguous."""
    return x[0].is_contiguous() if dimensions < x.dim() else x.is_contiguous()


def direct_a2a_layout(module, progress) -> tuple[str, str]:
    """The verdict and its evidence."""
    if module is None or not hasattr(module, "get_direct_dcp_a2a_workspace"):
        return "not-applicable", "this release has no direct all-to-all for MLA"
    output, lse = torch.zeros(TOKENS, HEADS, DIM), torch.zeros(TOKENS, HEADS)
    progress("a packed partial output", control=True)
    control = attempt(lambda: combined(module, output, lse))
    if control.raised or control.value != "direct, packed":
        why = one_line(control.raised) if control.raised else f"a packed output takes the way '{control.value}'"
        raise NotRun(f"the control fails, so nothing can be said: {why}")
    progress("a head-major partial output")
    strided = torch.zeros(HEADS, TOKENS, DIM).transpose(0, 1), torch.zeros(HEADS, TOKENS).transpose(0, 1)
    case = attempt(lambda: combined(module, *strided))
    if case.raised:
        raise NotRun(f"a head-major output: {one_line(case.raised)}")
    if case.value == "direct":
        what = "a head-major partial output reaches the direct all-to-all as it is"
        return "defect", f"{what}, whose op wants packed heads"
    return "ok", f"a head-major partial output takes the way '{case.value}'"
