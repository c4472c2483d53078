"""Evaluations and selections among the compute ops of one worker: slots, turns and losses of their own."""

from collections import Counter

import pytest

from skein.numeric.coreset.portions import num_parts_of
from skein.plan.ops import Direction
from skein.protocol.messages.directives import Evaluate, Origin
from skein.protocol.messages.tensors import HopTensor, Phase
from skein.types import Generation, MicrobatchId, StageIndex, Step
from tests.support.pipelines import LINE, LOSS, backward, first_stage, forward, machine_of, run_ready, tensor
from tests.support.plans import chunk, microbatches, path
from tests.support.reports import ledger


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
    asked = Evaluate(generation=Generation(1), version=Step(0), num_microbatches=num_evaluation)
    assert machine.expected_evaluations(StageIndex(1), asked, 4) == expected


@pytest.mark.parametrize(("num_blocks", "num_paths"), [(7, 3), (64, 4), (200, 5), (70, 65)])
def test_rows_of_a_part_take_one_path_in_a_selection_however_many_paths_there_are(
    num_blocks: int, num_paths: int
) -> None:
    asked = Evaluate(
        generation=Generation(1),
        version=Step(0),
        num_microbatches=num_blocks,
        phase=Phase.SELECT,
        num_rows=8 * num_blocks,
    )
    ways, num_parts = list(asked.ways(num_paths)), num_parts_of(num_blocks, 8 * num_blocks)
    for part in range(num_parts):
        assert len(set(ways[part::num_parts])) == 1
    assert set(ways) == set(range(min(num_paths, num_parts)))
    assert asked.num_visits(num_paths) == Counter(ways)


def test_evaluation_waits_for_all_training_that_may_run() -> None:
    machine = machine_of("b", "F1.0 F1.1")
    way = path(chunk(0, "a"), chunk(1, "b"), chunk(2, "c"))
    machine.arrive(forward(7, 1, way, phase=Phase.EVALUATE))
    machine.arrive(forward(1, 1, way))
    machine.arrive(forward(0, 1, way))
    assert run_ready(machine) == ["F0", "F1"]


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


def test_a_selection_of_older_parameters_is_taken_where_they_are_kept_and_nowhere_else() -> None:
    late = selects(Direction.FORWARD, 3, 1, step=2)
    machine = machine_of("b", "L1.0", step=5, kept={StageIndex(1): Step(2)})
    assert machine.may_hold(late)
    machine.begin(Phase.SELECT, [], Step(2))
    machine.arrive(late)
    machine.advance(Step(6))
    assert run_ready(machine) == ["L3"]
    machine.selected()
    assert not machine.may_hold(late)
    assert not machine_of("b", "L1.0", step=5).may_hold(late)
    assert not machine_of("b", "L1.0", step=5, kept={StageIndex(1): Step(1)}).may_hold(late)
