"""The compute ops of one worker: their order, their slots, and that no plan makes them wait for each other."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from skein.plan.ops import Direction, Kept
from skein.plan.order import left_undone
from skein.plan.plan import Path, Plan
from skein.protocol.coordinator.runs.placing.sources import Sources, assignments
from skein.protocol.messages.directives import ChunkAssignment, Ledger, Origin, SourceKind, StateSource
from skein.protocol.messages.reports import Balance
from skein.protocol.messages.tensors import HopTensor, Phase
from skein.protocol.worker.ops import BackwardOp, ForwardOp, InputOp, Loss, LossOp, VisitOp
from skein.protocol.worker.pipeline import Occupancy, Pipeline
from skein.types import ChunkRef, JobId, Layout, MicrobatchId, StageIndex, Step, WorkerId
from tests.support.drawn import carried_out, random_plan, shuffled
from tests.support.extent import part
from tests.support.plans import chunk, grid_plan, microbatches, path, schedule, stage_spec
from tests.support.reports import ledger

LINE = path(chunk(0, "a"), chunk(1, "b"))
LOSS = Loss(loss_sum=2.0, num_tokens=3)


def machine_of(
    worker: str, words: str, *, slots: int = 2, evaluation_paths: tuple[int, ...] = ()
) -> Pipeline:
    """A worker with the stages of a schedule as `F0.1 B0.1 L2.1`: kind, stage and microbatch of each op."""
    planned = schedule(worker, words)
    chunks = [
        ChunkAssignment(
            stage=stage_spec(stage),
            slots=slots,
            source=StateSource(kind=SourceKind.INITIAL, version=Step(0)),
            evaluation_paths=evaluation_paths,
        )
        for stage in sorted({op.stage for op in planned.ops})
    ]
    return Pipeline(WorkerId(worker), chunks, planned, Step(0))


def tensor(
    direction: Direction, microbatch: int, hop: int, way: Path, *, phase: Phase = Phase.TRAIN, step: int = 0
) -> HopTensor:
    return HopTensor(
        direction=direction,
        phase=phase,
        step=Step(step),
        microbatch=MicrobatchId(microbatch),
        hop=hop,
        path=way,
    )


def forward(microbatch: int, hop: int, way: Path = LINE, *, phase: Phase = Phase.TRAIN) -> HopTensor:
    return tensor(Direction.FORWARD, microbatch, hop, way, phase=phase)


def backward(microbatch: int, hop: int, way: Path = LINE, *, phase: Phase = Phase.TRAIN) -> HopTensor:
    return tensor(Direction.BACKWARD, microbatch, hop, way, phase=phase)


def first_stage(*, num_microbatches: int = 4, slots: int = 2) -> Pipeline:
    forwards = " ".join(f"F0.{m}" for m in range(num_microbatches))
    # Backwards stand first: whatever may run of them does.
    machine = machine_of("a", f"{forwards.replace('F', 'B')} {forwards}", slots=slots)
    origins = [Origin(microbatch=MicrobatchId(m), path=LINE) for m in range(num_microbatches)]
    machine.begin(Phase.TRAIN, origins)
    return machine


def run_ready(machine: Pipeline) -> list[str]:
    """Run what may run, as `F0 B1 L2` with microbatches."""
    ran = []
    while (op := machine.next_op()) is not None:
        ran.append(f"{type(op).__name__[0]}{op.microbatch}")
        machine.end(op, LOSS if isinstance(op, LossOp) else None)
    return ran


def test_no_more_microbatches_are_in_flight_than_there_are_slots() -> None:
    machine = first_stage(slots=2)
    assert run_ready(machine) == ["F0", "F1"]
    assert machine.num_in_flight == 2
    machine.arrive(backward(0, 0))
    assert run_ready(machine) == ["B0", "F2"]


def test_backward_goes_before_forward_when_both_are_ready() -> None:
    machine = first_stage(slots=3)
    op = machine.next_op()
    assert isinstance(op, ForwardOp)
    machine.end(op, None)
    machine.arrive(backward(0, 0))
    assert run_ready(machine)[0] == "B0"


def test_contributions_are_accumulated_in_ascending_order_whatever_arrives_first() -> None:
    machine = first_stage(slots=4)
    run_ready(machine)
    for microbatch in (2, 1, 3):
        machine.arrive(backward(microbatch, 0))
        assert run_ready(machine) == []
    machine.arrive(backward(0, 0))
    assert run_ready(machine) == ["B0", "B1", "B2", "B3"]
    assert machine.ledger(StageIndex(0)) == ledger(0, "a", 0, 1, 2, 3)
    assert machine.is_done(StageIndex(0))


SPLIT = Path(hops=(chunk(0, "a"), chunk(1, "b"), chunk(2, "c")), split=(1,))


def split_stage(words: str, *, num_microbatches: int, slots: int) -> Pipeline:
    """The stage between the others, with activations of all microbatches here."""
    machine = machine_of("b", words, slots=slots)
    for microbatch in range(num_microbatches):
        machine.arrive(forward(microbatch, 1, SPLIT))
    return machine


def test_gradients_are_handed_back_as_they_come_and_sums_are_made_in_order() -> None:
    machine = split_stage("F1.0 F1.1 I1.0 I1.1 W1.0 W1.1", num_microbatches=2, slots=2)
    assert run_ready(machine) == ["F0", "F1"]
    machine.arrive(backward(1, 1, SPLIT))
    # The weight op of 1 waits for that of 0.
    assert run_ready(machine) == ["I1"]
    assert machine.ledger(StageIndex(1)) == ledger(1, "b")
    machine.arrive(backward(0, 1, SPLIT))
    assert run_ready(machine) == ["I0", "W0", "W1"]
    assert machine.ledger(StageIndex(1)) == ledger(1, "b", 0, 1)
    assert machine.is_done(StageIndex(1))


def test_a_slot_is_free_again_when_the_weight_op_has_ended() -> None:
    machine = split_stage("F1.0 I1.0 F1.1 W1.0 I1.1 W1.1", num_microbatches=2, slots=1)
    assert run_ready(machine) == ["F0"]
    machine.arrive(backward(0, 1, SPLIT))
    assert run_ready(machine) == ["I0", "W0", "F1"]


def test_what_is_put_aside_is_carried_over_and_a_weight_op_goes_on_from_it() -> None:
    machine = split_stage("F1.0 I1.0 W1.0", num_microbatches=1, slots=1)
    run_ready(machine)
    machine.arrive(backward(0, 1, SPLIT))
    op = machine.next_op()
    assert isinstance(op, InputOp)
    assert machine.end(op, None) == (backward(0, 0, SPLIT),)
    carried = machine.carried()[StageIndex(1)]
    assert (carried.ledger, list(carried.held)) == ((), [(Kept.PENDING, MicrobatchId(0))])
    after = machine_of("b", "F1.0 I1.0 W1.0", slots=1)
    after.resume({StageIndex(1): carried}, schedule("b", "W1.0"))
    assert after.num_in_flight == 1
    assert run_ready(after) == ["W0"]
    assert after.num_in_flight == 0


def balance(loss_sum: float) -> Balance:
    return Balance(loss_sum=loss_sum, num_tokens=3, num_choices=8, num_dropped=1)


def test_balances_are_told_of_what_is_in_the_ledger_and_survive_a_stop() -> None:
    words = "F1.0 F1.1 I1.0 W1.0 I1.1 W1.1"
    machine = split_stage(words, num_microbatches=2, slots=2)
    for loss_sum in (0.25, 2.0):
        op = machine.next_op()
        assert isinstance(op, ForwardOp)
        machine.end(op, None, balance(loss_sum))
    assert machine.balance(StageIndex(1)) is None
    machine.arrive(backward(0, 1, SPLIT))
    assert run_ready(machine) == ["I0", "W0"]
    assert machine.balance(StageIndex(1)) == balance(0.25)
    after = machine_of("b", words, slots=2)
    after.resume(machine.carried(), schedule("b", "I1.1 W1.1"))
    after.arrive(backward(1, 1, SPLIT))
    assert run_ready(after) == ["I1", "W1"]
    assert after.balance(StageIndex(1)) == Balance(loss_sum=2.25, num_tokens=6, num_choices=16, num_dropped=2)
    # Of the next step nothing is known yet.
    after.advance(Step(1))
    assert after.balance(StageIndex(1)) is None


def test_a_whole_backward_is_not_what_a_split_hop_asks_for() -> None:
    machine = split_stage("F1.0 B1.0", num_microbatches=1, slots=1)
    assert not machine.may_hold(backward(0, 1, SPLIT))


def test_the_loss_is_taken_in_ascending_order_too() -> None:
    machine = machine_of("b", "L1.0 L1.1 L1.2")
    machine.arrive(forward(2, 1))
    machine.arrive(forward(1, 1))
    assert machine.next_op() is None
    machine.arrive(forward(0, 1))
    assert run_ready(machine) == ["L0", "L1", "L2"]
    assert machine.train_loss_sum(StageIndex(1)) == 6.0
    assert machine.train_tokens(StageIndex(1)) == (3, 3, 3)
    assert machine.is_done(StageIndex(1))
    assert machine.ledger(StageIndex(1)) == ledger(1, "b", 0, 1, 2)


def test_what_arrives_again_is_dropped() -> None:
    machine = machine_of("b", "L1.0 L1.1")
    for _ in range(2):
        assert machine.arrive(forward(0, 1)) == ()
    assert run_ready(machine) == ["L0"]
    machine.arrive(forward(0, 1))
    assert run_ready(machine) == []


def test_an_op_that_ends_names_the_tensor_that_goes_on() -> None:
    way = path(chunk(0, "a"), chunk(1, "b"), chunk(2, "c"))
    machine = machine_of("b", "F1.0 B1.0")
    machine.arrive(forward(0, 1, way))
    op = machine.next_op()
    assert isinstance(op, ForwardOp)
    assert machine.end(op, None) == (forward(0, 2, way),)
    machine.arrive(backward(0, 1, way))
    op = machine.next_op()
    assert isinstance(op, BackwardOp)
    assert machine.end(op, None) == (backward(0, 0, way),)


def test_a_gradient_waits_for_the_activation_that_it_is_for() -> None:
    way = path(chunk(0, "a"), chunk(1, "b"), chunk(2, "c"))
    machine = machine_of("b", "F1.0 B1.0")
    machine.arrive(backward(0, 1, way))
    assert machine.next_op() is None
    machine.arrive(forward(0, 1, way))
    assert run_ready(machine) == ["F0", "B0"]


def test_nothing_leaves_the_first_hop_backwards() -> None:
    machine = first_stage(num_microbatches=1)
    run_ready(machine)
    machine.arrive(backward(0, 0))
    op = machine.next_op()
    assert op is not None
    assert machine.end(op, None) == ()


def test_a_tensor_for_another_worker_stage_or_microbatch_is_not_held() -> None:
    machine = machine_of("b", "L1.0")
    assert machine.may_hold(forward(0, 1))
    assert not machine.may_hold(forward(0, 0))
    assert not machine.may_hold(forward(0, 2))
    assert not machine.may_hold(forward(0, -1))
    assert not machine.may_hold(forward(3, 1))
    assert machine.may_hold(forward(3, 1, phase=Phase.EVALUATE))
    assert not machine.may_hold(forward(0, 1, path(chunk(0, "a"), chunk(2, "b"))))
    # A path that goes on from here was not what the schedule said.
    assert not machine.may_hold(forward(0, 1, path(chunk(0, "a"), chunk(1, "b"), chunk(2, "c"))))
    # Nothing comes back to where the loss is.
    assert not machine.may_hold(backward(0, 1))


def test_the_next_step_begins_with_empty_ledgers() -> None:
    machine = first_stage(num_microbatches=1)
    run_ready(machine)
    machine.arrive(backward(0, 0))
    run_ready(machine)
    machine.advance(Step(1))
    assert machine.ledger(StageIndex(0)) == ledger(0, "a")
    machine.begin(Phase.TRAIN, [Origin(microbatch=MicrobatchId(0), path=LINE)])
    op = machine.next_op()
    assert op is not None
    assert op.step == 1


# --- evaluation ---


def test_an_evaluation_microbatch_holds_its_slot_until_it_is_released() -> None:
    machine = machine_of("a", "F0.0 B0.0", slots=1)
    machine.begin(Phase.EVALUATE, [Origin(microbatch=MicrobatchId(e), path=LINE) for e in range(3)])
    assert run_ready(machine) == ["F0"]
    assert machine.arrive(backward(0, 0, phase=Phase.EVALUATE)) == ()
    assert run_ready(machine) == ["F1"]


def test_a_release_that_a_whole_step_overtook_costs_no_slot() -> None:
    machine = first_stage(num_microbatches=1, slots=2)
    machine.begin(Phase.EVALUATE, [Origin(microbatch=MicrobatchId(0), path=LINE)])
    assert run_ready(machine) == ["F0", "F0"]
    machine.arrive(backward(0, 0))
    assert run_ready(machine) == ["B0"]
    machine.advance(Step(1))
    assert machine.num_in_flight == 0


def test_a_release_is_passed_on_to_the_hop_before() -> None:
    way = path(chunk(0, "a"), chunk(1, "b"), chunk(2, "c"))
    machine = machine_of("b", "F1.0 B1.0")
    machine.arrive(forward(0, 1, way, phase=Phase.EVALUATE))
    run_ready(machine)
    released = machine.arrive(backward(0, 1, way, phase=Phase.EVALUATE))
    assert released == (backward(0, 0, way, phase=Phase.EVALUATE),)
    assert machine.num_in_flight == 0


def test_evaluation_losses_are_counted_apart_from_training() -> None:
    machine = machine_of("b", "L1.0 L1.1")
    machine.arrive(forward(5, 1, phase=Phase.EVALUATE))
    machine.arrive(forward(0, 1))
    assert run_ready(machine) == ["L0", "L5"]
    assert machine.evaluation_loss(StageIndex(1)) == (microbatches(5), LOSS)
    assert machine.train_loss_sum(StageIndex(1)) == 2.0
    assert machine.ledger(StageIndex(1)) == ledger(1, "b", 0)


@pytest.mark.parametrize(
    ("num_evaluation", "expected"), [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (9, 5)]
)
def test_how_many_evaluation_microbatches_visit_a_chunk(num_evaluation: int, expected: int) -> None:
    """Of four evaluation paths, 0 and 2 visit this chunk."""
    machine = machine_of("b", "L1.0 L1.2", evaluation_paths=(0, 2))
    assert machine.expected_evaluations(StageIndex(1), num_evaluation, 4) == expected


def test_queue_depths_are_told_by_kind() -> None:
    machine = machine_of("b", "F1.1 L2.2 F1.3 B1.3")
    way = path(chunk(0, "a"), chunk(1, "b"), chunk(2, "b"))
    machine.arrive(forward(1, 1, way))
    machine.arrive(forward(2, 2, way))
    machine.arrive(backward(3, 1, way))
    machine.arrive(forward(7, 1, way, phase=Phase.EVALUATE))
    assert machine.queue_depths == {
        "forward": 2,
        "loss": 1,
        "backward": 1,
        "input": 0,
        "weight": 0,
        "loss_input": 0,
    }


def test_what_holds_a_slot_is_told_with_the_most_of_the_newest_step() -> None:
    machine = machine_of("b", "F1.1 F1.2 I1.1 W1.1 I1.2 W1.2", slots=3)
    stage = StageIndex(1)
    way = replace(path(chunk(0, "a"), chunk(1, "b"), chunk(2, "c")), split=(1,))
    assert machine.occupancy == Occupancy(slots=3, peak_by_stage=((stage, 0),))
    for microbatch in (1, 2):
        machine.arrive(forward(microbatch, 1, way))
    run_ready(machine)
    machine.arrive(backward(1, 1, way))
    started = machine.next_op()
    assert started is not None
    machine.end(started, None)
    assert machine.occupancy == Occupancy(
        in_flight=2, peak=2, slots=3, pending=1, peak_by_stage=((stage, 2),)
    )
    run_ready(machine)
    machine.arrive(backward(2, 1, way))
    run_ready(machine)
    assert machine.occupancy == Occupancy(peak=2, slots=3, peak_by_stage=((stage, 2),))
    machine.advance(Step(1))
    assert machine.occupancy == Occupancy(peak=2, slots=3, peak_by_stage=((stage, 2),))
    machine.advance(Step(2))
    assert machine.occupancy == Occupancy(slots=3, peak_by_stage=((stage, 0),))


# --- whole plans ---


@dataclass(slots=True)
class Floor:
    """All workers of a plan, with what is on its way between them."""

    plan: Plan
    machines: dict[WorkerId, Pipeline]
    ways: list[tuple[WorkerId, HopTensor]] = field(default_factory=list)
    busy: dict[WorkerId, VisitOp] = field(default_factory=dict)
    ledgers: list[Ledger] = field(default_factory=list)
    slots: dict[WorkerId, int] = field(default_factory=dict)

    def deliver(self, tensors: Iterable[HopTensor]) -> None:
        """As a worker's machine does: to the next hop, at once if that is here."""
        self.ways += [(tensor.path.hops[tensor.hop].worker, tensor) for tensor in tensors]


