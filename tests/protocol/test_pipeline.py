"""The compute ops of one worker in a step: their order, their slots, and what is told of them."""

from dataclasses import replace

from skein.plan.ops import Kept
from skein.plan.plan import Path
from skein.protocol.messages.directives import Origin
from skein.protocol.messages.reports import Balance
from skein.protocol.messages.tensors import Phase
from skein.protocol.worker.ops import BackwardOp, ForwardOp, InputOp
from skein.protocol.worker.pipeline import Occupancy, Pipeline
from skein.types import MicrobatchId, StageIndex, Step
from tests.support.pipelines import LINE, backward, first_stage, forward, machine_of, run_ready
from tests.support.plans import chunk, path, schedule
from tests.support.reports import ledger


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
