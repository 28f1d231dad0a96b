"""Is every query row that attention reads written, whichever way the layer has prepared it?

From 0.32 the attention layer decides early (`_should_prepare_mqa_query`) whether to absorb and quantise the query, and
reads it later, in a branch that is decided again: dense prefill wants [nope ; rope] of each head, everything else wants
[latent ; rope]. The layer's own forward pass is run with its own `fused_q` kernel among the collaborators of layer.py,
all fresh memory poisoned, and the query that reaches attention is compared row by row:

    sparse (MQA)     W_UK q_nope and the rotated q_pe, packed in fp8 for FlashInfer                   every row
    dense (MHA)      q_nope and the rotated q_pe, in the query's own type                             every row
    graph            the same, where a full CUDA graph is recorded or replayed

A layer without a dense branch (up to 0.28) is asked for the first. Token t's values are powers of two and five times
these, exact in fp8. The control is that a plain query reaches the sparse branch. Not here: `fused_q` in CuTe DSL, which
compiles for GPUs only; the indexer's query.
"""

import contextlib

import torch

from dcp_fix.doctor.attempt import NotRun, attempt, judged, one_line
from dcp_fix.doctor.probes.layer import HEADS, KERNELS, LATENT, NOPE, PADDED, ROPE, TOKENS, Collaborators, Run
from dcp_fix.doctor.probes.routing import ATTENTION
from dcp_fix.doctor.stand_ins import module
from dcp_fix.doctor.unwritten import unwritten_memory_is_nan

REAL = (*ATTENTION, *KERNELS)
CUTEDSL = "vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl"
DENSE = "_use_sparse_mha"  # upstream's name: multi-head attention over the new tokens
BRANCHES = ("sparse, fp8", "sparse, full graph", "dense", "dense, fp8", "dense, full graph", "dense, fp8, full graph")


def stand_ins(collaborators: Collaborators) -> dict:
    """As for combine-routing, but with the target's own kernels."""
    others = {name: one for name, one in collaborators.stand_ins().items() if name not in KERNELS}
    handler = module(get_kv_cache_dtype_handler=lambda name: None)
    no_dsl = module(is_fused_q_cutedsl_supported=lambda *arguments, **options: False)
    return {**others, "vllm.config.cache": handler, CUTEDSL: no_dsl}


def of_token(tokens: int) -> torch.Tensor:
    """The query of each token, in every value."""
    return 2.0 ** torch.arange(tokens)


class Rotary:
    """A rotary embedding of angle 0."""

    def __init__(self):
        self.cos_sin_cache = torch.cat([torch.ones(PADDED, ROPE // 2), torch.zeros(PADDED, ROPE // 2)], dim=1)

    def __call__(self, positions, query):
        return query.clone(), None


class Preparing(Run):
    """One pass; `query` is what the dense branch got, `asked` whether the layer has one."""

    def __init__(self, branch: str):
        super().__init__()
        self.dense, self.fp8, self.query, self.asked = branch.startswith("dense"), "fp8" in branch, None, False
        self.context.cudagraph_runtime_mode = "FULL" if "full graph" in branch else "NONE"

    def layer(self, attention_class):
        """As Run's, in the branch asked for, with queries that tell the tokens apart."""
        layer = super().layer(attention_class)
        query = of_token(PADDED)[:, None].expand(PADDED, HEADS * (NOPE + ROPE)).contiguous()
        vars(layer).update(
            {DENSE: self.is_dense},
            _fp8_query=self.fp8,
            q_b_proj=lambda latent: (query,),
            rotary_emb=Rotary(),
            forward_impl=self.attend_densely,
        )
        return layer

    def is_dense(self, metadata) -> bool:
        self.asked = True
        return self.dense

    def attend_densely(self, query, *arguments, **options):
        self.query = query

    def faults(self) -> list[str]:
        """What is wrong about the rows that are read."""
        got, first = self.query if self.dense else self.backend.query, NOPE if self.dense else LATENT
        if got is None:
            return ["no query reaches attention in this branch"]
        if got.shape[1:] != (HEADS, first + ROPE):
            return [f"attention gets {got.shape[1]} heads of {got.shape[2]} values for {HEADS} of {first + ROPE}"]
        want = torch.full((HEADS, first + ROPE), 1.0)
        want[:, :first] = 1.0 if self.dense else NOPE  # the stand-in's W_UK holds ones
        rows = got[:TOKENS].float().cpu()
        unwritten = rows.isnan().flatten(1).any(1)
        wrong = (rows != want * of_token(TOKENS)[:, None, None]).flatten(1).any(1) & ~unwritten
        named = ((unwritten, "never written"), (wrong, "wrong"))
        return [f"query rows {at.nonzero().flatten().tolist()} are {how}" for at, how in named if at.any()]


@contextlib.contextmanager
def no_capture():
    """torch's question whether a CUDA graph is being recorded, answered where torch has no CUDA."""
    real = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = real


def prepared(collaborators: Collaborators, attention_class, branch: str, device: str) -> Preparing:
    """One pass, after it has run."""
    with torch.device(device), no_capture(), unwritten_memory_is_nan():
        collaborators.run = run = Preparing(branch)
        run.layer(attention_class).forward(torch.arange(PADDED), torch.ones(PADDED, 8))
    return run


def judge(name: str, outcome) -> list[str]:
    """Sentences about one pass. NotRun where the layer asks for what we do not have."""
    if isinstance(outcome.raised, AttributeError | TypeError):
        raise NotRun(f"{name}: the layer asks its collaborators for something new: {one_line(outcome.raised)}")
    found = [f"raises {one_line(outcome.raised)}"] if outcome.raised else outcome.value.faults()
    return [f"{name}: {message}" for message in found]


def query_preparation(attention, collaborators: Collaborators, device: str, progress) -> tuple[str, str]:
    """(verdict, evidence). The norm is left out: the layer is handed its query as it was."""
    attention_class = getattr(attention, "DeepseekV32Attention", None)
    if attention_class is None or not hasattr(attention, "fused_q"):
        raise NotRun("unknown attention module: it no longer has both DeepseekV32Attention and fused_q")
    attention.fused_norm_rope = lambda positions, query, *arguments, **options: query

    def run(branch: str, control: bool = False):
        progress(branch, control)
        return attempt(lambda: prepared(collaborators, attention_class, branch, device))

    plain = run("sparse", control=True)
    if plain.raised or plain.value.backend.query is None:
        why = one_line(plain.raised) if plain.raised else "no query reaches attention"
        raise NotRun(f"the control, a plain query in the sparse branch, fails, so nothing can be said: {why}")
    found = judge("sparse", plain)
    for branch in [branch for branch in BRANCHES if plain.value.asked or not branch.startswith("dense")]:
        found += judge(branch, run(branch))
    which = "sparse and dense branch" if plain.value.asked else "sparse branch, the only one of this layer"
    return judged(
        found, f"{which}, plain and fp8 query, with and without a full graph: every row that is read is right"
    )
