"""What would ruin or refuse the ladder in real vLLM, found before anything boots; every refusal names its remedy.

Checked: vLLM and the plugin's entry point are installed, there are GPUs enough, and vLLM's NCCL wrapper is not
disabled: reduce-scatter would return unwritten memory in silence.

It does not: check memory, the driver, or whether the model can be downloaded.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from dcp_fix.base.errors import UserError
from dcp_fix.doctor.probes.nccl import disabled_by

NCCL_LIMIT_S = 180.0  # importing vLLM's wrapper takes 5 to 30 s
GROUP, NAME = "vllm.general_plugins", "dcp_fix"


def check(serve_args: str, gpus: int, plugin: bool) -> dict:
    """Raise UserError for a run that cannot be meaningful; else {"vllm": its version, "nccl": both libraries}.

    `serve_args`: the largest run as arguments of `vllm serve`. `plugin`: whether a rung needs ours.
    """
    root = installed()
    if plugin:
        check_plugin()
    check_gpus(gpus)
    return {"vllm": version(root), "nccl": check_nccl() if gpus > 1 else None}


def installed() -> Path:
    """The folder that holds vLLM's package, which is not imported here."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("vLLM is not installed here: install it next to this package, `pip install vllm==0.29.0`")
    return Path(spec.submodule_search_locations[0]).parent


def version(root: Path) -> str:
    """As its metadata next to the package says, else as its own file does."""
    for folder in root.glob("vllm-*.dist-info"):
        return folder.name.removeprefix("vllm-").removesuffix(".dist-info")
    file = root / "vllm/_version.py"
    said = re.search(r"^__version__ = .*?['\"](.+)['\"]", file.read_text() if file.is_file() else "", re.M)
    return said[1] if said else "unknown"


def check_plugin() -> None:
    """vLLM finds plugins by their entry point, and may be told to load some only."""
    if not any(entry.name == NAME for entry in importlib.metadata.entry_points(group=GROUP)):
        raise UserError(
            f"vLLM would not find the plugin: no entry point {NAME} in the group {GROUP}. Install this package "
            "(`pip install -e .`), do not only put it on PYTHONPATH"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and NAME not in allowed.split(","):
        raise UserError(f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading the plugin: unset it, or add {NAME}")


def check_gpus(wanted: int) -> None:
    """A GPU per rank."""
    found = gpu_count()
    if found == 0:
        raise UserError("no CUDA device: the ladder in real vLLM needs GPUs; without any, leave out `--engine vllm`")
    if found < wanted:
        raise UserError(f"{wanted} GPUs are needed (TP x PCP) and {found} are here: use a smaller --tp or --pcp")


def gpu_count() -> int:
    """CUDA devices that this process may use."""
    import torch

    return torch.cuda.device_count()


def check_nccl() -> dict:
    """Both NCCL libraries. Raises UserError if vLLM's wrapper is disabled, which nothing else would say."""
    if setting := disabled_by(os.environ):
        raise UserError(f"{setting} disables NCCL, and reduce-scatter would return unwritten memory: unset it")
    found = ask_wrapper()
    if found["vllm"]["refused"]:
        raise UserError(disabled(found))
    return found


def disabled(found: dict) -> str:
    """Both libraries, what is missing, what to do."""
    torch, vllm = found["torch"], found["vllm"]
    lacks = f", which lacks {', '.join(vllm['missing'])}" if vllm["missing"] else ""
    return (
        f"vLLM's NCCL wrapper would be disabled ({vllm['refused']}) and reduce-scatter would return unwritten memory. "
        f"torch has loaded {torch['path']} ({torch['version']}); vLLM loads {vllm['path']} ({vllm['version']}){lacks}. "
        "Name a newer libnccl.so.2 in VLLM_NCCL_SO_PATH (`pip install -U nvidia-nccl-cu13` brings one)"
    )


def ask_wrapper() -> dict:
    """What llm_child.py says in a process of its own: importing vLLM here would change this one."""
    command = [sys.executable, "-P", "-m", "dcp_fix.real_vllm.llm_child", "--nccl"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=NCCL_LIMIT_S, env=environment())
    except subprocess.TimeoutExpired:
        raise UserError(f"vLLM's NCCL wrapper could not be imported within {NCCL_LIMIT_S:.0f} s") from None
    said = [line for line in run.stdout.splitlines() if line.startswith('{"torch"')]  # vLLM logs there as well
    if run.returncode or not said:
        last = (run.stderr.strip().splitlines() or ["without a word"])[-1]
        raise UserError(f"vLLM's NCCL wrapper cannot be imported: {last}")
    return json.loads(said[-1])


def environment() -> dict[str, str]:
    """Ours, with this package importable wherever we were started."""
    package = str(Path(__file__).parents[2])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))}
