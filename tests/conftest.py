"""What all tests share: how Hypothesis draws, and one thread per test process."""

import os

from hypothesis import settings

# Before torch or a BLAS is imported; `make test` sets it too, for child processes and for speed.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("skein", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("skein")
