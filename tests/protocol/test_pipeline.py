"""The compute ops of one worker: their order, their slots, and that no plan makes them wait for each other."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from skein.plan.plan import Path, Plan
from skein.protocol.messages import (
    ChunkAssignment,
    Direction,
    HopTensor,
    Ledger,
    Origin,
    Phase,
    SourceKind,
    StateSource,
)
from skein.protocol.ops import BackwardOp, ForwardOp, Loss, LossOp
from skein.protocol.work.pipeline import ComputeOp, Pipeline
from skein.types import ChunkRef, Layout, MicrobatchId, StageIndex, Step, WorkerId
from tests.support.plans import chunk, grid_plan, microbatches, path, plan_of, stage_spec
from tests.support.reports import ledger

LINE = path(chunk(0, "a"), chunk(1, "b"))
LOSS = Loss(loss_sum=2.0, num_tokens=3)


def assigned(stage: int, ids: Iterable[int], *, slots: int = 2) -> ChunkAssignment:
    return ChunkAssignment(
        stage=stage_spec(stage),
        slots=slots,
        microbatches=microbatches(*ids),
        source=StateSource(kind=SourceKind.INITIAL, version=Step(0)),
    )


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
    machine = Pipeline(WorkerId("a"), [assigned(0, range(num_microbatches), slots=slots)], Step(0))
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


def test_the_loss_is_taken_in_ascending_order_too() -> None:
    machine = Pipeline(WorkerId("b"), [assigned(1, range(3))], Step(0))
    machine.arrive(forward(2, 1))
    machine.arrive(forward(1, 1))
    assert machine.next_op() is None
    machine.arrive(forward(0, 1))
    assert run_ready(machine) == ["L0", "L1", "L2"]
    assert machine.train_loss(StageIndex(1)) == Loss(loss_sum=6.0, num_tokens=9)
    assert machine.is_done(StageIndex(1))
    assert machine.ledger(StageIndex(1)) == ledger(1, "b", 0, 1, 2)


def test_what_arrives_again_is_dropped() -> None:
    machine = Pipeline(WorkerId("b"), [assigned(1, range(2))], Step(0))
    for _ in range(2):
        assert machine.arrive(forward(0, 1)) is None
    assert run_ready(machine) == ["L0"]
    machine.arrive(forward(0, 1))
    assert run_ready(machine) == []


def test_an_op_that_ends_names_the_tensor_that_goes_on() -> None:
    way = path(chunk(0, "a"), chunk(1, "b"), chunk(2, "c"))
    machine = Pipeline(WorkerId("b"), [assigned(1, [0])], Step(0))
    machine.arrive(forward(0, 1, way))
    op = machine.next_op()
    assert isinstance(op, ForwardOp)
    assert machine.end(op, None) == forward(0, 2, way)
    machine.arrive(backward(0, 1, way))
    op = machine.next_op()
    assert isinstance(op, BackwardOp)
    assert machine.end(op, None) == backward(0, 0, way)


def test_nothing_leaves_the_first_hop_backwards() -> None:
    machine = first_stage(num_microbatches=1)
    run_ready(machine)
    machine.arrive(backward(0, 0))
    op = machine.next_op()
    assert op is not None
    assert machine.end(op, None) is None


def test_a_tensor_for_another_worker_stage_or_microbatch_is_not_held() -> None:
    machine = Pipeline(WorkerId("b"), [assigned(1, [0])], Step(0))
    assert machine.may_hold(forward(0, 1))
    assert not machine.may_hold(forward(0, 0))
    assert not machine.may_hold(forward(0, 2))
    assert not machine.may_hold(forward(0, -1))
    assert not machine.may_hold(forward(3, 1))
    assert machine.may_hold(forward(3, 1, phase=Phase.EVALUATE))
    assert not machine.may_hold(forward(0, 1, path(chunk(0, "a"), chunk(2, "b"))))


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
    machine = Pipeline(WorkerId("a"), [assigned(0, [0], slots=1)], Step(0))
    machine.begin(Phase.EVALUATE, [Origin(microbatch=MicrobatchId(e), path=LINE) for e in range(3)])
    assert run_ready(machine) == ["F0"]
    assert machine.arrive(backward(0, 0, phase=Phase.EVALUATE)) is None
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
    machine = Pipeline(WorkerId("b"), [assigned(1, [0])], Step(0))
    machine.arrive(forward(0, 1, way, phase=Phase.EVALUATE))
    run_ready(machine)
    released = machine.arrive(backward(0, 1, way, phase=Phase.EVALUATE))
    assert released == backward(0, 0, way, phase=Phase.EVALUATE)
    assert machine.num_in_flight == 0


def test_evaluation_losses_are_counted_apart_from_training() -> None:
    machine = Pipeline(WorkerId("b"), [assigned(1, [0, 1])], Step(0))
    machine.arrive(forward(5, 1, phase=Phase.EVALUATE))
    machine.arrive(forward(0, 1))
    assert run_ready(machine) == ["L0", "L5"]
    assert machine.evaluation_loss(StageIndex(1)) == (microbatches(5), LOSS)
    assert machine.train_loss(StageIndex(1)) == LOSS
    assert machine.ledger(StageIndex(1)) == ledger(1, "b", 0)


@pytest.mark.parametrize(
    ("num_evaluation", "expected"), [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (9, 5)]
)
def test_how_many_evaluation_microbatches_visit_a_chunk(num_evaluation: int, expected: int) -> None:
    """Of four paths, 0 and 2 visit this chunk."""
    machine = Pipeline(WorkerId("b"), [assigned(1, [0, 2])], Step(0))
    assert machine.expected_evaluations(StageIndex(1), num_evaluation, 4) == expected


def test_queue_depths_are_told_by_kind() -> None:
    machine = Pipeline(WorkerId("b"), [assigned(1, range(4)), assigned(2, range(4))], Step(0))
    way = path(chunk(0, "a"), chunk(1, "b"), chunk(2, "b"))
    machine.arrive(forward(1, 1, way))
    machine.arrive(forward(2, 2, way))
    machine.arrive(backward(3, 1, way))
    machine.arrive(forward(7, 1, way, phase=Phase.EVALUATE))
    assert machine.queue_depths == {"forward": 2, "loss": 1, "backward": 1}


# --- whole plans ---


@dataclass(slots=True)
class Floor:
    """All workers of a plan, with what is on its way between them."""

    plan: Plan
    machines: dict[WorkerId, Pipeline]
    ways: list[tuple[WorkerId, HopTensor]] = field(default_factory=list)
    busy: dict[WorkerId, ComputeOp] = field(default_factory=dict)
    ledgers: list[Ledger] = field(default_factory=list)
    slots: dict[WorkerId, int] = field(default_factory=dict)

    def deliver(self, tensor: HopTensor | None) -> None:
        """As a worker's machine does: to the next hop, at once if that is here."""
        if tensor is not None:
            self.ways.append((tensor.path.hops[tensor.hop].worker, tensor))


