"""Training that diverges in a simulated world: it ends, goes back or goes on as the job says, whatever else happens."""

from collections.abc import Callable
from functools import partial

import pytest

from skein.config.job import JobSpec
from skein.config.schedule import learning_rate
from skein.protocol.coordinator.coordinator_io import PauseAsked, ResumeAsked
from skein.protocol.log.divergence import MAX_SKIPPED
from skein.protocol.log.records import (
    CheckpointCommitted,
    Diverged,
    Incident,
    IncidentKind,
    JobEnded,
    JobHeld,
    RolledBack,
)
from skein.protocol.messages.directives import StepRecord
from skein.sim.scenario import make_world
from skein.sim.shapes import shape_of
from skein.sim.world import World
from skein.types import JobId, JobState
from tests.support.diverging import Diverging
from tests.support.extent import part
from tests.support.jobs import small_job
from tests.support.worlds import Run, finish, fleet_of, of_kind, run_until, version_of

BAD_STEP, STEPS = 7, 24
JOB = small_job(steps=STEPS, save_every=3, evaluate_every=3, keep=1)


def job_that(does: str) -> JobSpec:
    return JOB.model_copy(update={"on_divergence": does})


def always(record: StepRecord) -> bool:
    """The update after version 7 spoils the model at any learning rate."""
    return record.step == BAD_STEP


def above(highest: float, record: StepRecord) -> bool:
    return always(record) and record.learning_rate > highest


def simulate(
    job: JobSpec,
    is_too_large: Callable[[StepRecord], bool],
    *,
    state: JobState,
    disturb: Callable[[World], None] | None = None,
    spoils_gradients: bool = True,
) -> Run:
    diverging = Diverging(is_too_large, spoils_gradients=spoils_gradients)
    world = make_world(job, fleet_of(4), seed=0, new_world=partial(World, new_executor=diverging.executor))
    if disturb is not None:
        disturb(world)
    return finish(world, about=f"on_divergence={job.on_divergence}", state=state)


def crash(world: World, *, after: int) -> None:
    """Have the coordinator die when the log holds so many records."""

    def strike(num_held: int) -> None:
        if num_held == after:
            world.crash_coordinator(restarts_after_s=0.5)

    world.after_append = strike


def kill_when_diverged(world: World) -> None:
    """A worker dies in the moment that divergence is recorded."""

    def strike(_: int) -> None:
        if isinstance(world.log[-1], Diverged):
            world.restart_worker(min(world.workers))

    world.after_append = strike


def assert_half_from(run: Run, version: int) -> None:
    """The learning rate is what the job asks for, then half of it."""
    wanted = [
        learning_rate(JOB.optimizer, step, STEPS) / (2 if step >= version else 1) for step in range(STEPS)
    ]
    assert [step.learning_rate for step in run.curve] == wanted


@pytest.mark.parametrize("spoils_gradients", [True, False])
def test_a_job_stops_and_keeps_what_was_good_and_nobody_is_to_blame(spoils_gradients: bool) -> None:
    run = simulate(job_that("stop"), always, state=JobState.FAILED, spoils_gradients=spoils_gradients)
    assert not [line for line in run.world.lines if "excluded=" in line]
    [diverged] = of_kind(run.world.log, Diverged)
    assert (diverged.step, diverged.last_good) == (8, 7)
    [end] = of_kind(run.world.log, JobEnded)
    assert end.reason == (
        "diverged at step 8: loss not finite, 10 steps in a row without an update; last good version 7, checkpoint 6"
    )
    # The newest one is spoilt; it is kept as the job asks, and 6 beside it.
    assert of_kind(run.world.log, CheckpointCommitted)[-1].keeps == (6, 15)


@pytest.mark.parametrize("after", part(range(96, 124, 7), every=2))
def test_a_coordinator_that_dies_meanwhile_comes_to_the_same(after: int) -> None:
    run = simulate(job_that("stop"), always, state=JobState.FAILED, disturb=partial(crash, after=after))
    assert len(of_kind(run.world.log, Diverged)) == 1


