"""The probes: what each checks, where upstream speaks of it, and what to do about it. Imports nothing heavy."""

from dataclasses import dataclass

VERDICTS = ("ok", "defect", "not-applicable", "not-run")
# What has been seen to work: 0.30.0 under DCP2 on two H200s, 0.29.0 there with the plugin and with this option.
FORCE_MQA = """--attention-config '{"sparse_mla_force_mqa": true}'"""
HEALTHY = (
    "use 0.30.0 or newer, or 0.29.0 with dcp_fix installed beside it, whose plugin repairs it at start, or 0.29.0 with "
    + FORCE_MQA
)


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
        HEALTHY,
    ),
    Probe(
        "combine-routing",
        "under DCP the attention layer gathers the query heads and combines the partial outputs",
        "attention",
        "vLLM issue 50095, PR 50005, PR 52377",
        HEALTHY,
    ),
    Probe(
        "k-rows",
        "the same kernel writes the dense K rows of every token, which dense prefill reads on every rank",
        "kernel",
        "vLLM issue 54907, PR 54908",
        HEALTHY,
    ),
    Probe(
        "owner-only-writes",
        "the same kernel writes cache entries only at owned slots, and resets the top-k rows of indexer layers only",
        "kernel",
        "vLLM PR 50005, PR 54908",
        HEALTHY,
    ),
    Probe(
        "split-workspace",
        "sparse decode allocates split-KV accumulators only when something is split",
        "workspace",
        "vLLM issue 53413, PR 53755; FlashMLA PR 19",
        "use 0.29.0, whose sparse decode passed on an H200, with dcp_fix installed beside it; or bound "
        "--max-num-batched-tokens so that five times the result fits",
        needs="gpu",
    ),
    Probe(
        "empty-rows",
        "merging partial outputs survives rows and ranks without a key, in the log base that the backend uses",
        "merge",
        "vLLM PR 52377",
        "use 0.30.0 or newer",
    ),
    Probe(
        "silent-collective",
        "a communicator that could not load NCCL makes reduce_scatter fail instead of returning unwritten memory",
        "communicator",
        "vLLM vllm/distributed/device_communicators (no upstream issue known)",
        "unset VLLM_DISABLE_PYNCCL and give vLLM an NCCL that has every symbol it asks for (VLLM_NCCL_SO_PATH names "
        "the library); dcp_fix installed beside vLLM makes it an error instead of a wrong answer",
    ),
    Probe(
        "flashinfer-workspace",
        "FlashInfer's sparse decode gets a workspace that grows with DCP",
        "flashinfer",
        "vLLM issue 50781",
        "use 0.30.0 or newer",
    ),
    Probe(
        "direct-a2a-layout",
        "a partial output with strided heads does not reach the direct all-to-all, whose op refuses it",
        "manager",
        "vLLM issue 54305, PR 54472",
        "pass --dcp-comm-backend ag_rs, or set VLLM_USE_DIRECT_DCP_A2A=0",
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
