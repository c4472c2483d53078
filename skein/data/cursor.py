"""Samples that a step consumes. The cursor alone says it: not the plan, the number of workers or the clock."""

from dataclasses import dataclass

from skein.config.job import BatchSpec


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cursor:
    """Place that a job has read to: `position` samples of its endless shuffled sequence are consumed."""

    position: int = 0

    @staticmethod
    def at_step(step: int, batch: BatchSpec) -> "Cursor":
        """The cursor before `step`, every earlier step having consumed one batch."""
        return Cursor(position=step * batch.samples)

    def positions(self, microbatch: int, batch: BatchSpec) -> range:
        """Positions of `microbatch` in the step that begins here.

        Raises:
            ValueError: the batch has no such microbatch.
        """
        if not 0 <= microbatch < batch.num_microbatches:
            raise ValueError(f"microbatch {microbatch} is not one of {batch.num_microbatches}")
        first = self.position + microbatch * batch.microbatch_samples
        return range(first, first + batch.microbatch_samples)

    def after(self, batch: BatchSpec) -> "Cursor":
        """The cursor once the step that begins here is committed."""
        return Cursor(position=self.position + batch.samples)


def positions_of(step: int, microbatch: int, batch: BatchSpec) -> range:
    """Positions of one microbatch of one step.

    >>> positions_of(2, 1, BatchSpec(samples=8, microbatch_samples=4))
    range(20, 24)
    """
    return Cursor.at_step(step, batch).positions(microbatch, batch)
