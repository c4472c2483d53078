"""Ops that never end, and workers that have become slow."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from skein.plan.plan import ChunkTime, Plan
from skein.protocol.coordinator.coordinator_io import Outbox
from skein.protocol.coordinator.runs.incidents import Incidents
from skein.protocol.coordinator.runs.phase import StepPhase
from skein.protocol.coordinator.runs.watching.detection import (
    LEAST_HISTORY,
    MAX_HISTORY,
    NUM_PROVEN,
    NUM_SLOW,
    SLOW,
    STUCK_S,
    STUCK_TIMES,
    WARMING_S,
    WARMING_TIMES,
    OpWatch,
    Stragglers,
    Visit,
)
from skein.protocol.coordinator.runs.watching.measuring import Measured
from skein.protocol.coordinator.runs.watching.vigil import STALL_S, STALL_STEPS, STUCK_STALLS, Vigil
from skein.protocol.coordinator.runs.workers.blame import Blame
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.messages.reports import Beat
from skein.types import ChunkRef, StageSpec, WorkerId
from tests.support.desk import Desk
from tests.support.hands import record
from tests.support.jobs import small_job
from tests.support.plans import chunk, grid_plan, stage_spec

BEAT_S = 0.5
A, B = WorkerId("w0a"), WorkerId("w1a")

# --- ops that never end ---


def timed(seconds: float, worker: str, stage: int) -> ChunkTime:
    return ChunkTime(chunk=chunk(stage, worker), forward_s=seconds, backward_s=seconds / 2, loss_s=0.0)


def plan_of(seconds: float) -> Plan:
    """Two stages, a worker for each; every op is planned to take so long at most."""
    return replace(
        grid_plan(stages=2, replicas=1), chunk_times=(timed(seconds, "w0a", 0), timed(seconds, "w1a", 1))
    )


class Watched:
    """An OpWatch, and what it is told was measured."""

    def __init__(self, planned_s: float = 1.0) -> None:
        self.measured: dict[tuple[ChunkRef, StageSpec], ChunkTime] = {}
        self.watch = OpWatch(lambda at, stage: self.measured.get((at, stage)))
        self.plan = plan_of(planned_s)
        self.watch.planned(self.plan)

    def measure(self, seconds: float) -> None:
        for stage, worker in enumerate(("w0a", "w1a")):
            self.measured[chunk(stage, worker), self.plan.stages[stage]] = timed(seconds, worker, stage)

    def beat(self, running_s: float, worker: WorkerId = A) -> None:
        self.watch.beat(worker, Beat(progress=0, running_s=running_s, statistics=()))

    def step(self, *running_s: float) -> None:
        for seconds in running_s:
            self.beat(seconds)
        self.watch.committed()

    @property
    def stuck(self) -> list[WorkerId]:
        return list(self.watch.stuck())


def proven(seconds: float, *, planned_s: float = 1.0) -> Watched:
    watched = Watched(planned_s)
    watched.measure(seconds)
    for _ in range(NUM_PROVEN):
        watched.step(0.0)
    return watched


@pytest.mark.parametrize("median_s", [0.001, 1.0, 5.0, 60.0])
def test_a_stuck_op_is_noticed_within_five_seconds_or_three_medians(median_s: float) -> None:
    watched = proven(median_s)
    allowed_s = max(5.0, 3 * median_s)
    running_s = 0.0
    while not watched.stuck:
        running_s += BEAT_S
        watched.beat(running_s)
    assert 2.5 * median_s < running_s <= allowed_s


def test_no_op_that_ends_in_its_usual_time_is_stuck() -> None:
    watched = proven(10.0)
    for running_s in (10.0, 20.0, 25.9):
        watched.beat(running_s)
        assert watched.stuck == []
    watched.beat(STUCK_TIMES * 10.0 + 0.1)
    assert watched.stuck == [A]
    [reason] = watched.watch.stuck().values()
    assert reason == "an op has run for 26.1 s, where 26.0 s is far too long: start it again"


def test_the_longest_kind_of_op_counts() -> None:
    watched = proven(4.0)
    found = watched.measured[chunk(0, "w0a"), watched.plan.stages[0]]
    watched.measured[chunk(0, "w0a"), watched.plan.stages[0]] = replace(found, backward_s=8.0)
    assert watched.watch.bound_s(A) == STUCK_TIMES * 8.0
    assert watched.watch.bound_s(B) == STUCK_TIMES * 4.0


def test_before_anything_is_measured_the_plan_is_believed_generously() -> None:
    watched = Watched(planned_s=0.1)
    watched.beat(WARMING_S - 1)
    assert watched.stuck == []
    watched.beat(WARMING_S + 1)
    assert watched.stuck == [A]
    assert Watched(planned_s=60.0).watch.bound_s(A) == WARMING_TIMES * 60.0


def test_measured_ops_alone_do_not_tighten_the_bound_before_an_update_has_ended() -> None:
    watched = Watched()
    watched.measure(0.1)
    bounds = [watched.watch.bound_s(A)]
    for _ in range(NUM_PROVEN):
        watched.step(0.0)
        bounds.append(watched.watch.bound_s(A))
    assert bounds == [WARMING_S, WARMING_S, STUCK_S]


def test_an_update_that_takes_long_in_every_step_is_not_stuck() -> None:
    watched = proven(0.1)
    for _ in range(5):
        watched.step(1.0, 4.0, 0.5)
    watched.beat(8.0)
    assert watched.stuck == []
    watched.beat(STUCK_TIMES * 4.0 + 0.1)
    assert watched.stuck == [A]


def test_one_stall_does_not_loosen_the_bound() -> None:
    watched = Watched()
    watched.measure(0.1)
    watched.step(25.0)  # warming up
    for _ in range(3):
        watched.step(0.2)
    assert watched.watch.bound_s(A) == STUCK_S


def test_who_keeps_its_chunks_under_another_plan_keeps_its_bound_and_who_does_not_warms_up() -> None:
    watched = proven(0.1)
    watched.watch.planned(watched.plan)
    assert watched.watch.bound_s(A) == STUCK_S
    swapped = replace(watched.plan, stages=(stage_spec(0, layers=1), stage_spec(1)))
    watched.watch.planned(swapped)
    assert watched.watch.bound_s(A) == WARMING_S


def test_a_lost_worker_is_not_stuck_and_a_strangers_beat_is_ignored() -> None:
    watched = proven(0.1)
    watched.beat(100.0)
    watched.beat(100.0, WorkerId("stranger"))
    watched.watch.lose(A)
    assert watched.stuck == []
    assert watched.watch.bound_s(WorkerId("stranger")) == WARMING_S


# --- stragglers ---

STAGE = stage_spec(0)
NAMES = tuple(WorkerId(name) for name in "abcd")


class Fleet:
    """Four workers that report in turn; all are as planned at first."""

    def __init__(self, num_reports: int = 2 * LEAST_HISTORY) -> None:
        self.found = Stragglers()
        for _ in range(num_reports):
            self.report(1.0, 1.0, 1.0, 1.0)

    def report(self, *seconds: float) -> list[str]:
        for name, measured_s in zip(NAMES, seconds, strict=True):
            self.found.told(name, [Visit(stage=STAGE, measured_s=measured_s, planned_s=1.0)])
        return self.names

    @property
    def names(self) -> list[str]:
        return [str(worker) for worker, _ in self.found.found()]

    def history(self, series: Sequence[tuple[float, float, float, float]]) -> list[list[str]]:
        return [self.report(*seconds) for seconds in series]


def test_who_takes_twice_as_long_as_it_did_is_a_straggler_after_some_reports() -> None:
    fleet = Fleet()
    told = fleet.history([(2.0, 1.0, 1.0, 1.0)] * NUM_SLOW)
    assert told == [[]] * (NUM_SLOW - 1) + [["a"]]
    assert fleet.found.found() == ((WorkerId("a"), 2.0),)


def test_an_accident_makes_no_straggler() -> None:
    fleet = Fleet()
    assert fleet.history([(9.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)] * 10) == [[]] * 20


def test_a_straggler_stays_one_until_it_is_well_again() -> None:
    fleet = Fleet()
    fleet.history([(2.0, 1.0, 1.0, 1.0)] * NUM_SLOW)
    assert fleet.report(1.3, 1.0, 1.0, 1.0) == ["a"]
    assert fleet.report(1.1, 1.0, 1.0, 1.0) == []
    assert fleet.report(1.3, 1.0, 1.0, 1.0) == []


def test_what_slows_all_alike_makes_nobody_a_straggler() -> None:
    fleet = Fleet()
    # The first to report is compared with those who have not yet, for fewer reports than count.
    assert fleet.history([(3.0, 3.0, 3.0, 3.0)] * 20)[-1] == []


def test_who_never_was_as_fast_as_planned_beside_its_peers_is_a_straggler() -> None:
    fleet = Fleet(num_reports=0)
    fleet.report(4.0, 2.0, 2.0, 2.0)  # the first to report has no peers yet
    told = fleet.history([(4.0, 2.0, 2.0, 2.0)] * NUM_SLOW)
    assert told[-1] == ["a"]
    assert fleet.found.found()[0][1] == pytest.approx(2.0)


def test_who_always_swings_is_not_slow_when_it_does() -> None:
    fleet = Fleet(num_reports=0)
    swings = [0.5, 1.0, 1.5, 2.0, 0.7, 1.3]
    planned_alike = [(seconds, 1.2, 1.2, 1.2) for seconds in swings * 5]
    fleet.history(planned_alike)
    assert fleet.history([(1.75, 1.2, 1.2, 1.2)] * NUM_SLOW) == [[]] * NUM_SLOW


def test_who_is_slow_for_good_is_measured_by_what_it_is() -> None:
    alone = Stragglers()

    def told(seconds: float) -> bool:
        # Planned anew for what it takes: beside the plan nothing is off.
        alone.told(NAMES[0], [Visit(stage=STAGE, measured_s=seconds, planned_s=seconds)])
        for name in NAMES[1:]:
            alone.told(name, [Visit(stage=STAGE, measured_s=1.0, planned_s=1.0)])
        return bool(alone.found())

    for _ in range(2 * LEAST_HISTORY):
        told(1.0)
    slow = [told(2.0) for _ in range(MAX_HISTORY + LEAST_HISTORY)]
    assert slow[NUM_SLOW]
    assert not slow[-1]


def test_a_lost_worker_is_no_straggler() -> None:
    fleet = Fleet()
    fleet.history([(2.0 * SLOW, 1.0, 1.0, 1.0)] * NUM_SLOW)
    fleet.found.lose(NAMES[0])
    assert fleet.names == []


def test_no_report_says_nothing() -> None:
    stragglers = Stragglers()
    stragglers.told(A, [])
    stragglers.told(A, [Visit(stage=STAGE, measured_s=0.0, planned_s=1.0)])
    assert stragglers.found() == ()


# --- nothing moves ---


def test_the_vigil_waits_for_what_the_plan_says_and_twice_as_long_each_time_it_was_in_vain() -> None:
    desk = Desk()
    desk.submit(small_job())
    [job] = desk.machine.history.jobs.values()
    members = Members(job, {}, Outbox(desk.machine.history))
    vigil = Vigil(members, Measured(job.spec), now=0.0)
    incidents, blame = Incidents(members), Blame(members)
    slow = replace(plan_of(1.0), predicted_step_s=STALL_S)
    assert vigil.barks_at(None) == STALL_S
    assert vigil.barks_at(slow) == STALL_STEPS * STALL_S
    assert vigil.gives_up_at(None) == STUCK_STALLS * STALL_S
    vigil.barked(StepPhase(), incidents, blame, owing=(), now=90.0)
    vigil.moved(now=100.0)
    assert vigil.barks_at(None) == 100.0 + 2 * STALL_S
    for _ in range(100):
        vigil.barked(StepPhase(), incidents, blame, owing=(), now=100.0)
    assert vigil.barks_at(None) <= 100.0 + 2**10 * STALL_S
    vigil.committed(record(), plan_of(1.0), now=200.0)
    assert vigil.barks_at(None) == 200.0 + STALL_S
