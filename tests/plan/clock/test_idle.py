"""Steps of a plan in whose idle time some forwards go."""

from dataclasses import replace

from skein.plan.clock.idle import steps_beside
from skein.plan.plan import ChunkTime, Plan
from tests.support.plans import grid_plan


def plan(*, step_s: float) -> Plan:
    """Two stages, one worker each, four microbatches: 12 s of ops on the first, 16 s on the last."""
    drawn = grid_plan(stages=2, replicas=1, num_microbatches=4)
    first, last = (x.chunk for x in drawn.chunks)
    times = (
        ChunkTime(chunk=first, forward_s=1.0, backward_s=2.0, loss_s=0.0),
        ChunkTime(chunk=last, forward_s=0.0, backward_s=0.0, loss_s=4.0),
    )
    return replace(drawn, chunk_times=times, predicted_step_s=step_s)


def test_half_of_the_idle_time_of_whoever_has_least_is_counted_on() -> None:
    # The last worker: 4/3 s for each forward, and 2 of its 4 idle seconds.
    assert steps_beside(plan(step_s=20.0), 9) == 6
    # Now the first has 4 s of 8, and the last 5/3 of them.
    assert steps_beside(plan(step_s=20.0), 1) == 1


def test_a_plan_that_leaves_somebody_no_time_has_no_room() -> None:
    assert steps_beside(plan(step_s=16.0), 1) is None
    assert steps_beside(plan(step_s=0.0), 1) is None


def test_paths_share_the_microbatches() -> None:
    one, two = (grid_plan(stages=1, replicas=n, num_microbatches=4) for n in (1, 2))
    timed = [
        replace(
            x,
            predicted_step_s=20.0,
            chunk_times=tuple(
                ChunkTime(chunk=held.chunk, forward_s=0.0, backward_s=0.0, loss_s=3.0) for held in x.chunks
            ),
        )
        for x in (one, two)
    ]
    # 20 s less four losses are 8 s, 4 of them counted; of two workers with two losses each 14 s, 7 counted.
    assert [steps_beside(x, 28) for x in timed] == [7, 2]