def test_a_job_goes_back_and_learns_on_with_half_the_learning_rate() -> None:
    run = simulate(job_that("rewind"), partial(above, 3e-4), state=JobState.FINISHED)
    [back] = of_kind(run.world.log, RolledBack)
    assert (back.from_version, back.to_version, back.learning_rate_ratio) == (8 + MAX_SKIPPED, 6, 0.5)
    assert_half_from(run, 6)
    [incident] = of_kind(run.world.log, Incident)
    assert (incident.kind, incident.num_steps_lost) == (IncidentKind.DIVERGED, 12)


@pytest.mark.parametrize(
    "disturb", [kill_when_diverged, *(partial(crash, after=n) for n in part(range(97, 130, 6), every=3))]
)
def test_a_job_goes_back_whatever_dies_meanwhile(disturb: Callable[[World], None]) -> None:
    run = simulate(job_that("rewind"), partial(above, 3e-4), state=JobState.FINISHED, disturb=disturb)
    assert_half_from(run, 6)
    assert [back.to_version for back in of_kind(run.world.log, RolledBack) if back.learning_rate_ratio] == [6]


def test_a_job_goes_back_a_few_times_and_then_fails() -> None:
    run = simulate(job_that("rewind"), always, state=JobState.FAILED)
    assert [back.to_version for back in of_kind(run.world.log, RolledBack)] == [6, 6, 6]
    assert of_kind(run.world.log, JobEnded)[0].reason.endswith("checkpoint 6; 3 rewinds did not help")


def test_a_job_without_a_checkpoint_begins_anew() -> None:
    job = job_that("rewind").model_copy(
        update={"checkpoint": JOB.checkpoint.model_copy(update={"every_steps": 0})}
    )
    run = simulate(job, partial(above, 3e-4), state=JobState.FINISHED)
    assert [back.to_version for back in of_kind(run.world.log, RolledBack)] == [0]


@pytest.mark.parametrize("rule", ["diloco", "decentlam"])
def test_walkers_go_back_all_of_them(rule: str) -> None:
    job = shape_of(f"line 2x2 by {rule}").job(steps=STEPS)
    wanted = learning_rate(job.optimizer, BAD_STEP, STEPS)
    run = simulate(
        job.model_copy(update={"on_divergence": "rewind"}),
        partial(above, 0.9 * wanted),
        state=JobState.FINISHED,
    )
    assert [back.to_version for back in of_kind(run.world.log, RolledBack)] == [6]


def test_a_job_that_is_to_ignore_it_goes_on_and_says_so() -> None:
    run = simulate(job_that("ignore"), always, state=JobState.FINISHED)
    assert len(of_kind(run.world.log, Diverged)) == 1
    assert any("it goes on, for on_divergence is ignore" in line for line in run.world.lines)
    assert 6 in of_kind(run.world.log, CheckpointCommitted)[-1].keeps


def test_a_job_that_is_to_ignore_it_loses_nothing_by_a_pause() -> None:
    diverging = Diverging(always)
    world = make_world(
        job_that("ignore"), fleet_of(4), seed=0, new_world=partial(World, new_executor=diverging.executor)
    )
    run_until(world, lambda world: any(isinstance(record, Diverged) for record in world.log))
    world.tell(PauseAsked(job=JobId("small-1")))
    run_until(world, lambda world: isinstance(world.log[-1], JobHeld))
    assert of_kind(world.log, CheckpointCommitted)[-1].version == version_of(world)
    world.tell(ResumeAsked(job=JobId("small-1")))
    finish(world, about="resumed", state=JobState.FINISHED)
    assert not of_kind(world.log, RolledBack)


def test_a_job_whose_last_version_is_spoilt_has_not_finished() -> None:
    job = job_that("stop").model_copy(
        update={"budget": JOB.budget.model_copy(update={"steps": BAD_STEP + 2})}
    )
    run = simulate(job, always, state=JobState.FAILED)
    assert "validation loss not finite at the end" in of_kind(run.world.log, JobEnded)[0].reason
