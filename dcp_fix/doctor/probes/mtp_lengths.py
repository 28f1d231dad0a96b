"""Does every query token of a speculative decode see as many of its rank's keys as it should?

A request of 10 tokens whose last three are decoded at once (multi-token prediction) has three global lengths: 8, 9, 10.
Each is localised by itself; to localise 10 and subtract afterwards loses keys, since the positions are dealt out:

    D = 2, interleave 1, rank 1      [8, 9, 10] -> [4, 4, 5]      and not [3, 4, 5]      (review of vLLM PR 46076)

The target's indexer builder expands the lengths (`_prepare_global_decode_seq_lens` for the exchange of candidates,
`_prepare_decode_tensors` for the scores) and localises them (`_dcp_localize_decode_seq_lens`). They are called in the
order in which the builder's `build` has them; a `build` that localises first is the defect itself. The control is the
expansion, without DCP. Not here: the path for GPUs whose scores take lengths that vary, which fuses the steps.
"""

import ast
import inspect
import textwrap
from types import SimpleNamespace

import torch

from dcp_fix.doctor.attempt import NotRun, attempt, judged, one_line
from dcp_fix.doctor.probes.known import arguments, load
from dcp_fix.doctor.stand_ins import module
from dcp_fix.doctor.world import World

MODULE, BUILDER = "vllm.v1.attention.backends.mla.indexer", "DeepseekV32IndexerMetadataBuilder"
GLOBAL, EXPAND, LOCALISE = "_prepare_global_decode_seq_lens", "_prepare_decode_tensors", "_dcp_localize_decode_seq_lens"
# Imported for its sizes at start-up, and imports half of the engine.
STAND_INS = {"vllm.v1.worker.block_table": module()}
ROOM = 16
# D, rank, interleave, [(global length, query tokens)] of each request, the local length of each query token
CASES = (
    (2, 1, 1, [(10, 3)], [4, 4, 5]),
    (2, 0, 1, [(10, 3)], [4, 5, 5]),
    (2, 1, 2, [(10, 3)], [4, 4, 4]),
    (4, 3, 1, [(10, 4)], [1, 2, 2, 2]),
    (2, 1, 1, [(10, 3), (7, 1), (12, 4)], [4, 4, 5, 3, 4, 5, 5, 6]),
)


def load_builder(world: World):
    """The target's class."""
    names = [f"{BUILDER}.{method}" for method in (GLOBAL, EXPAND, LOCALISE, "build")]
    return getattr(load(world, MODULE, *names), BUILDER)


def built(builder, size: int, rank: int, interleave: int):
    """An object of the target's class with the attributes that its constructor would have set, every length unset."""
    made = object.__new__(builder)
    lengths = ("decode_seq_lens_buffer", "global_decode_seq_lens_buffer", "expanded_seq_lens_buffer")
    vars(made).update(
        {name: torch.full((ROOM,), -9, dtype=torch.int32) for name in lengths},
        dcp_world_size=size,
        dcp_rank=rank,
        dcp_rank_tensor=torch.tensor(rank, dtype=torch.int32),
        cp_kv_cache_interleave_size=interleave,
        arange_buffer=torch.arange(ROOM, dtype=torch.int32),
        offsets_buffer=torch.arange(4, dtype=torch.int32),
        decode_lens_buffer=torch.zeros(ROOM, dtype=torch.int32),
        expanded_block_table_buffer=torch.zeros(ROOM, 2, dtype=torch.int32),
        supports_varlen=False,
        vllm_config=SimpleNamespace(speculative_config=None),
    )
    return made


def expanded(made, requests: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(global length of each query token for the exchange, the same for the scores), as the target expands them."""
    lengths, counts = (torch.tensor(column, dtype=torch.int32) for column in zip(*requests, strict=True))
    total = int(counts.sum())
    shared = dict(
        decode_lens=counts,
        decode_lens_cpu=counts,
        query_start_loc=(counts.cumsum(0) - counts).to(torch.int32),
        num_decode_tokens=total,
        use_native=False,
        max_decode_len=int(counts.max()),
    )
    exchange, scores = getattr(made, GLOBAL), getattr(made, EXPAND)
    table = torch.zeros(len(requests), 2, dtype=torch.int32)
    more = dict(seq_lens=lengths, block_table=table, num_decodes=len(requests), next_n=4)
    first = exchange(**arguments(exchange, GLOBAL, shared | dict(global_seq_lens=lengths)))
    return first, scores(**arguments(scores, EXPAND, shared | more))[0][:total]


def localised(builder, size: int, rank: int, interleave: int, requests) -> list[list[int]]:
    """The local length of each query token, from both expansions."""
    found = []
    for which in (0, 1):
        made = built(builder, size, rank, interleave)
        lengths = expanded(made, requests)[which]
        call = getattr(made, LOCALISE)
        given = dict(seq_lens=lengths, num_decodes=len(requests), seq_lens_is_buffer_view=True)
        found.append(call(**arguments(call, LOCALISE, given)).tolist())
    return found


def localises_first(builder) -> bool:
    """Whether `build` localises before it expands. NotRun where it does not call both."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(builder.build)))
    calls = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    lines = {name: [c.lineno for c in calls if c.attr == name] for name in (EXPAND, LOCALISE)}
    if not all(lines.values()):
        raise NotRun(f"{BUILDER}.build no longer calls {' and '.join(n for n in lines if not lines[n])}")
    return min(lines[LOCALISE]) < max(lines[EXPAND])


def mtp_lengths(builder, device: str, progress) -> tuple[str, str]:
    """(verdict, evidence)"""
    with torch.device(device):
        return judge(builder, progress)


def judge(builder, progress) -> tuple[str, str]:
    """The same, where every tensor is made on the default device."""
    progress("the expansion, without DCP", control=True)
    control = attempt(lambda: [x.tolist() for x in expanded(built(builder, 1, 0, 1), [(10, 3), (7, 1)])])
    if control.raised or control.value != [[8, 9, 10, 7]] * 2:
        why = one_line(control.raised) if control.raised else f"lengths 10 and 7 become {control.value}"
        raise NotRun(f"the control, an expansion without DCP, fails, so nothing can be said: {why}")
    found = ["build localises the lengths before it expands them"] if localises_first(builder) else []
    for size, rank, interleave, requests, want in CASES:
        name = f"rank {rank} of {size}, interleave {interleave}, (length, tokens) {requests}"
        progress(name)
        case = attempt(lambda case=(size, rank, interleave, requests): localised(builder, *case))
        if case.raised:
            raise NotRun(f"{name}: {one_line(case.raised)}")
        found += [f"{name}: local lengths {got} for {want}" for got in case.value if got != want][:1]
    return judged(found, f"{len(CASES)} decodes of several tokens: each token's length is localised by itself")
