"""`opened(spec)`: the vLLM of this environment, a wheel, a site-packages folder or a checkout, as a Target.

`Target.root` then holds `vllm/`. Of a wheel only the members that a probe may load are unpacked, into a temporary
folder; a folder is read where it lies. Nothing here imports or executes the target.

Raises TargetError, which names the path and what is wrong with it.
"""

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dcp_fix.base.errors import shown
from dcp_fix.doctor.target import Target, TargetError, version_of
from dcp_fix.doctor.wheel import unpack


@contextlib.contextmanager
def opened(spec: str | None) -> Iterator[Target]:
    """`spec`: a path, or None for the vLLM of this environment."""
    if spec is None:
        yield installed()
        return
    if is_folder(spec):
        yield folder(Path(spec))
        return
    try:
        temporary = tempfile.TemporaryDirectory(prefix="dcp-fix-doctor-", ignore_cleanup_errors=True)
    except OSError as error:
        raise TargetError(f"no temporary folder to unpack {shown(spec)} into: {error}; set TMPDIR") from error
    with temporary as place:
        yield Target(shown(spec), Path(place), unpack(Path(spec), Path(place)))


def is_folder(spec: str) -> bool:
    """Whether it is a folder, and not a file. TargetError for anything else, and for what no file system takes."""
    try:
        if Path(spec).is_dir() or Path(spec).is_file():
            return Path(spec).is_dir()
        why = "is no file or folder" if Path(spec).exists() else "no such file or folder"
    except (OSError, ValueError) as error:
        why = f"no path ({error.strerror if isinstance(error, OSError) else error})"
    raise TargetError(f"{shown(spec)}: {why}; give a vLLM wheel, a site-packages folder or a checkout")


def installed() -> Target:
    """The vLLM that `import vllm` would load, found without importing it."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise TargetError("no vLLM in this environment; give a wheel, a folder or --release 0.29.0")
    package = Path(list(found.submodule_search_locations)[0])
    if found.origin is None:
        raise TargetError(
            f"`import vllm` gives the folder {package}, which has no __init__.py and is no vLLM, and hides any other: "
            "start from another folder, or take it off PYTHONPATH"
        )
    return Target(f"installed ({package})", package.parent, *version_of(package.parent))


def folder(path: Path) -> Target:
    """A site-packages folder, a checkout, or the `vllm` folder inside one."""
    if path.name == "vllm" and (path / "__init__.py").is_file() and not (path / "vllm" / "__init__.py").is_file():
        path = path.absolute().parent
    if not (path / "vllm" / "__init__.py").is_file():
        raise TargetError(f"{shown(path)}: not a vLLM, it holds no vllm/__init__.py")
    return Target(shown(path), path.resolve(), *version_of(path))
