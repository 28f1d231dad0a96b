"""The split-KV workspace of sparse attention: how many splits, how many bytes, which token chunk fits a budget.

A kernel program computes one token and up to 64 heads. With few tokens most multiprocessors would idle, so the selected
keys are cut into `splits` pieces whose partial (out, lse) are merged; that needs fp32 accumulators. With many tokens
nothing is split, the kernel writes its result directly, and there must be no accumulators at all: FlashMLA's sparse
decode once allocated them on every call, (1 + parts) copies of the result, 2052 MiB for 8192 tokens of 64 heads (vLLM
issue 53413, PR 53755; broken.plan_always_allocate).

    splits             num_sms // (tokens * ceil(heads / 64)), at least 1, at most one per 64 selected keys
    partial            heads * (512 + 1) * 4 bytes per token: fp32 out and lse
    accumulators       splits partials, or none where splits = 1
    decoded            rows of an fp8 cache, bf16 [576] each: all where many tokens select from few slots, else none
    bytes              the result's partial, the accumulators and the decoded rows, for the tokens of one chunk

A budget is met by fewer splits first and by chunks of tokens then, so only a token that does not fit alone is an error.

It does not: run anything, or count what the caller holds (queries, caches, gathered heads).
"""

import math
from dataclasses import dataclass, replace

import torch

from dcp_fix.kv_cache import LATENT, ROPE

HEAD_BLOCK = 64  # heads that one kernel program computes
KEY_BLOCK = 64  # selected keys that one step of the kernel loads
ROW_BYTES = 2 * (LATENT + ROPE)  # of a decoded row, in the queries' bf16
H200_SMS = 132  # multiprocessors that a CPU plans for
REUSE = 8  # how often each slot is selected, holes counted, where decoding a cache pays
MIB = 1 << 20


class WorkspaceError(MemoryError):
    """The workspace does not fit its budget; the message prints both and names the remedy."""


@dataclass(frozen=True)
class Plan:
    """How to attend with `tokens` queries: in chunks of `token_chunk`, each split into `splits` pieces of its keys."""

    tokens: int
    heads: int
    topk: int
    splits: int
    token_chunk: int
    accumulators: int  # partials per token beside the result: 0 where nothing is split
    decoded: int = 0  # rows of an fp8 cache that are decoded once, for all tokens: none or all
    ranks: int = 1  # over which the selected keys are dealt out

    @property
    def width(self) -> int:
        """Columns that hold what this rank owns of nearly every token's keys: see `expected_columns`."""
        return expected_columns(self.topk, self.ranks)

    @property
    def accumulator_bytes(self) -> int:
        return self.accumulators * self.token_chunk * partial_bytes(self.heads)

    @property
    def bytes(self) -> int:
        """What one chunk holds at once: its fp32 result and lse, the accumulators and the decoded rows."""
        partials = (1 + self.accumulators) * self.token_chunk * partial_bytes(self.heads)
        return partials + self.decoded * ROW_BYTES

    def chunks(self) -> list[slice]:
        """Slices over the tokens, in order."""
        return [slice(i, min(i + self.token_chunk, self.tokens)) for i in range(0, self.tokens, self.token_chunk)]


def plan(
    tokens: int, heads: int, topk: int, num_sms: int, budget_bytes: int | None = None, capacity: int = 0, ranks: int = 1
) -> Plan:
    """The plan for `tokens` queries of `heads` heads over `topk` selected keys on a GPU of `num_sms` multiprocessors.

    `capacity` is the number of slots of an fp8 cache that may be decoded, 0 for a cache that may not. `ranks` share
    the selected keys.

    Raises WorkspaceError if not even one token fits `budget_bytes`.

    >>> plan(8192, 64, 2048, num_sms=132).accumulators, plan(1, 64, 2048, num_sms=132).splits
    (0, 32)
    """
    _check(tokens, heads, topk, num_sms)
    splits, rows = wanted_splits(tokens, heads, topk, num_sms), tokens
    if budget_bytes is not None:
        fit = budget_bytes // partial_bytes(heads)  # partials that the budget holds
        if fit < 1:
            raise WorkspaceError(
                f"one token of {heads} heads needs {partial_bytes(heads)} bytes of workspace, the budget is "
                f"{budget_bytes}: raise the budget or use more tensor-parallel ranks"
            )
        splits = max(1, min(splits, fit // tokens - 1))
        rows = _even_chunk(tokens, fit) if splits == 1 else tokens
    whole = Plan(tokens, heads, topk, splits, rows, splits if splits > 1 else 0, ranks=ranks)
    return replace(whole, decoded=capacity) if _decoding_pays(whole, capacity, budget_bytes) else whole


def allocate(plan: Plan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Accumulators (out [A, chunk, H, 512], lse [A, chunk, H]) in fp32, or None where the plan has none."""
    if not plan.accumulators:
        return None
    shape = (plan.accumulators, plan.token_chunk, plan.heads)
    return torch.empty(*shape, LATENT, device=device), torch.empty(shape, device=device)


def wanted_splits(tokens: int, heads: int, topk: int, num_sms: int) -> int:
    """How many pieces of the selected keys give every multiprocessor something to do."""
    programs = tokens * -(-heads // HEAD_BLOCK)
    return max(1, min(num_sms // programs, -(-topk // KEY_BLOCK)))


def expected_columns(topk: int, ranks: int) -> int:
    """A width, known without waiting for the GPU, that few tokens' own keys exceed: their share of `topk` and 2.5
    standard deviations of a random choice, in whole blocks. What lies beyond is attended to by a second call.

    >>> [expected_columns(2048, ranks) for ranks in (1, 2, 4, 8)]
    [2048, 1152, 576, 320]
    """
    share = topk / ranks
    return min(topk, math.ceil((share + 2.5 * math.sqrt(share)) / KEY_BLOCK) * KEY_BLOCK)


def num_sms(device: torch.device) -> int:
    """The multiprocessors of a GPU; of an H200 where there is none, so that a CPU makes the plans of one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else H200_SMS


def partial_bytes(heads: int) -> int:
    """One token's fp32 out and lse."""
    return heads * (LATENT + 1) * 4


def _decoding_pays(plan: Plan, capacity: int, budget_bytes: int | None) -> bool:
    """Whether rows are read often enough, and fit beside the result without outweighing it."""
    extra = capacity * ROW_BYTES
    room = plan.bytes if budget_bytes is None else min(plan.bytes, budget_bytes - plan.bytes)
    return plan.splits == 1 and 0 < capacity * REUSE <= plan.token_chunk * plan.topk and extra <= room


def _even_chunk(tokens: int, most: int) -> int:
    """The chunk size, at most `most`, that cuts `tokens` into the fewest chunks of nearly the same size."""
    pieces = -(-tokens // most)
    return -(-tokens // pieces)


def _check(tokens: int, heads: int, topk: int, num_sms: int) -> None:
    if min(tokens, heads, topk, num_sms) < 1:
        raise ValueError(
            f"a plan needs positive sizes, got tokens={tokens} heads={heads} topk={topk} num_sms={num_sms}"
        )