def floor_of(plan: Plan) -> Floor:
    visits = plan.microbatches_by_chunk()
    machines = {
        worker: Pipeline(
            worker,
            [
                ChunkAssignment(
                    stage=plan.stages[placed.chunk.stage],
                    slots=placed.slots,
                    microbatches=visits[placed.chunk],
                    source=StateSource(kind=SourceKind.INITIAL, version=Step(0)),
                )
                for placed in plan.chunks
                if placed.chunk.worker == worker
            ],
            Step(0),
        )
        for worker in plan.workers
    }
    floor = Floor(plan=plan, machines=machines)
    for placed in plan.chunks:
        floor.slots[placed.chunk.worker] = floor.slots.get(placed.chunk.worker, 0) + placed.slots
    return floor


def run_floor(floor: Floor, phase: Phase, num_microbatches: int, order: random.Random) -> None:
    """Deliver tensors and end ops in a random order until nothing is left to do."""
    paths = floor.plan.paths
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


def random_plan(order: random.Random) -> Plan:
    """Any cut on any workers: stages may share a worker, paths cross as they like; every slot count from 1."""
    num_stages, num_workers = order.randint(1, 4), order.randint(1, 5)
    layout = order.choice(list(Layout))
    workers = [f"w{i}" for i in range(num_workers)]
    seats = [order.sample(workers, order.randint(1, num_workers)) for _ in range(num_stages)]
    paths = []
    for _ in range(order.randint(1, 8)):
        hops = [chunk(stage, order.choice(seats[stage])) for stage in range(num_stages)]
        if layout is Layout.LOOP:
            hops.append(chunk(num_stages, hops[0].worker))
        paths.append(path(*hops))
    chunks = {chunk(stage, worker) for stage in range(num_stages) for worker in seats[stage]}
    if layout is Layout.LOOP:
        chunks |= {chunk(num_stages, worker) for worker in seats[0]}
    return plan_of(chunks, paths, layout=layout, slots=order.randint(1, 3))


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_makes_its_workers_wait_for_each_other(seed: int) -> None:
    order = random.Random(seed)
    plan = random_plan(order)
    floor = floor_of(plan)
    run_floor(floor, Phase.TRAIN, len(plan.paths), order)
    for at, expected in plan.microbatches_by_chunk().items():
        assert floor.machines[at.worker].ledger(at.stage).microbatches == expected, seed
    assert all(machine.num_in_flight == 0 for machine in floor.machines.values()), seed


@pytest.mark.parametrize("seed", range(60))
def test_an_evaluation_visits_every_head_once_and_leaves_no_slot_taken(seed: int) -> None:
    order = random.Random(seed)
    plan = random_plan(order)
    floor = floor_of(plan)
    num_evaluation = order.randint(1, 12)
    run_floor(floor, Phase.EVALUATE, num_evaluation, order)
    heads: dict[ChunkRef, int] = {}
    for worker, machine in floor.machines.items():
        assert machine.num_in_flight == 0, seed
        for stage in {hops[-1].stage for hops in (p.hops for p in plan.paths) if hops[-1].worker == worker}:
            found, loss = machine.evaluation_loss(stage)
            heads[ChunkRef(stage=stage, worker=worker)] = len(found)
            assert loss.num_tokens == len(found)
            assert len(found) == machine.expected_evaluations(stage, num_evaluation, len(plan.paths))
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