def floor_of(plan: Plan) -> Floor:
    drawn = StateSource(kind=SourceKind.INITIAL, version=Step(0))
    told = assignments(
        plan,
        Sources(version=Step(0), by_chunk={x.chunk: drawn for x in plan.chunks}, unheld=()),
        job=JobId("j"),
        job_spec="{}",
        resumptions={},
    )
    machines = {worker: Pipeline(worker, x.chunks, x.schedule, Step(0)) for worker, x in told.items()}
    floor = Floor(plan=plan, machines=machines)
    for placed in plan.chunks:
        floor.slots[placed.chunk.worker] = floor.slots.get(placed.chunk.worker, 0) + placed.slots
    return floor


def run_floor(floor: Floor, phase: Phase, num_microbatches: int, order: random.Random) -> None:
    """Deliver tensors and end ops in a random order until nothing is left to do."""
    paths = floor.plan.paths if phase is Phase.TRAIN else floor.plan.evaluation_paths
    for worker, machine in floor.machines.items():
        machine.begin(
            phase,
            [
                Origin(microbatch=MicrobatchId(m), path=paths[m % len(paths)])
                for m in range(num_microbatches)
                if paths[m % len(paths)].hops[0].worker == worker
            ],
        )
    while True:
        for worker, machine in floor.machines.items():
            if worker not in floor.busy and (op := machine.next_op()) is not None:
                floor.busy[worker] = op
            assert 0 <= machine.num_in_flight <= floor.slots[worker]
        if not floor.busy and not floor.ways:
            return
        at = order.randrange(len(floor.busy) + len(floor.ways))
        if at < len(floor.busy):
            worker = sorted(floor.busy)[at]
            op = floor.busy.pop(worker)
            loss = Loss(loss_sum=float(op.microbatch), num_tokens=1) if isinstance(op, LossOp) else None
            floor.deliver(floor.machines[worker].end(op, loss))
        else:
            worker, tensor = floor.ways.pop(at - len(floor.busy))
            assert floor.machines[worker].may_hold(tensor)
            floor.deliver(floor.machines[worker].arrive(tensor))


