"""A sweep under Hyperband: real workers and the real Coordinator machine, one of them killed, fused beside in turn."""

import pytest

from skein.config.data.coreset import CoresetSpec
from skein.config.data.sources import DigitsSource
from skein.config.data.spec import DataSpec
from skein.config.job import ArrayJob, BatchSpec, BudgetSpec, EvaluationSpec, JobSpec, ParallelSpec
from skein.config.optimizer import AdamWSpec
from skein.config.sweep.rows import Fuse
from skein.config.sweep.spec import SweepSpec, ValuesSpec
from skein.model.families.mlp import MlpModel
from skein.protocol.coordinator.sweeping.deciding import course_of
from skein.protocol.log.history import History
from skein.protocol.log.records import JobEnded, StepCommitted
from skein.types import JobId, JobState, Precision
from tests.worker.cluster import Cluster, Disk, cluster

SWEEP = JobId("rates-1")
SAME = 1e-9


def sweep(fuse: Fuse, num_trials: int = 27, coreset: CoresetSpec | None = None) -> JobSpec:
    """Rates over four decades: of 27 trials 27 to step 2, 9 to 6, 3 to 18, 1 to 54; of 9 the same from step 6 on."""
    space = {
        "optimizer.learning_rate": ValuesSpec(log_uniform=(1e-4, 1.0)),
        "seed": ValuesSpec(values=(1, 2)),
    }
    return JobSpec(
        name="rates",
        model=MlpModel(family="mlp", widths=(16,)),
        data=DataSpec(sources=(DigitsSource(format="digits"),), coreset=coreset or CoresetSpec()),
        batch=BatchSpec(samples=16, microbatch_samples=16),
        parallel=ParallelSpec(stages=1),
        optimizer=AdamWSpec(warmup_steps=1),
        budget=BudgetSpec(steps=54),
        evaluation=EvaluationSpec(samples=160),
        precision=Precision.FP64,
        sweep=SweepSpec(
            search="hyperband",
            space=space,
            num_trials=num_trials,
            least_steps=54 // num_trials,
            metric="evaluation_loss",
            fuse=fuse,
            round_steps=3,
        ),
    )


async def ended(here: Cluster) -> JobEnded:
    """The record that ends the sweep, after those that end its arrays."""
    number = 1
    while (record := await here.first(JobEnded, number)).job != SWEEP:
        number += 1
    return record


def replayed(disk: Disk) -> History:
    history = History()
    for record in disk.records:
        history.apply(record)
    return history


async def trained(job: JobSpec, *, deaths: int) -> History:
    disk = Disk()
    async with cluster(disk) as here:
        here.submit(job)
        async with here.workers("w0"):
            async with here.workers("w1"):
                await here.first(StepCommitted, 3 if deaths else 1)
            assert (await ended(here)).state is JobState.FINISHED
    return replayed(disk)


@pytest.mark.usefixtures("impatient")
@pytest.mark.long
async def test_survivors_are_those_of_trials_one_by_one_though_a_worker_dies() -> None:
    fused, alone = await trained(sweep("always"), deaths=1), await trained(sweep("never"), deaths=0)
    together, apart = (course_of(history.jobs[SWEEP], history) for history in (fused, alone))
    assert together.ended == apart.ended
    assert sum(stand.is_done for stand in together.stands) == 1
    steps = [stand.num_steps for stand in together.stands]
    assert sorted(steps) == [2] * 18 + [6] * 6 + [18] * 2 + [54]
    assert steps == [stand.num_steps for stand in apart.stands]
    for one, other in zip(together.stands, apart.stands, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=SAME)
        assert one.evaluation_loss == pytest.approx(other.evaluation_loss, abs=SAME)
    arrays = [fused.jobs[job].spec for job in fused.jobs[SWEEP].arrays]
    assert all(isinstance(array, ArrayJob) for array in arrays)
    assert len(arrays) < len(alone.jobs[SWEEP].arrays) == 27 + 9 + 3 + 1


@pytest.mark.usefixtures("impatient")
@pytest.mark.long
async def test_survivors_keep_the_choices_of_trials_one_by_one_though_a_worker_dies() -> None:
    chosen = CoresetSpec(method="craig", fraction=0.1, refresh_epochs=1, max_overhead=100)  # for 11 steps
    fused = await trained(sweep("always", 9, chosen), deaths=1)
    alone = await trained(sweep("never", 9, chosen), deaths=0)
    together, apart = (course_of(history.jobs[SWEEP], history) for history in (fused, alone))
    assert together.ended == apart.ended
    assert sorted(stand.num_steps for stand in together.stands) == [6] * 6 + [18] * 2 + [54]
    for one, other in zip(together.stands, apart.stands, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=SAME)
        assert one.evaluation_loss == pytest.approx(other.evaluation_loss, abs=SAME)
    assert choices_of(fused) == choices_of(alone)
    (best,) = (steps for steps in choices_of(fused).values() if len(steps) > 2)
    assert sorted(best) == [0, 11, 22, 33, 44]


def choices_of(history: History) -> dict[int, dict[int, str]]:
    """Digests of all choices, by the trial's own step and trial, those that were taken along counted once."""
    found: dict[int, dict[int, str]] = {}
    for array in (history.jobs[job] for job in history.jobs[SWEEP].arrays):
        for record in array.chosen:
            for row in record.rows:
                found.setdefault(array.trials[row.row], {})[row.since] = record.digest
    return found
