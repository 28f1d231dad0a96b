"""What would ruin the ladder in real vLLM, found before anything boots; every refusal names its remedy.

Checked: vLLM and the plugin's entry point are installed, there are GPUs enough, and NCCL is not switched off. Whether
vLLM's NCCL wrapper loaded is said by the log of each boot (boot_log.py).

It does not: judge arguments, which vLLM refuses itself, or check memory, the driver, or a model's download.
"""

import importlib.metadata
import importlib.util
import os
from pathlib import Path

from dcp_fix.base.errors import UserError, shown
from dcp_fix.doctor.probes.nccl import disabled_by
from dcp_fix.doctor.target import version_of

GROUP, NAME = "vllm.general_plugins", "dcp_fix"


def check(gpus: int, plugin: bool) -> str:
    """vLLM's version. Raises UserError for a run that cannot be meaningful. `plugin`: whether a rung needs ours."""
    root = installed()
    if plugin:
        check_plugin()
    found = gpu_count()
    if found < gpus:
        remedy = (
            "use a smaller --tp or --pcp" if found else "the ladder on our own engine, `dcp-fix reproduce`, needs none"
        )
        raise UserError(f"{gpus} GPUs are needed (TP x PCP) and {found} are here: {remedy}")
    if setting := disabled_by(os.environ):
        raise UserError(f"{setting} disables NCCL, and reduce-scatter would return unwritten memory: unset it")
    return version_of(root)[0] or "of an unknown version"


def installed() -> Path:
    """The folder that holds vLLM's package, which is not imported here."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("vLLM is not installed here: install it next to this package, `pip install vllm==0.29.0`")
    return Path(spec.submodule_search_locations[0]).parent


def check_plugin() -> None:
    """vLLM finds plugins by their entry point, and may be told to load some only."""
    if not any(entry.name == NAME for entry in importlib.metadata.entry_points(group=GROUP)):
        raise UserError(
            f"vLLM would not find the plugin: no entry point {NAME} in the group {GROUP}. Install this package "
            "(`pip install -e .`), do not only put it on PYTHONPATH"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and NAME not in allowed.split(","):
        raise UserError(f"VLLM_PLUGINS={shown(allowed)!r} keeps vLLM from loading the plugin: unset it, or add {NAME}")


def gpu_count() -> int:
    """CUDA devices that this process may use."""
    import torch

    return torch.cuda.device_count()
