"""Rows that simulated workers choose of: features are drawn by the row and the version, and some are not finite."""

from collections.abc import Iterable

import numpy as np

from skein import rng
from skein.config.job import JobSpec
from skein.numeric.coreset.distributed import Candidates
from skein.numeric.coreset.features import last_layer
from skein.numeric.coreset.portions import Picking, pick_candidates
from skein.types import MicrobatchId, Step

NUM_ROWS = 120
"""Training rows of a job that chooses among them."""
_CLASSES, _HIDDEN, _ODD_ROW = 3, 4, 7
_OFTEN_ODD = 5
"""At the last of so many versions many rows cannot be compared, at others one."""


def picked_of(
    job: JobSpec, version: Step, microbatches: Iterable[MicrobatchId], *, num_rows: int
) -> Candidates:
    """Candidates among the rows of these microbatches, by the code that workers run."""
    size = job.batch.microbatch_samples
    ids = np.array([m * size + i for m in sorted(microbatches) for i in range(size)], np.int64)
    ids = ids[ids < num_rows]
    labels = np.arange(num_rows) % _CLASSES
    generator = rng.stream(job.seed, "rows", version)
    hidden = generator.normal(size=(num_rows, _HIDDEN)) + labels[:, None]
    errors = generator.normal(size=(num_rows, _CLASSES))
    errors[_ODD_ROW :: 10 if version % _OFTEN_ODD == _OFTEN_ODD - 1 else num_rows] = np.nan
    picking = Picking.at(job.data.coreset, version, num_rows=num_rows)
    return pick_candidates(last_layer(hidden[ids], errors[ids]), labels[ids], ids, picking, num_rows=num_rows)
