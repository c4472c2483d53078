"""Arrays whose rows are chosen for along the run: real workers and the real Coordinator machine, beside lone jobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

import numpy as np
import pytest

from skein.config.data.coreset import CoresetSpec
from skein.config.data.spec import DataSpec
from skein.config.job import ArrayJob, JobSpec
from skein.config.optimizer import AdamWSpec
from skein.config.sweep.rows import RowOrigin
from skein.protocol.log.records import CheckpointCommitted, CoresetChosen, StepCommitted
from skein.types import JobState, Precision
from tests.worker.cluster import Cluster, Disk, cluster
from tests.worker.sweep.trials import NUM_STEPS, array_of, trial
from tests.worker.test_selection import MLP, source_in

SAME = 1e-9
LOOKED_AT = {"method": "craig", "fraction": 0.4, "refresh_epochs": 2, "max_overhead": 100}
"""Of 144 rows 58 are chosen, and drawn in 8 steps of 16 twice over."""
Chosen = tuple[int, str]
"""Step at which rows were chosen, and the choice's digest."""


def on_a_part(folder: FilePath, job: JobSpec, **settings: object) -> JobSpec:
    """The job on rows that are chosen by the model along the run."""
    spec = CoresetSpec.model_validate({**LOOKED_AT, **settings})
    data = DataSpec(sources=(source_in(folder),), coreset=spec, validation_ratio=0.1)
    return job.model_copy(update={"model": MLP, "data": data})


def array_on_a_part(folder: FilePath, job: ArrayJob, **settings: object) -> ArrayJob:
    found = on_a_part(folder, job, **settings)
    assert isinstance(found, ArrayJob)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """What a trial's own job came to."""

    losses: tuple[float, ...]
    chosen: tuple[Chosen, ...]


async def alone(job: JobSpec) -> Alone:
    async with cluster(Disk()) as here, here.workers("w0"):
        here.submit(job)
        assert await here.finished() is JobState.FINISHED
    return Alone(
        losses=tuple(record.loss for record in here.steps),
        chosen=tuple((x.version, x.digest) for x in here.all(CoresetChosen)),
    )


def chosen_for(records: Sequence[CoresetChosen], row: int) -> tuple[Chosen, ...]:
    """Choices of a row by its own steps; of one that was made twice, as it was the last time."""
    return tuple({x.since: (x.since, r.digest) for r in records for x in r.rows if x.row == row}.values())


def check_row(here: Cluster, row: int, lone: Alone, first_step: int = 0) -> None:
    """A row's losses, a mean for each round, are those of the trial's own job."""
    begun = first_step
    for record in here.steps:
        numbers = record.rows[row]
        expected = np.mean(lone.losses[begun : numbers.num_updates])
        assert numbers.loss == pytest.approx(expected, abs=SAME), f"row {row} to {numbers.num_updates}"
        begun = numbers.num_updates
    assert begun == NUM_STEPS


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="at once"),
        pytest.param(
            {"warmup_epochs": 1, "refresh_epochs": 1, "feature": "logits"},
            id="after a warm-up",
            marks=pytest.mark.long,
        ),
    ],
)
async def test_each_row_draws_what_its_own_job_would_have_chosen_though_workers_die(
    tmp_path: FilePath, settings: dict[str, object]
) -> None:
    lone = [await alone(on_a_part(tmp_path, trial(row), **settings)) for row in range(4)]
    async with cluster(Disk()) as here:
        here.submit(array_on_a_part(tmp_path, array_of(0, 1, 2, 3), **settings))
        async with here.workers("w0"):
            await here.first(CoresetChosen if not settings else StepCommitted)
        async with here.workers("w1"):
            await here.first(CoresetChosen, 5)
        async with here.workers("last"):
            assert await here.finished() is JobState.FINISHED
    records = here.all(CoresetChosen)
    assert all(len(x.rows) == 1 and x.num_by_chance == 0 for x in records)
    for row in range(4):
        assert chosen_for(records, row) == lone[row].chosen
        check_row(here, row, lone[row])
    assert len({lone[row].chosen[-1] for row in range(4)}) == 4


