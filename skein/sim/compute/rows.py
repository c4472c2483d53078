"""Rows that simulated workers choose of: features are drawn by the row and the version, and some are not finite."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from skein import rng
from skein.config.job import JobSpec
from skein.numeric.coreset.distributed import Candidates
from skein.numeric.coreset.features import last_layer
from skein.numeric.coreset.portions import Picking, pick_candidates
from skein.protocol.messages.directives import ChunkAssignment, SourceKind
from skein.protocol.worker.ops import ComputeOp
from skein.sim.judging.invariants import Violated
from skein.types import MicrobatchId, StageSpec, Step

NUM_ROWS = 120
"""Training rows of a job that chooses among them."""
_CLASSES, _HIDDEN, _ODD_ROW = 3, 4, 7
_OFTEN_ODD = 5
"""At the last of so many versions many rows cannot be compared, at others one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedModel:
    """Model by which rows are compared: of this seed, after so many steps."""

    seed: int
    step: Step


class SimRows:
    """Rows as a simulated worker has them: features of a selection that goes on.

    Attributes:
        looked_at: microbatches of training rows whose features are here.
        kept: versions of which a selection is computed, whatever steps are applied, by the chunk that has a copy.
    """

    def __init__(self) -> None:
        self.looked_at: set[MicrobatchId] = set()
        self.kept: dict[StageSpec, Step] = {}

    def keep(self, version: Step, versions: Mapping[StageSpec, Step]) -> None:
        """Keep a copy of chunks that are at this version; `versions` are those of all that are here."""
        self.kept |= {stage: version for stage, now in versions.items() if now == version}

    def built(self, chunks: Iterable[ChunkAssignment]) -> None:
        """Another generation has begun: what stays where it is has its copies still."""
        self.looked_at.clear()
        for chunk in chunks:
            if chunk.source.kind is not SourceKind.KEEP:
                self.kept.pop(chunk.stage, None)

    def end(self) -> None:
        """Rows are chosen."""
        self.kept.clear()
        self.looked_at.clear()

    def give_away(self) -> frozenset[MicrobatchId]:
        """Microbatches whose features are here, no longer after this."""
        found, self.looked_at = frozenset(self.looked_at), set()
        return found

    def begins(self, op: ComputeOp, stage: StageSpec, version: Step) -> None:
        """A chunk at `version` computes an op of a selection.

        Raises:
            Violated: parameters of the selection's version are not here.
        """
        if op.step not in (version, self.kept.get(stage)):
            raise Violated(f"{stage} at version {version} begins {op}, with {self.kept.get(stage)} kept")


def picked_by(
    model: AskedModel, job: JobSpec, microbatches: Iterable[MicrobatchId], *, num_rows: int
) -> Candidates:
    """Candidates among the rows of these microbatches by a model, by the code that workers run."""
    version = model.step
    size = job.batch.microbatch_samples
    ids = np.array([m * size + i for m in sorted(microbatches) for i in range(size)], np.int64)
    ids = ids[ids < num_rows]
    labels = np.arange(num_rows) % _CLASSES
    generator = rng.stream(model.seed, "rows", version)
    hidden = generator.normal(size=(num_rows, _HIDDEN)) + labels[:, None]
    errors = generator.normal(size=(num_rows, _CLASSES))
    errors[_ODD_ROW :: 10 if version % _OFTEN_ODD == _OFTEN_ODD - 1 else num_rows] = np.nan
    picking = Picking.at(job.data.coreset, version, num_rows=num_rows, block_rows=size)
    return pick_candidates(last_layer(hidden[ids], errors[ids]), labels[ids], ids, picking)
