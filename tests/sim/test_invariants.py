"""The simulator can fail: each invariant is shown to catch what it is for."""

from dataclasses import replace

import pytest

from skein.plan.balanced import make_balanced_plan
from skein.plan.cut import cut_job
from skein.plan.ops import Direction, Kept
from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.placing.giving_up import LEAST_S
from skein.protocol.log.history import History
from skein.protocol.log.records import (
    EpochOpened,
    GenerationOpened,
    JobHeld,
    JobSubmitted,
    PlanAdopted,
    Record,
    RolledBack,
    StepCommitted,
)
from skein.protocol.messages.directives import (
    Assign,
    Commit,
    Dismiss,
    Ledger,
    Member,
    NewGeneration,
    Prepare,
    Resumption,
    StepRecord,
)
from skein.protocol.messages.progress import ResumedChunk
from skein.protocol.messages.tensors import HopTensor, Phase
from skein.protocol.worker.ops import ApplyOp, BackwardOp, JoinOp, LossOp
from skein.protocol.worker.worker import Worker
from skein.sim.compute.executor import SimExecutor, stage_times
from skein.sim.judging.invariants import (
    FoundStage,
    Invariants,
    Violated,
    initial_of,
    lineage_after,
    visits_of,
)
from skein.sim.lines.reach import ASKED_S, ReachTimes
from skein.sim.scenario import disturbed
from skein.sim.shapes import shape_of
from skein.types import (
    Epoch,
    Generation,
    Incarnation,
    JobId,
    MicrobatchId,
    StageIndex,
    Step,
    WorkerId,
)
from tests.plan.builders import fleet
from tests.support.hands import Hand, alone, record
from tests.support.jobs import small_job
from tests.support.plans import chunk, grid_plan, path, plan_of, schedule
from tests.support.reports import attempt
from tests.support.worlds import run_until, version_of

JOB = JobId("small-1")
SPEC = small_job()
FIRST, SECOND = record(0), record(1)
INITIAL = initial_of(JOB)
AFTER_FIRST = lineage_after(INITIAL, FIRST)


def epoch(number: int) -> EpochOpened:
    return EpochOpened(epoch=Epoch(number), wall_s=0.0)


def generation(number: int) -> GenerationOpened:
    return GenerationOpened(job=JOB, generation=Generation(number), members=(), reason="", wall_s=0.0)


def committed(decided: StepRecord) -> StepCommitted:
    return StepCommitted(job=JOB, record=decided, wall_s=0.0)


def rolled_back(from_version: int, to_version: int) -> RolledBack:
    return RolledBack(
        job=JOB, from_version=Step(from_version), to_version=Step(to_version), reason="", wall_s=0.0
    )


def followed(*records: Record) -> Invariants:
    invariants = Invariants()
    submitted = JobSubmitted(job=JOB, key="k", spec=small_job().canonical_json(), wall_s=0.0)
    for entry in (epoch(1), submitted, generation(1), *records):
        invariants.recorded(entry)
    return invariants


def worker(*, version: int = 0, generation: int = 1, epoch: int = 1) -> Worker:
    """A worker of one stage that says of itself to be there."""
    hand = Hand("w0a")
    hand.connect(epoch=epoch)
    hand.settle(grid_plan(stages=1, replicas=1), generation=generation, epoch=epoch, version=version)
    return hand.machine


def announcement(decided: StepRecord) -> Commit:
    return Commit(epoch=Epoch(1), generation=Generation(1), record=decided, goes_on=True)


@pytest.mark.parametrize("repeated", [epoch(1), generation(1), committed(SECOND)])
def test_numbers_that_do_not_grow_by_the_rules_are_caught(repeated: Record) -> None:
    with pytest.raises(Violated):
        followed().recorded(repeated)


def test_a_step_that_is_committed_twice_is_caught() -> None:
    invariants = followed(committed(FIRST))
    with pytest.raises(Violated, match="step 0 is committed at version 1"):
        invariants.recorded(committed(FIRST))


def test_a_roll_back_allows_its_steps_again() -> None:
    followed(committed(FIRST), committed(SECOND), rolled_back(2, 1), committed(record(1)))


