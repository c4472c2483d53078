"""Arrays of trials under drawn faults; and what the judge finds where rounds are counted twice or rows go on."""

from functools import partial

import pytest

from skein.config.job import ArrayJob
from skein.protocol.coordinator.coordinator_io import PauseAsked, ResumeAsked
from skein.protocol.log.records import CoresetChosen, JobEnded, JobHeld, StepCommitted
from skein.protocol.messages.array_rounds import RowNumbers
from skein.protocol.worker.ops import LossOp
from skein.sim.compute.arrays import ArrayExecutor, SimArrays
from skein.sim.judging.invariants import Violated
from skein.sim.judging.rows import row_faults
from skein.sim.scenario import curve_of, disturbed, judge, make_world, run_to_end, small_fleet, with_arrays
from skein.sim.shapes import ARRAYS, SimShape, shape_of
from skein.sim.world import World
from skein.types import JobState, WorkerId
from tests.support.reports import row_numbers
from tests.support.worlds import of_kind, run_until

NUM_FAULTS = 8


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", ARRAYS, ids=lambda shape: shape.text)
def test_faults_cost_no_row_a_step(shape: SimShape, seed: int) -> None:
    judge(shape, disturbed(shape, seed=seed, num_faults=NUM_FAULTS))


def test_rows_that_diverge_are_retired_or_go_back_once() -> None:
    counts = {}
    for text in ("line 1x1 array 4 on 3", "line 1x1 array 4 rewinds on 3"):
        shape = shape_of(text)
        world = make_world(shape.job(steps=5), small_fleet(shape), seed=0, new_world=with_arrays(World))
        run_to_end(world, limit_s=900.0)
        rows = [record.rows for record in curve_of(world.log)]
        counts[text] = [at[2].num_updates for at in rows]
        assert [at[0].num_updates for at in rows] == [16, 32, 48, 64, 79]
        assert rows[-1][2].retired
    assert list(counts.values()) == [[16, 16, 16, 16, 16], [16, 26, 26, 26, 26]]


class Forgetful(ArrayExecutor):
    """Goes on with its copy though it was told to begin the round anew."""

    def _goes_on(self, *, is_carried: bool) -> bool:
        return bool(self._copy)


def test_a_round_that_is_counted_twice_is_found() -> None:
    arrays = SimArrays()

    def executor(worker: WorkerId, flops_per_s: float) -> ArrayExecutor:
        return Forgetful(arrays, worker, flops_per_s)

    shape = ARRAYS[0]
    world = make_world(
        shape.job(steps=8), small_fleet(shape), seed=0, new_world=partial(World, new_executor=executor)
    )
    # An op that fails halfway has its round begun anew, where it was or elsewhere.
    for worker in world.workers.values():
        worker.to_fail = lambda op: isinstance(op, LossOp) and op.step == 1 and op.microbatch == 2
    with pytest.raises(Violated, match="steps"):
        run_to_end(world, limit_s=900.0)


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        (None, row_numbers(16), ""),
        (row_numbers(4), row_numbers(20), ""),
        (row_numbers(112), row_numbers(127), ""),
        (row_numbers(4), row_numbers(4, retired="loss"), ""),
        (row_numbers(4), row_numbers(6, num_rewinds=1), ""),
        (row_numbers(4), row_numbers(7), "3 steps in a round of 16"),
        (row_numbers(4), row_numbers(36), "32 steps in a round of 16"),
        (row_numbers(4), row_numbers(29, num_rewinds=1), "at most 16"),
        (row_numbers(4, retired="loss"), row_numbers(8, retired="loss"), "was retired"),
        (row_numbers(4, retired="loss"), row_numbers(4), "was retired"),
        (row_numbers(4), row_numbers(6, retired="loss"), "not where its round began"),
    ],
)
def test_rounds_are_judged_by_what_rows_have_come_to(
    before: RowNumbers | None, after: RowNumbers, fault: str
) -> None:
    job = shape_of("line 1x1 array 1").job(steps=8)
    assert isinstance(job, ArrayJob)
    found = row_faults(job, () if before is None else (before,), (after,))
    assert [fault in text for text in found] == ([True] if fault else [])


def test_an_array_whose_rows_are_all_retired_ends() -> None:
    job = shape_of("line 1x1 array 3").job(steps=8)
    assert isinstance(job, ArrayJob)
    rows = tuple(row.model_copy(update={"seed": 2}) for row in job.rows)
    wild = job.model_copy(update={"array": job.array.model_copy(update={"rows": rows})})
    world = make_world(wild, small_fleet(ARRAYS[0]), seed=0, new_world=with_arrays(World))
    outcome = run_to_end(world, limit_s=900.0)
    assert outcome.state is JobState.FINISHED
    (ended,) = (record for record in world.log if isinstance(record, JobEnded))
    assert ended.reason == "no row makes steps any more after 2 rounds"
    assert (outcome.history.jobs[ended.job].checkpoints[-1].version, len(curve_of(world.log))) == (2, 2)


@pytest.mark.parametrize(
    "words", ["line 1x1 array 4 chosen on 3", "line 1x1 array 4 chosen shared rewinds on 3"]
)
def test_a_pause_costs_an_array_none_of_its_choices(words: str) -> None:
    shape = shape_of(words)
    calm, paused = (
        make_world(shape.job(steps=6), small_fleet(shape), seed=0, new_world=with_arrays(World))
        for _ in range(2)
    )
    run_to_end(calm, limit_s=900.0)
    (job,) = {record.job for record in of_kind(calm.log, JobEnded)}
    run_until(paused, lambda world: len(of_kind(world.log, StepCommitted)) == 3)
    paused.tell(PauseAsked(job=job))
    run_until(paused, lambda world: bool(of_kind(world.log, JobHeld)))
    paused.tell(ResumeAsked(job=job))
    run_to_end(paused, limit_s=900.0)
    assert curve_of(paused.log) == curve_of(calm.log)
    told = [[(x.version, x.digest) for x in of_kind(world.log, CoresetChosen)] for world in (calm, paused)]
    assert told[0] == told[1]
