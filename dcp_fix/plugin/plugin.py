"""The fixes as a vLLM general plugin, for releases that lack them.

`register` is the entry point of vLLM's group `vllm.general_plugins`; vLLM calls it in every process. It looks up which
defects this vLLM has (the release matrix, by the digests of its files; a vLLM that is not in it is probed once, in a
child process without a GPU, and the verdict is cached), and repairs the three things of repairs.py and no other.

Modules are repaired right after vLLM imports them, so a run that never imports the DeepSeek-V3.2 / GLM-5 model is left
as it was, and on any platform but CUDA nothing is repaired. DCP_FIX_PLUGIN=0 (or false, off, no) switches the plugin
off. Where nothing is wrong it does nothing, and says so in vLLM's log. Nothing that goes wrong here leaves `register`.
DCP_FIX_PUT_BACK names defects to be put back afterwards, for the ladder in real vLLM (put_back.py). DCP_FIX_PACK=1
takes the holes out of FlashMLA's ids, which repairs nothing (pack.py).

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
import tempfile
from pathlib import Path

from dcp_fix.doctor.reach import reach
from dcp_fix.plugin import pack, put_back
from dcp_fix.repairs.launcher import logger
from dcp_fix.repairs.repairs import KERNEL_DEFECTS, REPAIRED, guard_communicator, replace_launcher, route_attention

KERNELS = ("vllm.models.deepseek_v32.common.kernels", "vllm.models.deepseek_v32.nvidia.kernels")
ATTENTION = ("vllm.models.deepseek_v32.attention", "vllm.models.deepseek_v32.nvidia.attention")
SWITCH = "DCP_FIX_PLUGIN"
OFF = ("0", "false", "off", "no")
LONGEST = 1 << 16  # bytes of a cache file

# --- the entry point --------------------------------------------------------------------------------------------------


def register() -> None:
    """Called by vLLM in each process, possibly more than once. Whatever goes wrong here, vLLM starts."""
    try:
        look_and_repair()
    except Exception as error:  # noqa: BLE001 a plugin that raises keeps every model of this vLLM from starting
        logger.warning("dcp_fix: nothing is repaired, the plugin failed: %s: %s", type(error).__name__, error)


def look_and_repair() -> None:
    """Find out what this vLLM lacks, and have it repaired."""
    if os.environ.get(SWITCH, "1").lower() in OFF:
        logger.info("dcp_fix: switched off by %s=%s", SWITCH, os.environ[SWITCH])
        return
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        logger.warning("dcp_fix: there is no vllm to import, nothing is repaired")
        return
    root = Path(list(spec.submodule_search_locations)[0]).parent
    defects = find_defects(root)
    repairs, asked = repairs_for(defects), put_back.parse(os.environ.get(put_back.VARIABLE, ""))
    if asked:
        logger.warning("dcp_fix: %s put back when the module is imported: answers will be wrong", ", ".join(asked))
    packing = pack.hooks(os.environ.get(pack.VARIABLE, ""))
    if packing:
        logger.info("dcp_fix: ids are packed and cut before FlashMLA's fp8 decode, %s=1", pack.VARIABLE)
    if not (asked or repairs or packing):
        logger.info("dcp_fix: this vLLM needs none of the plugin's repairs, nothing is changed")
        return
    if repairs:
        named = ", ".join(sorted(defects & REPAIRED))
        logger.info("dcp_fix: this vLLM has %s (%s); repaired when the module is imported", named, reach(root).how)
    install(with_hooks(repairs, with_hooks(put_back.hooks(asked, KERNELS, ATTENTION), packing)))


def find_defects(root: Path) -> set[str]:
    """Ids of the probes that find a defect in the vLLM at `root`."""
    from dcp_fix.doctor import matrix

    try:
        recorded = matrix.recorded_defects(root)
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("dcp_fix: the release matrix cannot be read, this vLLM is probed instead: %s", error)
        recorded = None
    return recorded if recorded is not None else probed_defects(root, matrix.digests(root))


def probed_defects(root: Path, digests: dict) -> set[str]:
    """As the doctor finds them now, or found them for the same files before."""
    from dcp_fix import __version__
    from dcp_fix.doctor.runner import probe_target
    from dcp_fix.doctor.target import Target

    key = hashlib.sha256(json.dumps([__version__, digests], sort_keys=True).encode()).hexdigest()
    cached = place_of(f"{key}.json")
    if (known := kept(cached)) is not None:
        return known
    findings = probe_target(Target("installed", root, None), on_cpu=True)
    for found in findings:
        if found.verdict == "not-run" and found.id in REPAIRED:
            logger.warning("dcp_fix: whether this vLLM has the defect %s is unknown: %s", found.id, found.evidence)
    defects = sorted(found.id for found in findings if found.verdict == "defect")
    keep(cached, json.dumps(defects))
    return set(defects)


# --- the cache --------------------------------------------------------------------------------------------------------


def place_of(name: str) -> Path | None:
    """A file of the cache folder; None for a user who has none."""
    from dcp_fix.doctor.release import cache_folder
    from dcp_fix.doctor.target import TargetError

    try:
        return cache_folder() / "probed" / name
    except TargetError as error:
        logger.warning("dcp_fix: verdicts are not cached: %s", error)
        return None


def kept(path: Path | None) -> set[str] | None:
    """What a cache file says; None where there is none, and where it is damaged or not ours to read."""
    from dcp_fix.doctor.probes import PROBES

    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            names = json.loads(file.read(LONGEST))
        if isinstance(names, list) and set(names) <= {probe.id for probe in PROBES}:
            return set(names)
    except (OSError, ValueError, TypeError, RecursionError):
        pass
    return None


def keep(path: Path | None, text: str) -> None:
    """Write a cache file whole or not at all, as several workers may do at once. Failing only costs the next start."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number, part = tempfile.mkstemp(dir=path.parent, prefix=".")
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(part, path)
        except OSError:
            os.unlink(part)
            raise
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