def slots_of(plan: Plan) -> dict[ChunkRef, int]:
    return {placed.chunk: placed.slots for placed in plan.chunks}


def check_done(floor: Floor, about: str) -> None:
    """Everything was accumulated, in the order of the schedules, and nothing is left behind."""
    for at, expected in floor.plan.microbatches_by_chunk().items():
        assert floor.machines[at.worker].ledger(at.stage).microbatches == expected, about
    assert all(machine.num_in_flight == 0 for machine in floor.machines.values()), about


@pytest.mark.parametrize("seed", part(range(60), every=4))
def test_ascending_order_makes_no_workers_wait_for_each_other_whatever_the_paths(seed: int) -> None:
    luck = random.Random(seed)
    floor = floor_of(random_plan(luck))
    run_floor(floor, Phase.TRAIN, len(floor.plan.paths), luck)
    check_done(floor, f"seed {seed}")


@pytest.mark.parametrize("seed", part(range(60), every=4))
def test_an_order_that_was_once_carried_out_can_always_be(seed: int) -> None:
    luck = random.Random(seed)
    plan = random_plan(luck)
    schedules = carried_out(plan.paths, slots_of(plan), luck) or plan.schedules
    for timing in range(3):
        floor = floor_of(replace(plan, schedules=schedules))
        run_floor(floor, Phase.TRAIN, len(plan.paths), random.Random(timing))
        check_done(floor, f"seed {seed}, timing {timing}")


