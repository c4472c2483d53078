"""Coordinators that have begun something, for tests of what comes then."""

from collections.abc import Sequence

from skein.config.job import JobSpec
from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator_io import CoordinatorCommand
from skein.protocol.coordinator.runs.phase import RunPhase
from skein.protocol.log.records import GenerationOpened, JobEnded
from skein.protocol.messages.directives import Commit, NewGeneration, Start
from skein.protocol.messages.reports import Beat
from skein.types import JobState, StageSpec
from tests.support.desk import Desk
from tests.support.jobs import small_job
from tests.support.plans import chunk, grid_plan, path, plan_of, stage_spec

SPEC = small_job(stages=2, replicas=1, microbatches=2, steps=3)
PLAN = grid_plan(stages=2, replicas=1, num_microbatches=2)
PAIRS_SPEC = small_job(stages=2, replicas=2, steps=3)
PAIRS = grid_plan(stages=2, replicas=2)
LEFT = plan_of([chunk(0, "w0b"), chunk(1, "w1a")], [path(chunk(0, "w0b"), chunk(1, "w1a"))] * 4, num_shards=1)
BOTH_STAGES = plan_of(
    [chunk(stage, worker) for stage in (0, 1) for worker in ("w0a", "w0b")],
    [path(chunk(0, worker), chunk(1, worker)) for worker in ("w0a", "w0b")] * 2,
)


def held_at(version: int) -> dict[str, Sequence[tuple[StageSpec, int]]]:
    """What the workers of `PAIRS` hold."""
    return {worker: [(stage_spec(int(worker[1])), version)] for worker in PAIRS.workers}


HELD = held_at(1)


def began(spec: JobSpec = SPEC, plan: Plan = PLAN) -> Desk:
    """Workers of the plan are here, and a generation of them is open."""
    desk = Desk()
    desk.join(*plan.workers)
    desk.submit(spec)
    assert desk.told(NewGeneration)
    return desk


def stepping(spec: JobSpec = SPEC, plan: Plan = PLAN) -> Desk:
    """The same in its first step."""
    desk = began(spec, plan)
    desk.settle(plan)
    assert desk.told(Start)
    return desk


def let_in(desk: Desk, plan: Plan, larger: Plan) -> None:
    """A step under `plan` asks for one with a place for who came, and another begins it: its copies are here."""
    desk.step(plan)
    assert desk.told(Commit)[plan.workers[0]].goes_on
    desk.plan(larger)
    desk.prefetch()
    desk.step(plan)


def phase(desk: Desk) -> type[RunPhase]:
    assert desk.machine.run is not None
    return type(desk.machine.run.phase)


def ended(desk: Desk) -> tuple[JobState, str]:
    [record] = desk.recorded(JobEnded)
    return record.state, record.reason


def later(desk: Desk, seconds: float) -> None:
    """Time passes while all workers beat; the last commands are all that it caused."""
    commands: list[CoordinatorCommand] = []
    for _ in range(int(seconds)):
        for worker in desk.live:
            commands += desk.report(worker, Beat(progress=0, running_s=0.0, statistics=()))
        commands += desk.wait(1.0)
    desk.commands = commands


def beats(desk: Desk, seconds: int, *, progress: int = 0) -> None:
    """All workers beat every second; nothing moves unless `progress` changes."""
    for _ in range(seconds):
        for worker in desk.live:
            desk.report(worker, Beat(progress=progress, running_s=0.0, statistics=()))
        desk.wait(1.0)
        if desk.recorded(GenerationOpened):
            return
