"""How long a job has been at work, and how many steps its hours still allow."""

from skein.protocol.log.workclock import WorkClock
from skein.types import Step
from tests.support.jobs import small_job

HOUR_S = 3600.0
JOB = small_job(steps=1000)
HOURS = JOB.model_copy(update={"budget": JOB.budget.model_copy(update={"hours": 1.0})})


def worked(*walls_s: float, clock: WorkClock | None = None) -> WorkClock:
    clock = clock or WorkClock()
    for wall_s in walls_s:
        clock.stepped(wall_s)
    return clock


def test_steps_are_forecast_by_the_pace_so_far() -> None:
    clock = worked(0.0, 60.0, 120.0)
    assert clock.total_steps(HOURS, Step(3)) == 60
    assert clock.total_steps(JOB, Step(3)) == 1000


def test_hours_that_are_over_end_the_job_where_it_is() -> None:
    clock = worked(*(60.0 * step for step in range(61)))
    assert clock.total_steps(HOURS, Step(61)) == 61


def test_steps_may_be_spent_before_the_hours() -> None:
    assert worked(0.0, 0.1).total_steps(HOURS, Step(2)) == 1000


def test_pauses_and_other_wall_clocks_are_no_work() -> None:
    clock = worked(0.0, 60.0)
    clock.stops()
    worked(50 * HOUR_S, 50 * HOUR_S + 60.0, clock=clock)
    clock.stops()
    worked(0.0, 60.0, clock=clock)
    assert (clock.step_s, clock.num_timed, clock.num_steps) == (60.0, 3, 6)


def test_evaluations_are_no_work() -> None:
    clock = worked(0.0)
    clock.goes_on(500.0)
    assert worked(560.0, clock=clock).step_s == 60.0