def test_whether_an_order_comes_to_a_halt_does_not_depend_on_timing() -> None:
    """And the walk without times says which it is: both kinds are among these."""
    halts = []
    for seed in range(80):
        luck = random.Random(seed)
        plan = random_plan(luck)
        mixed = replace(plan, schedules=shuffled(plan.schedules, luck))
        halts.append(bool(left_undone(mixed)))
        for timing in range(3):
            floor = floor_of(mixed)
            run_floor(floor, Phase.TRAIN, len(plan.paths), random.Random(timing))
            if halts[-1]:
                stages = [
                    (machine, x.stage) for x in slots_of(plan) for machine in [floor.machines[x.worker]]
                ]
                assert not all(machine.is_done(stage) for machine, stage in stages), seed
            else:
                check_done(floor, f"seed {seed}, timing {timing}")
    assert 10 < sum(halts) < 70


def test_between_two_chunks_what_stands_first_in_the_schedule_goes_first() -> None:
    machine = machine_of("b", "F2.0 F1.1 F1.0 F2.1")
    one, other = (
        path(chunk(0, "a"), chunk(1, "b"), chunk(3, "c")),
        path(chunk(0, "a"), chunk(2, "b"), chunk(3, "c")),
    )
    machine.arrive(forward(1, 1, one))
    machine.arrive(forward(0, 1, other))
    assert run_ready(machine) == ["F0", "F1"]
    assert machine.queue_depths["forward"] == 0


