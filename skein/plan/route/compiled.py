"""Loops that numba turns into machine code, typed as the Python functions they are written as.

The code is kept in the cache folder beside its source, so only the first use on a machine waits for the compiler.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function` as machine code: same arguments, same results, no Python objects inside."""
    fast: Callable[_P, _R] = numba.njit(cache=True)(function)
    return fast
