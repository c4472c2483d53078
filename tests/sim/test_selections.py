"""Rows that are chosen along a run: whoever dies in whichever stage of it, the job ends on what was recorded."""

from collections.abc import Callable

import pytest

from skein.config.job import JobSpec
from skein.protocol.coordinator.coordinator_io import (
    ChooseRows,
    CoordinatorCommand,
    CoordinatorEvent,
    DrainAsked,
    RowsChosen,
)
from skein.protocol.coordinator.runs.phase import EvaluatePhase, StepPhase
from skein.protocol.log.records import CheckpointCommitted, CoresetChosen
from skein.protocol.messages.coresets import CandidatesPicked
from skein.protocol.messages.reports import Report
from skein.protocol.worker.worker_io import TakeChoice, WorkerCommand
from skein.sim.compute.rows import NUM_ROWS
from skein.sim.judging.invariants import Invariants, Violated
from skein.sim.processes.worker import SimWorker
from skein.sim.scenario import make_world
from skein.sim.shapes import SimShape, shape_of
from skein.sim.world import World
from skein.types import SiteId, WorkerId
from tests.sim.test_many_faults import judged
from tests.support.extent import part
from tests.support.worlds import (
    finish,
    fleet_of,
    of_kind,
    plan_of,
    run_until,
    simulate,
    undisturbed,
    version_of,
    worker,
)

STEPS = 12


def job_of(text: str) -> JobSpec:
    return shape_of(text).job(steps=STEPS, every=4)


def is_selecting(world: World, *, since: int = 0) -> bool:
    """Whether rows are being chosen, at this version or a later one."""
    run = None if world.coordinator is None else world.coordinator.run
    return (
        run is not None
        and isinstance(run.phase, EvaluatePhase)
        and run.phase.purpose.selects
        and run.job.version >= since
    )


class Watched(World):
    """Knows who has told what it has picked, and how often a second stage has begun."""

    def __init__(self, sites: tuple[SiteId, ...], *, seed: int) -> None:
        super().__init__(sites, seed=seed)
        self.picked: set[WorkerId] = set()
        self.num_told = self.num_asked = self.num_chosen = 0

    def tell(self, event: CoordinatorEvent) -> None:
        self.num_chosen += isinstance(event, RowsChosen)
        super().tell(event)

    def _send_report(self, worker: SimWorker, report: Report) -> None:
        if isinstance(report, CandidatesPicked) and report.part == report.num_parts - 1:
            self.picked.add(worker.machine.identity.worker)
            self.num_told += 1
        super()._send_report(worker, report)

    def _act(self, command: CoordinatorCommand) -> None:
        self.num_asked += isinstance(command, ChooseRows)
        super()._act(command)


class Deaf(World):
    """Its workers do not take choices that they are told of."""

    def _do(self, worker: SimWorker, command: WorkerCommand) -> None:
        if not isinstance(command, TakeChoice):
            super()._do(worker, command)


def watched(job: JobSpec, num_workers: int = 3) -> Watched:
    world = make_world(job, fleet_of(num_workers), seed=0, new_world=Watched)
    assert isinstance(world, Watched)
    return world


def has_looked(world: World) -> bool:
    return is_selecting(world) and any(w.executor.rows.looked_at for w in world.workers.values())


def is_choosing(world: World) -> bool:
    """Whether the second stage runs."""
    assert isinstance(world, Watched)
    return world.num_asked > 0


def world_asked(world: World) -> int:
    """Times that a second stage has begun."""
    assert isinstance(world, Watched)
    return world.num_asked


def awaits_choice(world: World) -> bool:
    """Whether an answer to the newest is still to come."""
    assert isinstance(world, Watched)
    return world.num_chosen < world.num_asked


STAGES: dict[str, Callable[[World], bool]] = {
    "begun": is_selecting,
    "looked at": has_looked,
    "second stage": is_choosing,
    "a refresh": lambda world: is_selecting(world, since=1),
}


def chosen_in(world: World) -> list[CoresetChosen]:
    return of_kind(world.log, CoresetChosen)


def undisturbed_choices(job: JobSpec, num_workers: int) -> list[tuple[int, str]]:
    return [(x.version, x.digest) for x in chosen_in(undisturbed(job, num_workers).world)]


