"""What a routing comes to: the critical way sums to the step, and memory and traffic to what was drawn by hand."""

from dataclasses import replace

import numpy as np
import pytest

from client.planning.account import (
    Wait,
    critical_way,
    placed_ops,
    reduction_bytes,
    transfer_counts,
)
from client.planning.files.instance import problem_of
from skein.plan.ops import OpKind
from skein.plan.route.evaluate import timeline
from skein.plan.route.problem import Problem, Routing
from skein.plan.route.room import peak_held
from skein.plan.route.search import Search
from tests.support.instances import instance
from tests.support.routing_rules import in_turn


def line_of_two() -> tuple[Problem, Routing]:
    """Worker 0 sends two microbatches to worker 1 and back: 1 s forward, 1.5 s backward, 2 s a transfer, one slot."""
    problem = problem_of(instance(sizes=(1, 1), path_len=2, memory=1, waves=2))
    path = np.array([[0, 1, 0]] * 2)
    return problem, Routing(worker_of=np.array([0, 1]), path=path, sequence=np.arange(10))


def searched(seed: int, *, has_reduction: bool = True) -> tuple[Problem, Routing]:
    problem = problem_of(instance(sizes=(3, 2, 2), memory=2, waves=2, has_reduction=has_reduction))
    search = Search(problem, seed=seed)
    search.begin()
    search.improve(2000)
    assert search.best is not None
    return problem, search.best.routing


def test_ops_are_in_the_order_of_the_sequence_with_their_seconds() -> None:
    problem, routing = line_of_two()
    ops = placed_ops(problem, routing)
    assert [(op.kind, op.worker, op.takes_s) for op in ops[:5]] == [
        (OpKind.FORWARD, 0, 1.0),
        (OpKind.FORWARD, 1, 1.0),
        (OpKind.LOSS, 0, 0.25),
        (OpKind.BACKWARD, 1, 1.5),
        (OpKind.BACKWARD, 0, 1.5),
    ]
    assert [op.microbatch for op in ops] == [0] * 5 + [1] * 5


def test_with_one_slot_the_second_microbatch_waits_for_it_on_the_critical_way() -> None:
    problem, routing = line_of_two()
    way = critical_way(problem, routing, timeline(problem, routing))
    assert [x.wait for x in way.stretches] == [Wait.START, *[Wait.INPUT] * 4, Wait.SLOT, *[Wait.INPUT] * 4]
    assert (way.compute_s, way.transfer_s, way.queued_s, way.reduction_s) == (10.5, 16.0, 0.0, 0.0)
    assert way.compute_s_by_worker() == {0: 5.5, 1: 5.0}
    assert way.transfer_s_by_link() == {(0, 1): 8.0, (1, 0): 8.0}
    assert way.num_slot_waits_by_chunk() == {0: 1}


def test_with_more_slots_than_microbatches_nothing_waits_for_a_slot() -> None:
    problem, routing = line_of_two()
    roomy = replace(problem, slots=problem.slots + 5)
    assert critical_way(roomy, routing, timeline(roomy, routing)).num_slot_waits_by_chunk() == {}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("has_wires", [False, True])
def test_stretches_follow_each_other_without_a_gap_and_sum_to_the_step(seed: int, has_wires: bool) -> None:
    problem, routing = searched(seed)
    if has_wires:
        problem = replace(problem, wire_s=0.75 * problem.transfer_s)
    times = timeline(problem, routing)
    way = critical_way(problem, routing, times)
    assert way.reduced_stage is not None
    end_s = 0.0
    for stretch in way.stretches:
        assert stretch.op.begin_s == pytest.approx(end_s + stretch.transfer_s + stretch.queued_s, abs=1e-9)
        end_s = stretch.op.begin_s + stretch.op.takes_s
    # Sums of a dozen numbers in another order: the last bits differ.
    assert way.compute_s + way.transfer_s + way.queued_s + way.reduction_s == pytest.approx(
        times.step_s, abs=1e-9
    )


@pytest.mark.parametrize("seed", range(3))
def test_making_an_op_of_the_critical_way_longer_makes_the_step_longer(seed: int) -> None:
    problem, routing = searched(seed, has_reduction=False)
    times = timeline(problem, routing)
    for stretch in critical_way(problem, routing, times).stretches:
        if stretch.op.kind is OpKind.FORWARD:
            slow = replace(problem, forward_s=problem.forward_s.copy())
            slow.forward_s[stretch.op.worker, stretch.op.stage] += 0.125
            assert timeline(slow, routing).step_s >= times.step_s + 0.125 - 1e-9


def test_peaks_are_within_the_slots_and_reached_where_all_forwards_come_first() -> None:
    problem, routing = searched(0)
    assert (peak_held(problem, routing) <= 2).all()
    roomy = replace(problem, slots=np.full_like(problem.slots, 99))
    forwards_first = np.concatenate([np.repeat(np.arange(12), 2), np.repeat(np.arange(12), 3)])
    held = peak_held(roomy, replace(routing, sequence=in_turn(forwards_first, len(problem.ops))))
    visits = np.bincount(routing.path[:, :2].ravel(), minlength=problem.num_chunks)
    assert held.tolist() == visits.tolist()


def test_every_hop_is_a_tensor_there_and_one_back() -> None:
    problem, routing = line_of_two()
    # Each of two microbatches: there, back for the loss, and the same for the gradient.
    assert transfer_counts(problem, routing).tolist() == [[0, 4], [4, 0]]


def test_each_of_k_holders_sends_two_parts_of_k_to_each_other() -> None:
    problem, routing = searched(1)
    sent = reduction_bytes(problem, routing).sum(axis=1)
    size_by_worker = {
        int(worker): problem.stage_sizes[int(problem.stage_of[chunk])]
        for chunk, worker in enumerate(routing.worker_of)
    }
    expected = [2 * 2**20 * (size_by_worker[w] - 1) / size_by_worker[w] for w in range(problem.num_workers)]
    assert sent.tolist() == pytest.approx(expected)
