"""The eight probes: what each checks, where upstream speaks of it, and what to do about it. Imports nothing heavy."""

from dataclasses import dataclass

VERDICTS = ("ok", "defect", "not-applicable", "not-run")
PLUGIN = "install dcp_fix beside vLLM, whose plugin repairs it at start"


@dataclass(frozen=True)
class Probe:
    """`code` names the part of the target that the probe loads: probes with equal `code` fail to load together.

    `needs` says what a probe cannot do without that a target cannot provide: "gpu", "serve-args", or "".
    """

    id: str
    checks: str
    code: str
    reference: str
    remedy: str
    needs: str = ""


PROBES = (
    Probe(
        "query-rows",
        "the fused norm/RoPE kernel writes the query of every token, also where another rank owns the slot",
        "kernel",
        "vLLM issue 50095, PR 50005",
        f"upgrade to 0.29.0 or newer, or {PLUGIN}",
    ),
    Probe(
        "combine-routing",
        "under DCP the attention layer gathers the query heads and combines the partial outputs",
        "attention",
        "vLLM issue 50095, PR 50005, PR 52377",
        f"upgrade to 0.29.0 or newer, or {PLUGIN}",
    ),
    Probe(
        "k-rows",
        "the same kernel writes the dense K rows of every token, which dense prefill reads on every rank",
        "kernel",
        "vLLM issue 54907, PR 54908",
        f"upgrade to 0.30.0 or newer, or {PLUGIN}",
    ),
    Probe(
        "owner-only-writes",
        "the same kernel writes cache entries only at owned slots, and resets the top-k rows of indexer layers only",
        "kernel",
        "vLLM PR 50005, PR 54908",
        f"upgrade to 0.30.0 or newer, or {PLUGIN}",
    ),
    Probe(
        "split-workspace",
        "sparse decode allocates split-KV accumulators only when something is split",
        "workspace",
        "vLLM issue 53413, PR 53755; FlashMLA PR 19",
        "use a release whose sparse decode passes, or bound --max-num-batched-tokens so that 2 x the result fits",
        needs="gpu",
    ),
    Probe(
        "empty-rows",
        "merging partial outputs survives rows and ranks without a key, in the log base that the backend uses",
        "merge",
        "vLLM PR 52377",
        "use a release that passes",
    ),
    Probe(
        "silent-collective",
        "a communicator that could not load NCCL makes reduce_scatter fail instead of returning unwritten memory",
        "communicator",
        "vLLM vllm/distributed/device_communicators (no upstream issue known)",
        f"unset VLLM_DISABLE_PYNCCL and give vLLM an NCCL that has every symbol it asks for, or {PLUGIN}",
    ),
    Probe(
        "configuration",
        "the given `vllm serve` arguments are a combination that this release accepts under DCP",
        "serve-args",
        "vLLM vllm/config/parallel.py and vllm/v1/attention/backends/mla",
        "change the arguments as the evidence says",
        needs="serve-args",
    ),
)