def test_what_is_ready_does_not_wait_for_what_stands_before_it_elsewhere() -> None:
    machine = machine_of("b", "F2.0 F1.1")
    machine.arrive(forward(1, 1, path(chunk(0, "a"), chunk(1, "b"), chunk(3, "c"))))
    assert run_ready(machine) == ["F1"]


def test_of_one_chunk_a_later_forward_waits_for_the_earlier() -> None:
    machine = machine_of("b", "F1.3 F1.0")
    way = path(chunk(0, "a"), chunk(1, "b"), chunk(3, "c"))
    machine.arrive(forward(0, 1, way))
    assert run_ready(machine) == []
    machine.arrive(forward(3, 1, way))
    assert run_ready(machine) == ["F3", "F0"]


def test_the_ledger_is_in_the_order_of_the_schedule() -> None:
    machine = machine_of("b", "L1.2 L1.0 L1.1")
    for microbatch in range(3):
        machine.arrive(forward(microbatch, 1))
    assert run_ready(machine) == ["L2", "L0", "L1"]
    assert machine.ledger(StageIndex(1)) == ledger(1, "b", 2, 0, 1)
    assert machine.train_tokens(StageIndex(1)) == (3, 3, 3)


def test_evaluation_waits_for_all_training_that_may_run() -> None:
    machine = machine_of("b", "F1.0 F1.1")
    way = path(chunk(0, "a"), chunk(1, "b"), chunk(2, "c"))
    machine.arrive(forward(7, 1, way, phase=Phase.EVALUATE))
    machine.arrive(forward(1, 1, way))
    machine.arrive(forward(0, 1, way))
    assert run_ready(machine) == ["F0", "F1"]