def test_a_roll_back_from_what_is_held_is_caught_and_so_is_a_pause_without_saving_it() -> None:
    plan = grid_plan(stages=2, replicas=1)
    adopted = PlanAdopted(job=JOB, generation=Generation(1), plan=plan)
    invariants = followed(adopted, committed(FIRST), committed(SECOND))
    found = [
        FoundStage(worker=WorkerId(name), stage=stage, version=Step(1), lineage=AFTER_FIRST)
        for name, stage in zip(("a", "b"), plan.stages, strict=True)
    ]
    invariants.gives_up(rolled_back(2, 1), found)
    invariants.gives_up(rolled_back(2, 0), found[:1])
    invariants.gives_up(rolled_back(2, 0), [found[0], replace(found[1], lineage=INITIAL)])
    with pytest.raises(Violated, match=r"given up, and \['a', 'b'\] hold version 1 of 2"):
        invariants.gives_up(rolled_back(2, 0), found)
    held, invariants = JobHeld(job=JOB, reason="paused", wall_s=1.0), followed(adopted, committed(FIRST))
    invariants.gives_up(held, found[:1])
    with pytest.raises(Violated, match=r"given up, and \['a', 'b'\] hold version 1 of 1"):
        invariants.gives_up(held, found)


def test_who_counts_as_reached_was_asked_or_may_still_come_back() -> None:
    reach, process = ReachTimes(), Incarnation("i")
    reach.note(process, is_reached=False, now=10.0)
    assert reach.counts(process, now=10.0 + LEAST_S - 1.0)
    assert not reach.counts(process, now=10.0 + LEAST_S)
    reach.serves(now=20.0)
    assert reach.counts(process, now=10.0 + LEAST_S)
    reach.note(process, is_reached=True, now=30.0)
    assert not reach.counts(process, now=30.0)
    reach.note(process, is_reached=True, now=30.0 + ASKED_S)
    assert reach.counts(process, now=30.0 + ASKED_S)


def test_an_announcement_before_its_record_is_caught() -> None:
    invariants = followed()
    with pytest.raises(Violated, match="announced before"):
        invariants.announced(announcement(FIRST))
    invariants.recorded(committed(FIRST))
    invariants.announced(announcement(FIRST))
    invariants.announced(Dismiss(epoch=Epoch(1), job=JOB, may_exit=False))


def test_a_fence_that_names_no_recorded_commit_is_caught() -> None:
    fence = NewGeneration(epoch=Epoch(1), generation=Generation(1), job=JOB, key=b"", last_commit=FIRST)
    with pytest.raises(Violated):
        followed().announced(fence)


def test_an_update_of_other_parameters_is_caught() -> None:
    invariants = followed(committed(FIRST), committed(SECOND))
    invariants.applies(worker(version=1), SECOND, [AFTER_FIRST])
    with pytest.raises(Violated, match="applies step 1 to other parameters"):
        invariants.applies(worker(version=1), SECOND, [AFTER_FIRST, INITIAL])


def test_an_update_that_was_rolled_back_meanwhile_is_nobodys_business() -> None:
    invariants = followed(committed(FIRST), rolled_back(1, 0))
    invariants.applies(worker(), FIRST, ["whatever"])


def test_a_chunk_of_another_history_is_caught() -> None:
    invariants = followed(committed(FIRST))
    invariants.holds(worker(version=1), Generation(1), Step(1), {StageIndex(0): AFTER_FIRST})
    with pytest.raises(Violated, match="holds another stage 0 at version 1"):
        invariants.holds(worker(version=1), Generation(1), Step(1), {StageIndex(0): INITIAL})
    # What an older generation builds is of no consequence.
    invariants.holds(worker(version=1), Generation(0), Step(1), {StageIndex(0): INITIAL})


def test_a_worker_that_goes_back_is_caught() -> None:
    invariants = followed(generation(2))
    invariants.handled(worker(generation=2))
    with pytest.raises(Violated, match="went back"):
        invariants.handled(worker(generation=1))


def test_a_slot_too_many_is_caught() -> None:
    machine = worker()
    assert machine.pipeline is not None
    releases = HopTensor(
        direction=Direction.BACKWARD,
        phase=Phase.EVALUATE,
        step=Step(0),
        microbatch=MicrobatchId(0),
        hop=0,
        path=grid_plan(stages=1, replicas=1).paths[0],
    )
    machine.pipeline.arrive(releases)
    with pytest.raises(Violated, match="taken slots"):
        followed().handled(machine)


