"""What the table of ops says of a path."""

import pytest

from skein.plan.ops import Direction, Kept, OpKind, PathOp, kinds_at, linked_hops, path_ops


def named(op: PathOp) -> str:
    return f"{op.kind.row.letter}{op.hop}"


@pytest.mark.parametrize("num_hops", [1, 2, 5])
def test_a_path_is_forwards_then_its_loss_then_backwards_home(num_hops: int) -> None:
    last = num_hops - 1
    there = [f"F{hop}" for hop in range(last)]
    back = [f"B{hop}" for hop in reversed(range(last))]
    assert [named(op) for op in path_ops(num_hops)] == [*there, f"L{last}", *back]


def test_every_op_comes_after_what_it_waits_for_and_is_waited_for_by_it() -> None:
    ops = path_ops(6)
    for op in ops:
        assert ops[op.number] is op
        for before in (*op.inputs, *op.own):
            assert before < op.number
            assert op.number in ops[before].followers


@pytest.mark.parametrize("direction", Direction)
def test_a_hop_takes_of_those_hops_that_give_to_it(direction: Direction) -> None:
    num_hops = 4
    given = {(hop, x) for hop in range(num_hops) for x in direction.takers(hop, num_hops)}
    assert given == {(x, hop) for hop in range(num_hops) for x in direction.makers(hop, num_hops)}
    assert len(given) == num_hops - 1


@pytest.mark.parametrize("split", [(), (1,), (0, 1, 2, 3)])
def test_linked_hops_are_those_that_pass_tensors_to_each_other(split: tuple[int, ...]) -> None:
    assert linked_hops(1) == ()
    assert linked_hops(4, split) == ((0, 1), (1, 2), (2, 3))


def test_tensors_come_from_hops_that_make_them_and_graphs_from_the_own_one() -> None:
    ops = path_ops(4)
    for op in ops:
        takes = op.kind.row.takes
        assert tuple(ops[x].hop for x in op.inputs) == (takes.makers(op.hop, 4) if takes else ())
        assert all(ops[x].hop == op.hop for x in op.own)
    assert [named(ops[x]) for op in ops if op.kind is OpKind.BACKWARD for x in op.own] == ["F2", "F1", "F0"]


def test_what_a_path_takes_of_slots_it_gives_back_and_each_hop_accumulates_once() -> None:
    ops = path_ops(5)
    for hop in range(5):
        assert sum(op.kind.row.slots for op in ops if op.hop == hop) == 0
        assert sum(op.kind.row.is_accumulating for op in ops if op.hop == hop) == 1


def test_a_split_backward_hands_its_gradient_back_before_it_adds_anything() -> None:
    ops = path_ops(4, split=(1, 2))
    assert [named(op) for op in ops] == ["F0", "F1", "F2", "L3", "I2", "I1", "W2", "B0", "W1"]
    of = {named(op): op for op in ops}
    assert [named(ops[x]) for x in of["I1"].inputs + of["I1"].own] == ["I2", "F1"]
    assert [named(ops[x]) for x in of["W1"].awaited] == ["I1"]
    assert [named(ops[x]) for x in of["B0"].inputs] == ["I1"]
    assert of["W1"].followers == ()
    for hop in range(4):
        assert sum(op.kind.row.slots for op in ops if op.hop == hop) == 0
        assert [named(op)[0] for op in ops if op.hop == hop and op.kind.row.is_accumulating] in (
            ["L"],
            ["B"],
            ["W"],
        )


def test_a_split_loss_takes_a_slot_until_its_weight_gradients_are_added() -> None:
    ops = path_ops(2, split=(0, 1))
    assert [named(op) for op in ops] == ["F0", "J1", "I0", "W1", "W0"]
    assert [op.kind.row.slots for op in ops if op.hop == 1] == [1, -1]
    assert [named(op) for op in path_ops(1, split=(0,))] == ["J0", "W0"]


def test_a_split_backward_costs_what_a_whole_one_does() -> None:
    for is_last in (False, True):
        costs = [x.row.cost for x in kinds_at(is_last=is_last, is_split=True)]
        assert sum(cost.seconds(2.0, 6.0) for cost in costs) == pytest.approx(8.0)
    inner = [x.row.cost for x in kinds_at(is_last=False, is_split=True)]
    assert {cost.whole for cost in inner} == {x.row.cost for x in kinds_at(is_last=False)}


def test_what_is_held_shows_what_was_done() -> None:
    shown = {kept: {x for x in OpKind if x.row.is_shown_by([kept])} for kept in Kept}
    assert shown[Kept.GRAPH] == {OpKind.FORWARD}
    assert shown[Kept.PENDING] == {OpKind.FORWARD, OpKind.INPUT, OpKind.LOSS_INPUT}
