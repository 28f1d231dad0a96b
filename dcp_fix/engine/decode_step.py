"""A decode step in fixed memory, which on a GPU becomes one CUDA graph.

A decode step of one token is some hundred small kernels, and launching them takes longer than running them. A CUDA
graph replays them all with one call, but with the addresses, shapes and scalars of the step that was recorded. So
token, position and block table lie in buffers that every step overwrites, the logits in one that every step fills, and
nothing in between looks at a value on the host:

    token        [1]     position     [1]     table [B], all blocks that the cache has
    keys         the indexer scores every row of the table; rows beyond the position get -inf, whatever they hold
    selected     index_topk ids, -1 = hole: holes and rows of other ranks are packed away on the device
    partials     a rank that owns no selected key gives the neutral element (0, -inf)

The first step runs as it is, which compiles the kernels and connects the communicators. The second is recorded and from
then on every step is a replay, whatever the request. On a CPU every step runs as it is, in the same memory.

Over NCCL each rank records its own graph, collectives included. Under LocalGroup the ranks are threads that launch into
one stream, so rank 0 records one graph of what all of them do, in the order in which they meet, and replays it for all;
cutting it into segments at the collectives is not needed. Over gloo collectives run on the host: refused.

It does not: batch requests, or know what a step computes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dcp_fix.base.errors import UserError
from dcp_fix.ranks.group import Group


class DecodeStep:
    """One rank's decode step. `logits(ids [1])` computes the row after `attention.begin_step`; `blocks` of the cache.

    Raises UserError on a GPU whose ranks exchange tensors through the host.
    """

    def __init__(self, attention, logits: Callable[[Tensor], Tensor], blocks: int, group: Group) -> None:
        device = attention.scratch.device
        if device.type == "cuda" and not group.capturable:
            raise UserError("a CUDA graph cannot hold collectives over gloo; use one GPU per rank, or no CUDA graphs")
        self.attention, self.compute, self.group = attention, logits, group
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.table = torch.zeros(blocks, dtype=torch.int64, device=device)
        self.logits: Tensor | None = None  # [vocab]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.records = device.type == "cuda"

    def __call__(self, token: int, position: int, table: Tensor) -> Tensor:
        """The logits [vocab] after `token` at `position` of the request that owns the blocks in `table`."""
        self.token.fill_(token)
        self.position.fill_(position)
        self.table[: len(table)] = table
        if self.logits is None or not self.records:
            self.run()
        else:
            self.graph = self.graph or self.record()
            self.replay()
        self.attention.advance(self.attention.config.num_hidden_layers)
        return self.logits.clone()

    def run(self) -> None:
        """The step itself."""
        advance, self.attention.advance = self.attention.advance, lambda rows: None  # a replay cannot call it
        self.attention.begin_step(self.position, self.table)
        row = self.compute(self.token)
        self.logits = row if self.logits is None else self.logits.copy_(row)
        self.attention.advance = advance

    def record(self) -> torch.cuda.CUDAGraph:
        """Record the step into a graph, without running it."""
        graph, stream = self.group.replicated(lambda: (torch.cuda.CUDAGraph(), torch.cuda.Stream()))
        place: torch.cuda.graph | torch.cuda.StreamContext
        if self.group.captures:
            place = torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed")  # other threads launch too
        else:
            place = torch.cuda.stream(stream)
        self.meet()
        with place:
            self.meet()  # the recording has begun
            self.run()
            self.meet()  # everyone's kernels are in it
        self.meet()
        return graph

    def replay(self) -> None:
        """Run the recorded step on what the buffers hold."""
        self.meet()  # every rank has filled its buffers
        if self.group.captures:
            self.graph.replay()
        self.meet()  # what follows comes after it on the stream

    def meet(self) -> None:
        """Threads wait for each other; processes, whose graphs hold their collectives, go on."""
        self.group.replicated(lambda: None)
