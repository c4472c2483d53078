"""Loops that numba turns into machine code, typed as the Python functions they are written as.

The code is kept in a cache folder, beside its source where that can be written, so only the first use on a machine
waits for the compiler. Numba looks at the file of a function, not at those of the functions that it calls; so all of
the cache is dropped as soon as any file of this package has changed that machine code is made of.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

import numba

_P = ParamSpec("_P")
_R = TypeVar("_R")

STAMP = "sources.sha256"


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function` as machine code: same arguments, same results, no Python objects inside."""
    try:
        fast: Callable[_P, _R] = numba.njit(cache=True)(function)
    except RuntimeError:
        # Numba finds no folder that it could write to; then every process compiles for itself.
        fast = numba.njit()(function)
    return fast


def drop_stale(cache: Path, sources: Path) -> bool:
    """Remove the code in `cache` unless it was made of what is in `sources` now; True if it had to go.

    What counts is files with compiled functions, or with the tuples that these take apart. A cache that cannot be
    written stays as it is: whoever made it made it for these sources.
    """
    digest = hashlib.sha256()
    for path in sorted(sources.glob("*.py")):
        text = path.read_bytes()
        if b"@compiled" in text or b"(NamedTuple)" in text:
            digest.update(path.name.encode() + b"\0" + text + b"\0")
    stamp = cache / STAMP
    with suppress(OSError):
        if stamp.read_text(encoding="ascii") == digest.hexdigest():
            return False
    with suppress(OSError):
        for pattern in ("*.nbi", "*.nbc"):
            for stale in cache.glob(pattern):
                stale.unlink(missing_ok=True)
        cache.mkdir(parents=True, exist_ok=True)
        stamp.write_text(digest.hexdigest(), encoding="ascii")
    return True


@compiled
def _nothing() -> None:
    """Only asked where its code would be kept."""


def _cache() -> Path | None:
    """The folder in which code of this package is kept; None if it is kept nowhere."""
    kept_at = getattr(getattr(_nothing, "stats", None), "cache_path", None)
    return Path(kept_at) if isinstance(kept_at, str) else None


_HERE = _cache()
if _HERE is not None:
    drop_stale(_HERE, Path(__file__).parent)
