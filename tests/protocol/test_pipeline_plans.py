"""The compute ops of all workers of drawn plans: none makes another wait for ever, and nothing is left behind."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from skein.plan.order import left_undone
from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.placing.sources import Sources, assignments
from skein.protocol.messages.directives import Evaluate, Ledger, Origin, SourceKind, StateSource
from skein.protocol.messages.tensors import HopTensor, Phase
from skein.protocol.worker.ops import Loss, LossOp, VisitOp
from skein.protocol.worker.pipeline import Pipeline
from skein.types import ChunkRef, Generation, JobId, Layout, MicrobatchId, Step, WorkerId
from tests.support.drawn import carried_out, random_plan, shuffled
from tests.support.extent import part
from tests.support.plans import grid_plan


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
            asked = Evaluate(generation=Generation(1), version=Step(0), num_microbatches=num_evaluation)
            assert len(found) == machine.expected_evaluations(stage, asked, len(plan.evaluation_paths))
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
