"""The probes: where upstream speaks of what each checks, and what to do about it. README.md says what each checks."""

from dataclasses import dataclass

VERDICTS = ("ok", "defect", "not-applicable", "not-run")
# What has been seen to work: 0.30.0 under DCP2 on two H200s, 0.29.0 there with the plugin and with this option.
FORCE_MQA = """--attention-config '{"sparse_mla_force_mqa": true}'"""
HEALTHY = (
    "use 0.30.0 or newer, or 0.29.0 with dcp_fix installed beside it, whose plugin repairs it at start, or 0.29.0 with "
    + FORCE_MQA
)
FIVE_TIMES = (
    "use 0.29.0, whose sparse decode passed on an H200, with dcp_fix installed beside it; or bound "
    "--max-num-batched-tokens so that five times the result fits"
)
GIVE_NCCL = (
    "unset VLLM_DISABLE_PYNCCL and give vLLM an NCCL that has every symbol it asks for (VLLM_NCCL_SO_PATH names "
    "the library); dcp_fix installed beside vLLM makes it an error instead of a wrong answer"
)
NOT_DIRECT = "pass --dcp-comm-backend ag_rs, or set VLLM_USE_DIRECT_DCP_A2A=0"
NOWHERE = "vLLM vllm/distributed/device_communicators (no upstream issue known)"

POWER_OF_TWO = "use 0.31.0 or newer on Blackwell; Hopper reads either scale"
NO_RELEASE = "no release that was probed has it: compare your files with a release's, or report it upstream"


@dataclass(frozen=True)
class Probe:
    """`code` names the part of the target that the probe loads: probes with equal `code` fail to load together.

    `needs`: what a probe cannot do without that a target cannot provide, "gpu" or nothing.
    """

    id: str
    code: str
    reference: str
    remedy: str
    needs: str = ""


PROBES = (
    Probe("query-rows", "kernel", "vLLM issue 50095, PR 50005", HEALTHY),
    Probe("combine-routing", "attention", "vLLM issue 50095, PR 50005, PR 52377", HEALTHY),
    Probe("k-rows", "kernel", "vLLM issue 54907, PR 54908", HEALTHY),
    Probe("owner-only-writes", "kernel", "vLLM PR 50005, PR 54908", HEALTHY),
    Probe("split-workspace", "workspace", "vLLM issue 53413, PR 53755; FlashMLA PR 19", FIVE_TIMES, needs="gpu"),
    Probe("empty-rows", "merge", "vLLM PR 52377", "use 0.30.0 or newer"),
    Probe("silent-collective", "communicator", NOWHERE, GIVE_NCCL),
    Probe("flashinfer-workspace", "flashinfer", "vLLM issue 50781", "use 0.30.0 or newer"),
    Probe("direct-a2a-layout", "manager", "vLLM issue 54305, PR 54472", NOT_DIRECT),
    Probe("scale-contract", "kernel", "vLLM PR 49435, PR 54563; FlashMLA PR 184, PR 192", POWER_OF_TWO),
    Probe("slot-mapping", "slots", "vLLM vllm/v1/worker/gpu/block_table.py", NO_RELEASE),
    Probe("index-filter", "ids", "vLLM PR 46514", NO_RELEASE),
    Probe("mtp-lengths", "indexer", "vLLM PR 46076", NO_RELEASE),
    Probe("pcp-partition", "partition", "vLLM PR 56157, issue 53573", NO_RELEASE),
    Probe("query-preparation", "attention", "vLLM vllm/models/deepseek_v32/attention.py", NO_RELEASE),
)
