"""Laws of replanning over drawn changes, and what it does in cases that can be told by eye."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from skein.plan.plan import Infeasible
from skein.plan.replan.before import LOST, Before, moved_chunks
from skein.plan.replan.repair import posed, repaired
from skein.plan.replan.routing import GAIN, Replanned, replan
from skein.plan.route.evaluate import jittered_mean_s, timeline
from skein.plan.route.problem import Problem
from skein.plan.route.search import NUM_JITTERS
from tests.plan.replan.builders import (
    NUM_MOVES,
    Change,
    before_of,
    changes,
    holders,
    moving,
    problem,
    routed,
    searched,
    some,
    without,
)
from tests.support.extent import examples
from tests.support.routing_rules import violations


def replanned(now: Problem, before: Before, *, steps_left: int | None = None) -> Replanned:
    found = replan(now, before, moving(now, steps_left=steps_left), num_moves=NUM_MOVES, seed=0)
    assert isinstance(found, Replanned), found
    return found


# --- laws ---


@settings(max_examples=examples(25))
@given(changes())
def test_what_follows_a_change_is_legal_and_all_stages_are_held(change: Change) -> None:
    found = replan(change.now, change.before, moving(change.now), num_moves=NUM_MOVES, seed=0)
    if isinstance(found, Infeasible):
        assert found.reason == "no order of what is held has slots enough"
        return
    assert violations(found.problem, found.routing) == ()
    assert found.problem.num_microbatches == change.problem.num_microbatches
    assert min(found.problem.stage_sizes) >= 1
    assert found.step_s == jittered_mean_s(found.problem, found.routing, num_draws=NUM_JITTERS)


@settings(max_examples=examples(25))
@given(changes())
def test_bytes_are_those_of_the_chunks_that_nobody_had_and_never_below_the_least(change: Change) -> None:
    costs = moving(change.now)
    found = replan(change.now, change.before, costs, num_moves=NUM_MOVES, seed=0)
    if isinstance(found, Infeasible):
        return
    before = {
        (int(stage), int(worker))
        for stage, worker in zip(change.problem.stage_of, change.before.worker_of, strict=True)
    }
    after = set(zip(found.problem.stage_of.tolist(), found.routing.worker_of.tolist(), strict=True))
    assert set(found.moved) == after - before
    assert found.moved_bytes == sum(costs.state_bytes[stage] for stage, _ in after - before)
    least = least_moves(change.before, found.problem.stage_sizes)
    assert np.dot(least, costs.state_bytes) <= found.moved_bytes
    assert all(least[stage] for stage, held in enumerate(change.before.seats) if set(held) == {LOST})


@settings(max_examples=examples(10))
@given(changes())
def test_equal_inputs_give_equal_routings(change: Change) -> None:
    one, other = (
        replan(change.now, change.before, moving(change.now), num_moves=NUM_MOVES, seed=3) for _ in range(2)
    )
    assert type(one) is type(other)
    if isinstance(one, Replanned) and isinstance(other, Replanned):
        assert np.array_equal(one.routing.sequence, other.routing.sequence)
        assert np.array_equal(one.routing.path, other.routing.path)
        assert (one.moved, one.step_s) == (other.moved, other.step_s)


@settings(max_examples=examples(25))
@given(changes())
def test_repaired_paths_keep_their_stages_and_use_living_chunks_in_even_parts(change: Change) -> None:
    now, before = change.now, change.before
    held = before.kept(now)
    if any(not workers for workers in held):
        return
    after = posed(now, before, held, None)
    path = repaired(after, before, held, None)
    assert np.array_equal(after.stage_of[path], change.problem.stage_of[before.path])
    for stage, workers in enumerate(held):
        if workers != before.seats[stage]:
            hops = path[:, :-1] if change.problem.num_hops == change.problem.path_len else path
            visits = np.bincount(hops.ravel(), minlength=after.num_chunks)[after.stage_of == stage]
            assert np.ptp(visits) <= 1
        else:
            kept = change.problem.stage_of[before.path] == stage
            first_now, first_then = after.first_chunk[stage], change.problem.first_chunk[stage]
            assert np.array_equal(path[kept] - first_now, before.path[kept] - first_then)


# --- little moves ---


def two_towns() -> Problem:
    """Three stages of three holders."""
    return problem([3, 3, 3], num_microbatches=9)


def test_what_cannot_be_much_better_stays_to_the_last_op() -> None:
    of = two_towns()
    routing = searched(of)
    found = replanned(of, before_of(of, routing, range(of.num_workers)))
    assert found.is_as_before
    assert found.moved == ()
    assert np.array_equal(found.routing.path, routing.path)
    assert np.array_equal(found.routing.worker_of, routing.worker_of)
    assert timeline(found.problem, found.routing).step_s == pytest.approx(
        timeline(of, routing).step_s, rel=1e-12
    )


def test_a_routing_is_left_for_one_that_spares_more_than_the_gain() -> None:
    of = two_towns()
    routing = routed(of)
    # All microbatches through one holder of the second stage: the others have nothing to do.
    chunk_of_stage = np.where(of.stage_of[routing.path] == 1, of.first_chunk[1], routing.path)
    crowded = replace(routing, path=chunk_of_stage)
    one_by_one = np.arange(63)
    found = replanned(of, before_of(of, replace(crowded, sequence=one_by_one), range(9)))
    assert not found.is_as_before
    assert found.step_s < (1 - GAIN) * timeline(of, replace(crowded, sequence=one_by_one)).step_s


def test_fewer_workers_than_stages_may_hold_several_where_that_is_allowed() -> None:
    of = problem([1, 1, 1], chunks_per_worker=2)
    left = [0, 2]
    found = replanned(some(of, left), before_of(of, routed(of), left))
    assert violations(found.problem, found.routing) == ()
    assert [stage for stage, _ in found.moved] == [1]


def test_too_few_workers_are_told_apart_from_a_slow_plan() -> None:
    of = problem([1, 1, 1])
    left = [0, 2]
    now = some(of, left)
    found = replan(now, before_of(of, routed(of), left), moving(now), num_moves=NUM_MOVES, seed=0)
    assert found == Infeasible(reason="nobody can take stage 1 over")


def test_nobody_moves_for_a_gain_below_its_cost() -> None:
    # The second stage is left with one of two holders: one more there spares much, but may take an age to fetch.
    of = problem([3, 2, 3], num_microbatches=12, slots=4)
    routing = searched(of)
    left = without(of, holders(of, routing, 1)[0])
    now, before = some(of, left), before_of(of, routing, left)
    costs = moving(now, steps_left=10)
    cheap, dear = (
        replan(now, before, replace(costs, fetch_s=costs.fetch_s * factor), num_moves=NUM_MOVES, seed=0)
        for factor in (1e-3, 1e6)
    )
    assert isinstance(cheap, Replanned)
    assert isinstance(dear, Replanned)
    assert 1 in [stage for stage, _ in cheap.moved]
    assert dear.moved == ()
    assert cheap.step_s < dear.step_s


def test_what_is_fetched_by_one_worker_comes_one_after_the_other() -> None:
    of = problem([1, 1, 1, 1], chunks_per_worker=3)
    left = [0, 3]
    found = replanned(some(of, left), before_of(of, routed(of), left))
    by_worker = np.bincount([worker for _, worker in found.moved])
    assert len(found.moved) == 2
    assert found.move_s == by_worker.max()  # a second each


def test_a_newcomer_is_one_more_holder_where_one_is_asked_for_and_idle_where_not() -> None:
    of = problem([2, 1, 2], num_workers=6, num_microbatches=12)
    before = before_of(of, routed(of), range(6))
    costs = moving(of, most_chunks=5)
    full = replan(of, before, costs, num_moves=NUM_MOVES, seed=0)
    grown = replan(of, before, replace(costs, most_chunks=6), num_moves=NUM_MOVES, seed=0)
    assert isinstance(full, Replanned)
    assert isinstance(grown, Replanned)
    assert full.problem.num_chunks == 5
    assert grown.moved == ((1, 5),)
    assert grown.step_s < full.step_s


def test_a_worker_that_comes_back_moves_nothing() -> None:
    of = problem([2, 2, 2], num_workers=7, num_microbatches=8)
    routing = searched(of)
    left = without(of, holders(of, routing, 1)[0])
    after = replanned(some(of, left), before_of(of, routing, left))
    assert [stage for stage, _ in after.moved] == [1]
    held = Before(
        stage_sizes=after.problem.stage_sizes,
        worker_of=np.array(left)[after.routing.worker_of],
        path=after.routing.path,
        sequence=after.routing.sequence,
    )
    back = replan(of, held, moving(of, most_chunks=6), num_moves=NUM_MOVES, seed=0)
    assert isinstance(back, Replanned)
    assert back.moved == ()


def test_a_search_that_may_not_go_on_still_answers_with_something_legal() -> None:
    of = two_towns()
    routing, left = routed(of), without(of, 5)
    now = some(of, left)
    found = replan(
        now, before_of(of, routing, left), moving(now), num_moves=NUM_MOVES, seed=0, may_go_on=lambda: False
    )
    assert isinstance(found, Replanned)
    assert violations(found.problem, found.routing) == ()
    assert found.moved == ()


def least_moves(before: Before, sizes: Sequence[int]) -> tuple[int, ...]:
    """Chunks of each stage that any plan with so many holders moves: those that nobody holds any more."""
    return tuple(
        max(0, size - sum(worker != LOST for worker in held))
        for size, held in zip(sizes, before.seats, strict=True)
    )


def test_seats_are_compared_by_who_holds_what() -> None:
    before = Before(
        stage_sizes=(2, 2),
        worker_of=np.array([0, LOST, 2, 1]),
        path=np.zeros((1, 3), np.int64),
        sequence=np.zeros(1, np.int64),
    )
    assert moved_chunks(before, ((0, 3), (1, 2))) == ((0, 3),)
    assert least_moves(before, (2, 3)) == (1, 1)
