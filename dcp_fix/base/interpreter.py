"""Triton's interpreter, as which kernels run without a GPU: the pairs of versions under which it cannot.

It does not: decide who runs interpreted (TRITON_INTERPRET, read where a kernel is decorated).
"""

import functools
import importlib

from dcp_fix.base.errors import UserError


class InterpreterUnusable(UserError):
    """Kernels with loops cannot be interpreted here; the message names both versions and the remedy."""


def check_interpreter() -> None:
    """Raise InterpreterUnusable before an interpreted kernel that loops from one tensor to another would fail.

    Triton before 3.7 makes Python numbers of arrays of one element, which numpy refuses since 2.4: seen with 3.6.0
    under 2.4.6 and 2.5.5, and not under 2.3.5.
    """
    triton, numpy = version_of("triton"), version_of("numpy")
    if triton < (3, 7) and numpy >= (2, 4):
        raise InterpreterUnusable(
            f"the interpreter of triton {shown(triton)} cannot run kernels with loops under numpy {shown(numpy)}: "
            "install numpy<2.4 or triton>=3.7"
        )


@functools.cache
def version_of(name: str) -> tuple[int, int]:
    """The installed major and minor version."""
    major, minor = importlib.import_module(name).__version__.split(".")[:2]
    return int(major), int(minor)


def shown(version: tuple[int, int]) -> str:
    """As people write it."""
    return ".".join(map(str, version))