@pytest.mark.parametrize("ahead", [worker(epoch=2), worker(generation=2), worker(version=1)])
def test_a_worker_that_is_ahead_of_the_log_is_caught(ahead: Worker) -> None:
    with pytest.raises(Violated):
        followed().handled(ahead)


# --- what an update is compared with ---


def executor_of(*accumulated: int) -> SimExecutor:
    """Of the only holder of a stage whose schedule adds microbatches 1, 0; it has added these."""
    alone = chunk(0, "w0a")
    plan = plan_of([alone], [path(alone)] * 2, schedules=(schedule("w0a", "L0.1 L0.0"),))
    hand = Hand("w0a")
    executor = SimExecutor(alone.worker, flops_per_s=1e9)
    layers = SPEC.layers
    times = {StageIndex(0): stage_times(SPEC, layers, plan.stages[0])}
    executor.build(hand.assignment(plan), {StageIndex(0): INITIAL}, times, visits_of(plan))
    for microbatch in accumulated:
        executor.run(
            LossOp(
                phase=Phase.TRAIN,
                step=Step(0),
                microbatch=MicrobatchId(microbatch),
                hop=0,
                path=plan.paths[0],
            )
        )
    executor.run(JoinOp(step=Step(0), group=plan.groups[0], attempt=attempt()))
    return executor


def weighted(weight: float) -> ApplyOp:
    decided = record(0, attempts={"s0": attempt()})
    return ApplyOp(record=replace(decided, results=(replace(decided.results[0], weight=weight),)))


def test_visits_that_count_once_in_their_order_pass() -> None:
    executor_of(1, 0).run(weighted(1 / 2))


@pytest.mark.parametrize(
    ("accumulated", "weight", "found"),
    [
        ((0, 1), 1 / 2, "planned was"),
        ((1,), 1 / 2, "planned was"),
        ((1, 0, 0), 1 / 2, "sums"),
        ((1, 0), 1.0, "weighs 1.0 for 2 tokens"),
    ],
)
def test_visits_out_of_order_missing_repeated_or_wrongly_weighted_are_caught(
    accumulated: tuple[int, ...], weight: float, found: str
) -> None:
    with pytest.raises(Violated, match=found):
        executor_of(*accumulated).run(weighted(weight))


# --- steps that go on ---


def adopted(plan: Plan) -> PlanAdopted:
    return PlanAdopted(job=JOB, generation=Generation(1), plan=plan)


def going_on(assign: Assign, *ledger: int, left: str = "") -> Assign:
    """The assignment of a worker that has added these, with these ops to come."""
    kept = ResumedChunk(stage=StageIndex(0), ledger=tuple(map(MicrobatchId, ledger)), forwards=())
    resumption = Resumption(
        step=Step(0),
        schedule=schedule(assign.schedule.worker, left),
        chunks=(kept,),
        origins=(),
        repeats=(),
    )
    return replace(assign, resumption=resumption, peers=())


def test_a_contribution_that_two_workers_are_to_make_is_caught() -> None:
    plan = grid_plan(stages=1, replicas=2)
    first, second = (Hand(name).assignment(plan) for name in ("w0a", "w0b"))
    invariants = followed()
    invariants.announced(going_on(first, 0, left="L0.1"))
    invariants.announced(going_on(second, 2, left="L0.3"))
    for other in (going_on(second, 0), going_on(second, left="L0.1")):
        with pytest.raises(Violated, match=r"w0b's, and w0a's too"):
            invariants.announced(other)


def test_a_contribution_that_a_worker_is_to_make_twice_is_caught() -> None:
    assign = Hand("w0a").assignment(grid_plan(stages=1, replicas=2))
    with pytest.raises(Violated, match="add up twice"):
        followed().announced(going_on(assign, 0, left="L0.0"))