@pytest.mark.parametrize("seed", part(range(60), every=4))
def test_an_evaluation_visits_every_head_once_and_leaves_no_slot_taken(seed: int) -> None:
    order = random.Random(seed)
    plan = random_plan(order)
    floor = floor_of(plan)
    num_evaluation = order.randint(1, 12)
    run_floor(floor, Phase.EVALUATE, num_evaluation, order)
    heads: dict[ChunkRef, int] = {}
    for worker, machine in floor.machines.items():
        assert machine.num_in_flight == 0, seed
        ends = [way.hops[-1] for way in plan.evaluation_paths]
        for stage in {end.stage for end in ends if end.worker == worker}:
            found, loss = machine.evaluation_loss(stage)
            heads[ChunkRef(stage=stage, worker=worker)] = len(found)
            assert loss.num_tokens == len(found)
            assert len(found) == machine.expected_evaluations(
                stage, num_evaluation, len(plan.evaluation_paths)
            )
    assert sum(heads.values()) == num_evaluation, seed


def test_an_evaluation_after_a_step_finds_all_slots_free() -> None:
    plan = grid_plan(layout=Layout.LOOP, slots=1)
    floor = floor_of(plan)
    order = random.Random(0)
    run_floor(floor, Phase.TRAIN, 4, order)
    for machine in floor.machines.values():
        machine.advance(Step(1))
    run_floor(floor, Phase.EVALUATE, 6, order)
    run_floor(floor, Phase.TRAIN, 4, order)
    for placed in plan.chunks:
        assert floor.machines[placed.chunk.worker].is_done(placed.chunk.stage)


