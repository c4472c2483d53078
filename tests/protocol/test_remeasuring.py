"""When workers are asked to measure themselves again."""

import itertools

import pytest

from skein.protocol.coordinator.remeasuring import FIRST_PAUSE_S, JobPace, Remeasuring
from skein.types import Generation, WorkerId

IDLE, BUSY = WorkerId("idle"), WorkerId("busy")
CALM = JobPace(busy=frozenset({BUSY}), parted=None)


def parted(generation: int) -> JobPace:
    return JobPace(busy=frozenset({BUSY}), parted=Generation(generation))


@pytest.fixture
def remeasuring() -> Remeasuring:
    found = Remeasuring()
    for worker in (IDLE, BUSY):
        found.joined(worker, now=0.0)
    return found


def times_due(remeasuring: Remeasuring, worker: WorkerId, pace: JobPace, *, until_s: float) -> list[float]:
    """When a worker that beats every second is asked."""
    found = []
    for second in range(1, int(until_s)):
        if remeasuring.is_due(worker, pace, now=float(second)):
            remeasuring.asked(worker, now=float(second))
            found.append(float(second))
    return found


def test_without_work_ever_more_seldom_with_work_never(remeasuring: Remeasuring) -> None:
    asked = times_due(remeasuring, IDLE, CALM, until_s=1000.0)
    gaps = [after - before for before, after in zip([0.0, *asked], asked, strict=False)]
    assert gaps[0] == FIRST_PAUSE_S
    assert all(after == 2 * before for before, after in itertools.pairwise(gaps))
    assert times_due(remeasuring, BUSY, CALM, until_s=1000.0) == []


def test_where_ops_part_from_the_plan_everybody_at_once_and_later_plans_after_a_pause(
    remeasuring: Remeasuring,
) -> None:
    for worker in (IDLE, BUSY):
        assert times_due(remeasuring, worker, parted(1), until_s=10.0) == [1.0]
    assert times_due(remeasuring, BUSY, parted(2), until_s=FIRST_PAUSE_S) == []
    assert len(times_due(remeasuring, BUSY, parted(3), until_s=4 * FIRST_PAUSE_S)) == 1


def test_amid_a_change_of_generation_nobody(remeasuring: Remeasuring) -> None:
    assert times_due(remeasuring, IDLE, JobPace(busy=None, parted=None), until_s=1000.0) == []
