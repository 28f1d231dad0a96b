"""The fixes as a vLLM general plugin, for releases that lack them.

`register` is the entry point of vLLM's group `vllm.general_plugins`; vLLM calls it in every process. It looks up which
defects this vLLM has (the release matrix, by the digests of its files; a vLLM that is not in it is probed once, in a
child process without a GPU, and the verdict is cached), and repairs the three things of repairs.py and no other.

Modules are repaired right after vLLM imports them, so a run that never imports the DeepSeek-V3.2 / GLM-5 model is left
as it was, and on any platform but CUDA nothing is repaired. DCP_FIX_PLUGIN=0 switches the plugin off. Where nothing is
wrong it does nothing, and says so in vLLM's log. DCP_FIX_PUT_BACK names defects to be put back afterwards, for the
ladder in real vLLM (put_back.py).

Not here: the split workspace and the merge (compiled or not ours to replace), PCP+DCP routing, nvfp4 caches (handed on
to upstream's launcher), releases from 0.31 on, whose fp8_ds_mla entries have other scales and whose kernel is right.
"""

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path

from dcp_fix.vllm import put_back
from dcp_fix.vllm.launcher import logger
from dcp_fix.vllm.repairs import KERNEL_DEFECTS, REPAIRED, guard_communicator, replace_launcher, route_attention

KERNELS = ("vllm.models.deepseek_v32.common.kernels", "vllm.models.deepseek_v32.nvidia.kernels")
ATTENTION = ("vllm.models.deepseek_v32.attention", "vllm.models.deepseek_v32.nvidia.attention")
SWITCH = "DCP_FIX_PLUGIN"

# --- the entry point --------------------------------------------------------------------------------------------------


def register() -> None:
    """Called by vLLM in each process, possibly more than once."""
    if os.environ.get(SWITCH, "1") == "0":
        logger.info("dcp_fix: switched off by %s=0", SWITCH)
        return
    spec = importlib.util.find_spec("vllm")
    defects = find_defects(Path(spec.submodule_search_locations[0]).parent)
    repairs, asked = repairs_for(defects), put_back.parse(os.environ.get(put_back.VARIABLE, ""))
    if asked:
        logger.warning("dcp_fix: %s put back when the module is imported: answers will be wrong", ", ".join(asked))
    elif not repairs:
        logger.info("dcp_fix: this vLLM needs none of the plugin's repairs, nothing is changed")
        return
    if repairs:
        logger.info("dcp_fix: this vLLM has %s; repaired when the module is imported", ", ".join(sorted(defects)))
    install(with_hooks(repairs, put_back.hooks(asked, KERNELS, ATTENTION)))


def find_defects(root: Path) -> set[str]:
    """Ids of the probes that find a defect in the vLLM at `root`."""
    from dcp_fix.vllm.doctor import matrix

    recorded = matrix.recorded_defects(root)
    return recorded if recorded is not None else probed_defects(root, matrix.digests(root))


def probed_defects(root: Path, digests: dict) -> set[str]:
    """As the doctor finds them now, or found them for the same files before."""
    from dcp_fix import __version__
    from dcp_fix.vllm.doctor.release import cache_folder
    from dcp_fix.vllm.doctor.runner import probe_target
    from dcp_fix.vllm.doctor.target import Target

    key = hashlib.sha256(json.dumps([__version__, digests], sort_keys=True).encode()).hexdigest()
    cached = cache_folder() / "probed" / f"{key}.json"
    if cached.is_file():
        return set(json.loads(cached.read_text(encoding="utf-8")))
    findings = probe_target(Target("installed", root, None), on_cpu=True)
    for found in findings:
        if found.verdict == "not-run" and found.id in REPAIRED:
            logger.warning("dcp_fix: whether this vLLM has the defect %s is unknown: %s", found.id, found.evidence)
    defects = sorted(found.id for found in findings if found.verdict == "defect")
    keep(cached, json.dumps(defects))
    return set(defects)


def keep(path: Path, text: str) -> None:
    """Write a cache file whole or not at all, as several workers may do at once. Failing only costs the next start."""
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        logger.warning("dcp_fix: verdicts are not cached: %s", error)


def repairs_for(defects: set[str]) -> dict:
    """{module name: functions to call with that module}"""
    repairs = {}
    if defects & KERNEL_DEFECTS:
        repairs |= {name: [replace_launcher] for name in (*KERNELS, *ATTENTION)}
    for defect, function in (("combine-routing", route_attention), ("silent-collective", guard_communicator)):
        if defect in defects:
            repairs |= {name: [*repairs.get(name, []), function] for name in ATTENTION}
    return repairs


def with_hooks(repairs: dict, more: dict) -> dict:
    """Both, the functions of `more` after those of `repairs`."""
    return {name: [*repairs.get(name, []), *more.get(name, [])] for name in {**repairs, **more}}


# --- repairing modules as they are imported ---------------------------------------------------------------------------


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls functions with a module right after it was executed. First in sys.meta_path; finds nothing itself."""

    def __init__(self, repairs: dict):
        self.repairs = repairs

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in self.repairs:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), repair(module, self.repairs[fullname]))
        return spec


def install(repairs: dict) -> None:
    """Repair what is imported already, and the rest when it is."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AfterImport)]
    sys.meta_path.insert(0, AfterImport(repairs))
    for name, functions in repairs.items():
        if name in sys.modules:
            repair(sys.modules[name], functions)


def repair(module, functions) -> None:
    """Apply `functions` to a module of vLLM, on CUDA only."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        logger.info("dcp_fix: %s is left alone, this platform is not CUDA", module.__name__)
        return
    for function in functions:
        function(module)
        logger.info("dcp_fix: %s applied to %s", function.__name__, module.__name__)