# --- selection ---


def selects(direction: Direction, microbatch: int, hop: int, *, step: int = 0) -> HopTensor:
    return tensor(direction, microbatch, hop, LINE, phase=Phase.SELECT, step=step)


def test_a_selection_goes_on_beside_steps_after_all_else_that_may_run() -> None:
    machine = machine_of("b", "L1.0 L1.1")
    for microbatch in (3, 4):
        machine.arrive(selects(Direction.FORWARD, microbatch, 1))
    machine.arrive(forward(5, 1, phase=Phase.EVALUATE))
    machine.arrive(forward(0, 1))
    op = machine.next_op()
    assert op is not None
    assert (op.phase, op.microbatch) == (Phase.TRAIN, 0)
    machine.end(op, LOSS)
    op = machine.next_op()
    assert op is not None
    assert op.phase is Phase.EVALUATE
    machine.end(op, LOSS)
    machine.advance(Step(1))
    late = selects(Direction.FORWARD, 7, 1)
    assert machine.may_hold(late)
    machine.arrive(late)
    machine.arrive(late)
    assert run_ready(machine) == ["L3", "L4", "L7"]
    assert machine.evaluation_loss(StageIndex(1), Phase.SELECT)[0] == microbatches(3, 4, 7)


def test_a_selection_takes_no_slot_of_a_step() -> None:
    machine = first_stage(num_microbatches=2, slots=1)
    machine.begin(Phase.SELECT, [Origin(microbatch=MicrobatchId(m), path=LINE) for m in range(2)])
    assert run_ready(machine) == ["F0", "F0"]
    assert machine.arrive(selects(Direction.BACKWARD, 0, 0)) == ()
    assert run_ready(machine) == ["F1"]
    machine.arrive(backward(0, 0))
    assert run_ready(machine) == ["B0", "F1"]


def test_once_rows_are_chosen_nothing_of_a_selection_is_taken() -> None:
    machine = machine_of("b", "L1.0")
    machine.arrive(selects(Direction.FORWARD, 3, 1))
    machine.selected()
    assert run_ready(machine) == []
    assert not machine.may_hold(selects(Direction.FORWARD, 4, 1))
    machine.advance(Step(1))
    assert not machine.may_hold(selects(Direction.FORWARD, 4, 1))
    assert machine.may_hold(selects(Direction.FORWARD, 4, 1, step=1))
