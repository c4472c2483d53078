"""What all tests share: how Hypothesis draws, one thread per test process, little garbage to look through."""

import asyncio
import gc
import os
import tempfile

from hypothesis import settings

from tests.support.extent import examples
from tests.support.turns import TurningPolicy

# Before torch or a BLAS is imported; `make test` sets it too, for child processes and for speed.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Workers that are started under a name keep a file there; child processes inherit it.
_STATE = tempfile.TemporaryDirectory(prefix="skein-tests-")
os.environ["XDG_STATE_HOME"] = _STATE.name

settings.register_profile(
    "skein", max_examples=examples(100), deadline=None, print_blob=True, derandomize="CI" in os.environ
)
settings.load_profile("skein")

# Loops of tests say when they have turned.
asyncio.set_event_loop_policy(TurningPolicy())


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: collections of garbage need not go through them again and again."""
    gc.freeze()