async def test_rows_draw_by_chance_what_their_own_jobs_would_have_drawn(tmp_path: FilePath) -> None:
    asked = {"method": "random", "refresh_epochs": 1}
    async with cluster(Disk()) as here, here.workers("w0"):
        here.submit(array_on_a_part(tmp_path, array_of(0, 1), **asked))
        assert await here.finished() is JobState.FINISHED
    assert here.all(CoresetChosen) == []
    for row in range(2):
        check_row(here, row, await alone(on_a_part(tmp_path, trial(row), **asked)))


async def test_rows_keep_their_choices_in_other_packings_and_alone(tmp_path: FilePath) -> None:
    lone = [await alone(on_a_part(tmp_path, trial(row))) for row in range(4)]
    disk = Disk()
    async with cluster(disk) as here, here.workers("w0"):
        here.submit(array_on_a_part(tmp_path, array_of(0, 1, 2, 3, last_step=6)))
        await here.finished()
    newest = here.all(CheckpointCommitted)[-1]
    origins = {row: RowOrigin(job=newest.job, version=newest.version, row=row) for row in range(4)}
    for number, rows in enumerate([(0, 1), (2, 3), (3, 0, 1), (2,)]):
        async with cluster(disk) as here, here.workers("w1"):
            job = array_on_a_part(tmp_path, array_of(*rows, first_step=6, origins=origins))
            here.submit(job, key=f"part {number}")
            assert await here.finished() is JobState.FINISHED
        for place, row in enumerate(rows):
            # The choice of step 0 holds up to 8, and is none that was made here.
            assert chosen_for(here.all(CoresetChosen), place) == lone[row].chosen[1:]
            check_row(here, place, lone[row], first_step=6)


async def test_one_choice_for_all_is_the_first_rows_and_its_retirement_hands_over(tmp_path: FilePath) -> None:
    lone = await alone(on_a_part(tmp_path, trial(0)))
    calm = of_one_seed(array_on_a_part(tmp_path, array_of(0, 1, 2), share="first_alive"))
    async with cluster(Disk()) as here, here.workers("w0"):
        here.submit(calm)
        assert await here.finished() is JobState.FINISHED
    assert [tuple(row.row for row in x.rows) for x in here.all(CoresetChosen)] == [(0, 1, 2)] * 3
    assert chosen_for(here.all(CoresetChosen), 0) == lone.chosen
    check_row(here, 0, lone)
    async with cluster(Disk()) as here, here.workers("w0"):
        here.submit(with_a_wild_row(calm))
        assert await here.finished() is JobState.FINISHED
    assert here.steps[-1].rows[0].retired
    assert here.steps[-1].rows[0].num_updates < 8
    assert [row.num_updates for row in here.steps[-1].rows[1:]] == [NUM_STEPS] * 2
    assert [tuple(row.row for row in x.rows) for x in here.all(CoresetChosen)] == [(0, 1, 2), (1, 2), (1, 2)]


def of_one_seed(job: ArrayJob) -> ArrayJob:
    rows = tuple(row.model_copy(update={"seed": 1}) for row in job.rows)
    return job.model_copy(update={"array": job.array.model_copy(update={"rows": rows})})


def with_a_wild_row(job: ArrayJob) -> ArrayJob:
    """The array with a first row whose parameters are 99 times as large after each step: soon too large for float32."""
    wild = AdamWSpec(learning_rate=10, weight_decay=10, warmup_steps=0)
    rows = (job.rows[0].model_copy(update={"optimizer": wild}), *job.rows[1:])
    array = job.array.model_copy(update={"rows": rows})
    return job.model_copy(update={"array": array, "precision": Precision.FP32})