@pytest.mark.parametrize("parts", [((0, 2), (1, 3, 0)), ((0, 2), (1,))])
def test_a_reduction_of_parts_that_overlap_or_leave_out_is_caught(parts: tuple[tuple[int, ...], ...]) -> None:
    invariants = followed(adopted(grid_plan(stages=1, replicas=2)))

    def prepare(*held: tuple[int, ...]) -> Prepare:
        ledgers = tuple(
            Ledger(stage=StageIndex(0), worker=WorkerId(name), microbatches=tuple(map(MicrobatchId, ids)))
            for name, ids in zip(("w0a", "w0b"), held, strict=True)
        )
        return Prepare(
            epoch=Epoch(1),
            generation=Generation(1),
            step=Step(0),
            group=alone("s0", ledgers),
            attempt=attempt(),
            parts=ledgers,
            exchange=None,
        )

    invariants.announced(prepare((0, 2), (1, 3)))
    with pytest.raises(Violated, match="is reduced from"):
        invariants.announced(prepare(*parts))


def test_a_peer_that_is_no_member_by_its_record_is_caught() -> None:
    stranger = Member(worker=WorkerId("w9"), incarnation=Incarnation("i9"), address="")
    told = replace(Hand().assignment(grid_plan(stages=2, replicas=1, num_microbatches=2)), peers=(stranger,))
    with pytest.raises(Violated, match="as peers, no members"):
        followed().announced(told)


def test_computing_before_the_generation_has_assigned_anything_is_caught() -> None:
    machine = worker()
    op = LossOp(
        phase=Phase.TRAIN,
        step=Step(0),
        microbatch=MicrobatchId(0),
        hop=0,
        path=grid_plan(stages=1, replicas=1).paths[0],
    )
    invariants = followed()
    with pytest.raises(Violated, match="computes under 1"):
        invariants.begins(machine, op)
    invariants.built(machine, Generation(1))
    invariants.begins(machine, op)


def test_a_cursor_that_skips_samples_is_caught() -> None:
    with pytest.raises(Violated, match="cursor"):
        followed(committed(replace(FIRST, samples_after=7)))


def test_a_state_that_the_log_does_not_tell_is_caught() -> None:
    invariants = followed(committed(FIRST))
    live = History()
    submitted = JobSubmitted(job=JOB, key="k", spec=small_job().canonical_json(), wall_s=0.0)
    for entry in (epoch(1), submitted, generation(1), committed(FIRST)):
        live.apply(entry)
    invariants.replays(live)
    live.jobs[JOB].num_tokens += 1
    with pytest.raises(Violated, match="other jobs"):
        invariants.replays(live)


def test_an_op_without_its_operand_is_caught() -> None:
    executor = executor_of()
    op = BackwardOp(
        step=Step(0),
        microbatch=MicrobatchId(0),
        hop=0,
        path=grid_plan(stages=1, replicas=1).paths[0],
    )
    with pytest.raises(Violated, match="without"):
        executor.begins(op, Generation(1))


@pytest.mark.parametrize("moved", [-1, 1])
def test_shards_that_lack_rows_or_have_some_twice_are_caught(moved: int) -> None:
    job = shape_of("line 2x2 rows output").job(steps=1)
    stages = cut_job(job)
    # Of two shards of the output, the later one begins a block too soon or too late.
    *others, last = stages
    wrong = (*others, replace(last, first=last.first + moved))
    invariants = Invariants()
    submitted = JobSubmitted(job=JOB, key="k", spec=job.canonical_json(), wall_s=0.0)
    for entry in (epoch(1), submitted, generation(1)):
        invariants.recorded(entry)
    plan = make_balanced_plan(job, fleet([1e10] * 4), None, 0)
    assert isinstance(plan, Plan)
    invariants.recorded(PlanAdopted(job=JOB, generation=Generation(1), plan=plan))
    with pytest.raises(Violated, match="stages of the output hold rows"):
        invariants.recorded(PlanAdopted(job=JOB, generation=Generation(1), plan=replace(plan, stages=wrong)))


def test_weight_gradients_that_are_put_aside_still_when_a_step_is_applied_are_caught() -> None:
    world = disturbed(shape_of("line 2x2 split"), seed=0, num_faults=0)
    run_until(world, lambda world: version_of(world) == 1)
    process = next(iter(world.workers.values()))
    (stage,) = process.executor.chunks
    process.executor._kept.add((Kept.PENDING, MicrobatchId(99), stage))
    with pytest.raises(Violated, match=r"with weight gradients of \[99\] put aside"):
        run_until(world, lambda world: version_of(world) == 3)