def test_rows_are_chosen_before_the_first_step_and_once_each_pass_is_over() -> None:
    world = simulate(job_of("line 1x3 chosen"), 3).world
    assert [x.version for x in chosen_in(world)] == [0, 3, 6, 9]
    assert all(x.told.num_picks == NUM_ROWS // 4 for x in chosen_in(world))


def test_choices_that_take_too_long_come_half_as_often_from_then_on_and_that_is_told() -> None:
    job = shape_of("line 1x3 chosen").job(steps=30, every=0)
    coreset = job.data.coreset.model_copy(update={"max_overhead": 0.01})
    job = job.model_copy(update={"data": job.data.model_copy(update={"coreset": coreset})})
    world = simulate(job, 3).world
    # Of the first nobody knows what training takes. 30 picks and 12 samples a step: passes of 2.5 steps.
    assert [(x.version, x.passes) for x in chosen_in(world)] == [(0, 1), (3, 2), (8, 4), (18, 8)]
    told = [line for line in world.lines if "above max_overhead of 1%" in line]
    assert len(told) == 3
    assert "the next choice is made after 2 passes" in told[0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_worker_that_dies_in_a_selection_costs_no_choice_and_no_step(stage: str) -> None:
    job = job_of("line 1x3 chosen")
    world = watched(job)
    run_until(world, STAGES[stage])
    world.kill_worker(worker(1))
    run = finish(world, about=stage)
    assert run.num_rollbacks == 0
    assert run.curve == undisturbed(job, 3).curve
    assert {x.version for x in chosen_in(world)} == {0, 3, 6, 9}


@pytest.mark.parametrize("stage", STAGES)
def test_a_coordinator_that_begins_anew_chooses_the_same(stage: str) -> None:
    job = job_of("line 1x3 chosen")
    world = watched(job)
    run_until(world, STAGES[stage])
    world.crash_coordinator()
    run = finish(world, about=stage)
    assert run.curve == undisturbed(job, 3).curve
    assert [(x.version, x.digest) for x in chosen_in(world)] == undisturbed_choices(job, 3)


def test_one_that_dies_once_all_have_picked_changes_nothing() -> None:
    job = job_of("line 1x3 chosen")
    world = watched(job)
    run_until(world, is_choosing)
    world.kill_worker(worker(1))
    finish(world, about="second stage")
    assert (chosen_in(world)[0].digest, chosen_in(world)[0].num_faults) == (
        undisturbed_choices(job, 3)[0][1],
        0,
    )


@pytest.mark.parametrize("num_gone", [1, 2])
def test_choices_are_the_same_however_many_workers_are_left_to_pick(num_gone: int) -> None:
    job = job_of("line 1x3 chosen")
    world = watched(job)
    run_until(world, lambda world: world.coordinator is not None and world.coordinator.run is not None)
    for number in range(num_gone):
        world.kill_worker(worker(number))
    finish(world, about="fewer")
    assert world.picked == {worker(number) for number in range(num_gone, 3)}
    assert all(x.num_by_chance == 0 for x in chosen_in(world))
    assert [(x.version, x.digest) for x in chosen_in(world)] == undisturbed_choices(job, 3)


def test_the_last_to_pick_may_die_and_its_rows_alone_are_drawn_by_chance() -> None:
    job = job_of("line 1x3 chosen")
    world = watched(job)
    run_until(world, is_selecting)
    world.slow_worker(worker(2), 200.0)
    run_until(world, lambda _: len(world.picked) == 2)
    world.kill_worker(worker(2))
    finish(world, about="the last")
    first = chosen_in(world)[0]
    assert (first.num_faults, first.num_by_chance) == (1, NUM_ROWS // 3)


def test_a_worker_that_stands_still_in_a_selection_is_not_waited_for() -> None:
    job = job_of("line 1x3 chosen")
    world = make_world(job, fleet_of(3), seed=0)
    run_until(world, is_selecting)
    world.slow_worker(worker(2), 1e5, seconds=40.0)
    finish(world, about="late")
    first = chosen_in(world)[0]
    assert (first.num_faults, first.num_by_chance) == (1, NUM_ROWS // 3)
    assert first.seconds < 30.0


# --- beside steps ---

BESIDE = "line 2x2 beside"


def is_looking(world: World) -> bool:
    """Whether a choice is made while steps go on."""
    run = None if world.coordinator is None else world.coordinator.run
    is_stepping = run is not None and isinstance(run.phase, StepPhase)
    return is_stepping and any(w.executor.rows.kept for w in world.workers.values())


def test_choices_are_made_beside_the_last_quarter_of_the_steps_before_them() -> None:
    world = simulate(job_of(BESIDE), 4).world
    assert [(x.version, x.num_steps_beside) for x in chosen_in(world)] == [(0, 0), (8, 2)]
    # These two do not leave time for all of it: training stands still for the rest.
    assert all(x.num_faults == 0 and x.seconds > 0.0 for x in chosen_in(world))


def seldom(text: str, *, every: int = 0) -> JobSpec:
    """A job whose second choice is due at 30, and is looked at rows for from 23 on."""
    job = shape_of(text).job(steps=34, every=every)
    coreset = job.data.coreset.model_copy(update={"refresh_epochs": 8})
    return job.model_copy(update={"data": job.data.model_copy(update={"coreset": coreset})})


def test_where_workers_are_idle_for_long_enough_nobody_stands_still() -> None:
    first, second = chosen_in(simulate(seldom(BESIDE), 4).world)
    assert (second.version, second.num_steps_beside, second.seconds) == (30, 7, 0.0)
    assert first.seconds > 0.0


def test_one_worker_is_never_idle_and_chooses_by_the_newest_parameters() -> None:
    world = simulate(shape_of("line 1x1 beside").job(steps=50, every=0), 1).world
    assert [x.version for x in chosen_in(world)] == [0, 15, 30, 45]
    assert all(x.num_steps_beside == 0 and x.seconds > 0.0 for x in chosen_in(world))


def has_picked(world: World) -> bool:
    assert isinstance(world, Watched)
    return is_looking(world) and world.num_told > len(world.workers) // 2


def is_refreshing(world: World) -> bool:
    """Whether the second stage of a refresh runs."""
    return world_asked(world) > 1


def is_made(world: World) -> bool:
    """Whether a refresh is chosen, and no sample is drawn by it."""
    return is_refreshing(world) and not awaits_choice(world)


def is_recorded(world: World) -> bool:
    return len(chosen_in(world)) > 1


MOMENTS: dict[str, Callable[[World], bool]] = {
    "features": is_looking,
    "candidates": has_picked,
    "second stage": is_refreshing,
    "made": is_made,
    "recorded": is_recorded,
}
"""Of a choice that is made beside steps."""


@pytest.mark.parametrize("text", [BESIDE, "loop 2x2 beside local", "line 2x2 beside ungrouped on 5"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_coordinator_that_begins_anew_meanwhile_makes_the_same_choice(text: str, moment: str) -> None:
    job, num_workers = job_of(text), shape_of(text).num_workers
    world = watched(job, num_workers)
    run_until(world, MOMENTS[moment])
    world.crash_coordinator()
    run = finish(world, about=moment)
    assert run.curve == undisturbed(job, num_workers).curve
    assert [(x.version, x.digest) for x in chosen_in(world)] == undisturbed_choices(job, num_workers)
    assert [x.num_steps_beside for x in chosen_in(world)] == [0, 2]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_worker_that_dies_meanwhile_where_no_path_ends_changes_no_choice(moment: str) -> None:
    job = job_of(BESIDE)
    world = watched(job, 4)
    run_until(world, MOMENTS[moment])
    world.kill_worker(min(x.chunk.worker for x in plan_of(world).chunks if x.chunk.stage == 0))
    run = finish(world, about=moment)
    assert run.num_rollbacks == 0
    assert run.curve == undisturbed(job, 4).curve
    assert [(x.version, x.digest) for x in chosen_in(world)] == undisturbed_choices(job, 4)


@pytest.mark.parametrize("moment", MOMENTS)
def test_one_that_dies_where_paths_end_has_others_choose_by_the_same_parameters(moment: str) -> None:
    job = job_of(BESIDE)
    world = watched(job, 4)
    run_until(world, MOMENTS[moment])
    world.kill_worker(max(x.chunk.worker for x in plan_of(world).chunks if x.chunk.stage == 1))
    run = finish(world, about=moment)
    assert run.num_rollbacks == 0
    assert run.curve == undisturbed(job, 4).curve
    _, second = chosen_in(world)
    assert (second.version, second.num_steps_beside, second.num_faults) == (8, 2, 0)
    assert second.told.read().sizes.sum() == NUM_ROWS - second.num_set_aside
    if moment in ("second stage", "made", "recorded"):
        assert (8, second.digest) in undisturbed_choices(job, 4)


@pytest.mark.parametrize(("every", "is_as_undisturbed"), [(20, True), (25, False)])
def test_a_job_that_goes_back_to_before_a_look_chooses_the_same_and_one_that_goes_back_amid_it_tells(
    every: int, is_as_undisturbed: bool
) -> None:
    job = seldom(BESIDE, every=every)
    world = watched(job, 4)
    run_until(
        world,
        lambda world: (
            is_looking(world) and version_of(world) > every and bool(of_kind(world.log, CheckpointCommitted))
        ),
    )
    for name in list(world.workers):
        world.bring_back(name, 5.0)
        world.kill_worker(name)
    run = finish(world, about="all die")
    assert run.num_rollbacks == 1
    choices = [(x.version, x.digest) for x in chosen_in(world)]
    assert (choices == undisturbed_choices(job, 4)) is is_as_undisturbed
    assert [x.num_steps_beside for x in chosen_in(world)] == [0, 7 if is_as_undisturbed else 0]
    told = [line for line in world.lines if "by the model as it is now, not at step 23" in line]
    assert len(told) == (not is_as_undisturbed)


def test_another_plan_is_taken_once_a_choice_that_is_being_made_is_there() -> None:
    job = job_of(BESIDE)
    world = watched(job, 4)
    run_until(world, is_looking)
    world.tell(DrainAsked(worker=worker(0)))
    finish(world, about="drain")
    assert [(x.version, x.num_steps_beside) for x in chosen_in(world)] == [(0, 0), (8, 2)]
    assert [(x.version, x.digest) for x in chosen_in(world)] == undisturbed_choices(job, 4)


def test_who_is_slow_beside_steps_is_waited_for_when_the_choice_is_due() -> None:
    job = job_of(BESIDE)
    world = watched(job, 4)
    run_until(world, is_looking)
    world.slow_worker(worker(3), 1e4, seconds=20.0)
    finish(world, about="slow")
    assert [x.version for x in chosen_in(world)] == [0, 8]


@pytest.mark.parametrize(
    "shape",
    [
        shape_of(text)
        for text in (
            "line 2x2 chosen",
            "loop 2x2 chosen",
            "line 1x3 chosen",
            "line 2x2 beside ungrouped",
            "loop 3x2 beside local",
        )
    ],
    ids=lambda x: x.text,
)
def test_no_schedule_of_faults_has_a_sample_drawn_otherwise(shape: SimShape) -> None:
    for seed in part(range(60), every=20):
        judged(shape, seed)


# --- what the invariants would see ---


def recorded(**changes: object) -> None:
    world = undisturbed(job_of("line 1x3 chosen"), 3).world
    invariants = Invariants()
    for record in world.log:
        if isinstance(record, CoresetChosen):
            fields = {name: getattr(record, name) for name in CoresetChosen.__dataclass_fields__}
            record = CoresetChosen(**fields | changes)
        invariants.recorded(record)
        if isinstance(record, CoresetChosen):
            return
    raise AssertionError("nothing was chosen")


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_set_aside", 60), ("digest", "another"), ("num_rows", 20), ("sizes", b"\0" * 120)],
)
def test_a_choice_that_stands_for_other_rows_is_a_violation(field: str, value: object) -> None:
    recorded()
    with pytest.raises(Violated):
        recorded(**{field: value})


def test_a_worker_that_does_not_take_a_choice_is_a_violation() -> None:
    world = make_world(job_of("line 1x3 chosen"), fleet_of(3), seed=0, new_world=Deaf)
    with pytest.raises(AssertionError, match="by another choice than was recorded"):
        finish(world, about="deaf")
