"""The fixes as a vLLM general plugin, for releases that lack them; README.md says what it does to which release.

`register` is the entry point of vLLM's group `vllm.general_plugins`; vLLM calls it in every process. It looks up which
defects this vLLM has (the release matrix, by the digests of its files; a vLLM that is not in it is probed once, in a
child process without a GPU, and the verdict is cached), and repairs what repairs.py names and nothing else.

Modules are repaired right after vLLM imports them, on CUDA only, so a run that never imports the DeepSeek-V3.2 / GLM-5
model is left as it was. Nothing that goes wrong here leaves `register`, or an import of vLLM.
"""

import hashlib
import importlib.abc
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from dcp_fix.base import output
from dcp_fix.base.bounded import read_json
from dcp_fix.base.errors import UserError
from dcp_fix.doctor.reach import reach
from dcp_fix.plugin import pack, put_back
from dcp_fix.repairs.launcher import logger
from dcp_fix.repairs.repairs import OFF, REPAIRED, REPAIRS, SWITCH

LONGEST = 1 << 16  # bytes of a cache file
Hooks = dict[str, list[Callable[[ModuleType], None]]]  # {module name: functions to call with that module}


def register() -> None:
    """Called by vLLM in each process, possibly more than once. Whatever goes wrong here, vLLM starts."""
    try:
        look_and_repair()
    except Exception as error:  # noqa: BLE001 a plugin that raises keeps every model of this vLLM from starting
        logger.error("dcp_fix: nothing is repaired, the plugin failed: %s: %s", type(error).__name__, error)


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
    if named := ", ".join(sorted(defects & REPAIRED)):
        how = reach(root).how
        logger.info("dcp_fix: this vLLM has %s (%s); to be repaired when its module is imported", named, how)
    if asked := put_back.parse(os.environ.get(put_back.VARIABLE, "")):
        logger.warning("dcp_fix: %s put back when the module is imported: answers will be wrong", ", ".join(asked))
    if packing := pack.hooks(os.environ.get(pack.VARIABLE, "")):
        logger.info("dcp_fix: ids are packed and cut before FlashMLA's fp8 decode, %s=1", pack.VARIABLE)
    hooks = joined(repairs_for(defects), put_back.hooks(asked), packing)
    if not hooks:
        logger.info("dcp_fix: this vLLM needs none of the plugin's repairs, nothing is changed")
        return
    install(hooks)


def repairs_for(defects: set[str]) -> Hooks:
    """What to apply to a vLLM with these defects."""
    wanted = {function: modules for function, (cured, modules) in REPAIRS.items() if defects & cured}
    return joined(*({module: [function] for module in modules} for function, modules in wanted.items()))


def joined(*every: Hooks) -> Hooks:
    """All hooks of a module in this order."""
    names = dict.fromkeys(name for hooks in every for name in hooks)
    return {name: [function for hooks in every for function in hooks.get(name, [])] for name in names}


# --- which defects ----------------------------------------------------------------------------------------------------


def find_defects(root: Path) -> set[str]:
    """Ids of the probes that find a defect in the vLLM at `root`: as recorded, as cached, or as found now."""
    from dcp_fix import __version__
    from dcp_fix.doctor import matrix

    recorded = matrix.recorded_defects(root)
    if recorded is not None:
        return recorded
    key = hashlib.sha256(json.dumps([__version__, matrix.digests(root)], sort_keys=True).encode()).hexdigest()
    known = kept(key)
    return probed_defects(root, key) if known is None else known


def probed_defects(root: Path, key: str) -> set[str]:
    """As the doctor finds them now; kept for the next start."""
    from dcp_fix.doctor.runner import probe_target
    from dcp_fix.doctor.target import Target

    findings = probe_target(Target("installed", root, None), on_cpu=True)
    for found in findings:
        if found.verdict == "not-run" and found.id in REPAIRED:
            logger.warning("dcp_fix: whether this vLLM has the defect %s is unknown: %s", found.id, found.evidence)
    defects = {found.id for found in findings if found.verdict == "defect"}
    try:
        path = cache_file(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            path.unlink(missing_ok=True)  # a FIFO would be written into, and wait for a reader
        output.write(path, json.dumps(sorted(defects)))  # whole, as several workers may do so at once
    except (OSError, UserError) as error:
        logger.warning("dcp_fix: verdicts are not cached: %s", error)
    return defects


def kept(key: str) -> set[str] | None:
    """What the cache says; None where there is no file, or one that is damaged, or not a regular one."""
    from dcp_fix.doctor.probes import PROBES

    try:
        names = read_json(cache_file(key), LONGEST)
        return set(names) if isinstance(names, list) and set(names) <= {probe.id for probe in PROBES} else None
    except (OSError, UserError, TypeError):
        return None


def cache_file(key: str) -> Path:
    """Where verdicts are kept. Raises UserError for a user without a home."""
    from dcp_fix.doctor.release import cache_folder

    return cache_folder() / "probed" / f"{key}.json"


# --- repairing modules as they are imported ---------------------------------------------------------------------------


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls functions with a module right after it was executed, and finds nothing itself.

    Other people have such hooks too. The module is whatever the other finders find, with their hooks in it, and this
    one moves back to the front of sys.meta_path whenever it is asked for anything: a hook before it that asks nobody
    else would hide the module from it.
    """

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self.asking: set[str] = set()

    def find_spec(self, fullname: str, path=None, target=None) -> ModuleSpec | None:
        if sys.meta_path[0] is not self and self in sys.meta_path:
            sys.meta_path.remove(self)
            sys.meta_path.insert(0, self)
        if fullname not in self.hooks or fullname in self.asking:
            return None
        self.asking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.asking.discard(fullname)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                repair(module, self.hooks[fullname])

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(hooks: Hooks) -> None:
    """Repair what is imported already, and the rest when it is."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AfterImport)]
    sys.meta_path.insert(0, AfterImport(hooks))
    for name, functions in hooks.items():
        if name in sys.modules:
            repair(sys.modules[name], functions)


def repair(module: ModuleType, functions: list[Callable[[ModuleType], None]]) -> None:
    """Apply `functions` to a module of vLLM, on CUDA only. One that cannot be applied is an error in the log."""
    for function in functions:
        try:
            from vllm.platforms import current_platform

            if not current_platform.is_cuda():
                logger.info("dcp_fix: %s is left alone, this platform is not CUDA", module.__name__)
                return
            function(module)
            logger.info("dcp_fix: %s applied to %s", function.__name__, module.__name__)
        except Exception as error:  # noqa: BLE001 raised out of vLLM's import, it would keep vLLM from starting
            cured, _ = REPAIRS.get(function, ((), ()))
            what = f"{', '.join(sorted(cured))} not repaired, " if cured else ""
            why = f"{type(error).__name__}: {error}"
            logger.error("dcp_fix: %s%s cannot change %s: %s", what, function.__name__, module.__name__, why)
