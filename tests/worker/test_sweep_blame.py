"""All rows of an array that diverge at once through a sweep: the worker is blamed, and the array built elsewhere."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from skein.config.job import JobSpec
from skein.protocol.log.records import Incident
from skein.types import JobState
from tests.worker.cluster import Disk, cluster
from tests.worker.test_packing_anew import (
    arrays_of,
    assert_same,
    ended,
    outcomes,
    replayed,
    sweep,
    undisturbed,
)
from worker.data.labelled import LabelledSamples

BLOCK = 1024
"""Samples of training that are read at once."""


class Rot:
    """Memory of the worker that reads samples first: what it has of them is spoilt after the first block."""

    def __init__(self) -> None:
        self.victim: LabelledSamples | None = None
        self.num_blocks = 0

    def reads(self, samples: LabelledSamples, places: Sequence[int]) -> bool:
        """Whether what is read now is spoilt."""
        if len(places) < BLOCK:
            return False
        self.victim = self.victim or samples
        self.num_blocks += samples is self.victim
        return samples is self.victim and self.num_blocks > 1


def of_one_seed(job: JobSpec) -> JobSpec:
    """The sweep with the same samples for all trials."""
    assert job.sweep is not None
    trials = tuple({key: x for key, x in trial.items() if key != "seed"} for trial in job.sweep.trials)
    return job.model_copy(update={"sweep": job.sweep.model_copy(update={"trials": trials})})


async def test_an_array_whose_rows_all_diverge_at_once_goes_on_at_another_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, disk, rot, read = of_one_seed(sweep(3, steps=160)), Disk(), Rot(), LabelledSamples.read_many
    calm = await undisturbed(job)

    def read_many(
        samples: LabelledSamples, places: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        inputs, labels = read(samples, places)
        return (inputs * np.float32(np.nan) if rot.reads(samples, places) else inputs), labels

    monkeypatch.setattr(LabelledSamples, "read_many", read_many)
    async with cluster(disk) as here:
        here.submit(job)
        async with here.workers("w0"):
            # For whoever came before, the array would be parted before it is spoilt: samples are read ahead.
            await here.first(Incident)
            async with here.workers("w1"):
                assert await ended(here) is JobState.FINISHED
    assert not any(stand.failure for stand, _ in outcomes(disk))
    told = [record.reason for record in disk.records if isinstance(record, Incident)]
    assert any("samples that are not finite" in reason for reason in told), told
    last = arrays_of(replayed(disk))[-1]
    assert last.worked is not None
    assert set(last.worked.plan.workers) == {"w1"}
    assert_same(disk, calm)
