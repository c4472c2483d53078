"""Which of two workers goes that do not reach each other, or say so."""

import pytest

from skein.protocol.coordinator.runs.workers.accusations import NUM_REMEMBERED_STEPS, Accusations
from skein.types import WorkerId
from tests.support.plans import grid_plan

A, B, C, D = (WorkerId(name) for name in "abcd")
PLAN = grid_plan(stages=1, replicas=4)
FIRST, SECOND, THIRD, _ = PLAN.workers


def heard(*pairs: tuple[WorkerId, WorkerId]) -> Accusations:
    found = Accusations()
    for accuser, accused in pairs:
        found.fenced()
        found.heard(accuser, accused, is_possible=True)
    return found


def test_an_accusation_counts_against_both() -> None:
    found = heard((A, B), (A, B))
    assert (found.num_strikes(A), found.num_strikes(B)) == (2, 2)
    assert found.less_credible(A, B) is None


@pytest.mark.parametrize(
    "pairs", [[(A, B), (A, C)], [(A, B), (A, B), (A, B), (A, C)], [(A, B), (C, A), (A, C)]]
)
def test_a_worker_that_accuses_one_peer_after_the_other_is_less_credible(
    pairs: list[tuple[WorkerId, WorkerId]],
) -> None:
    assert heard(*pairs).less_credible(*pairs[-1]) == A


def test_a_worker_that_several_do_not_reach_is_less_credible() -> None:
    assert heard((B, A), (C, A), (D, A)).less_credible(D, A) == A


def test_what_the_plan_rules_out_counts_against_the_accuser_alone() -> None:
    found = Accusations()
    found.heard(A, B, is_possible=False)
    assert (found.num_strikes(A), found.num_strikes(B)) == (1, 0)
    assert found.less_credible(A, B) == A


def test_a_peer_that_others_have_reached_in_that_generation_is_believed() -> None:
    found = Accusations()
    found.reached(C, [B])
    found.heard(A, B, is_possible=True)
    assert (found.num_strikes(A), found.num_strikes(B)) == (1, 0)
    found.fenced()
    found.heard(A, B, is_possible=True)
    assert (found.num_strikes(A), found.num_strikes(B)) == (2, 1)


@pytest.mark.parametrize("reaches", [[(A, B)], [(B, B)], [(C, A)]])
def test_neither_of_the_two_refutes_an_accusation(reaches: list[tuple[WorkerId, WorkerId]]) -> None:
    found = Accusations()
    for worker, peer in reaches:
        found.reached(worker, [peer])
    found.heard(A, B, is_possible=True)
    assert found.num_strikes(B) == 1


def test_a_second_accuser_is_not_refuted_by_a_third_worker_that_reaches_the_peer() -> None:
    found = heard((C, B))
    found.reached(D, [B])
    found.heard(A, B, is_possible=True)
    assert found.less_credible(A, B) == B


def test_workers_of_a_committed_step_have_reached_each_other() -> None:
    found = Accusations()
    found.committed(PLAN)
    found.heard(FIRST, SECOND, is_possible=True)
    assert found.num_strikes(SECOND) == 0


def test_an_accusation_outlasts_a_few_steps_and_not_many() -> None:
    found = heard((A, B))
    for _ in range(NUM_REMEMBERED_STEPS - 1):
        found.committed(PLAN)
    assert found.num_strikes(A) == 1
    found.committed(PLAN)
    assert found.num_strikes(A) == 0


def test_a_death_bears_out_who_accused_the_dead() -> None:
    found = heard((A, B), (A, C))
    found.lost(B)
    assert found.num_strikes(A) == 1
    assert found.less_credible(A, C) is None


def test_a_new_process_begins_anew() -> None:
    found = heard((A, B), (A, C))
    found.forget(A)
    assert (found.num_strikes(A), found.num_strikes(B)) == (0, 0)


def test_whom_only_a_worker_accused_that_goes_is_cleared() -> None:
    found = heard((A, B), (C, D), (A, D))
    assert found.cleared(A) == (B,)
    assert (found.num_strikes(A), found.num_strikes(B), found.num_strikes(D)) == (2, 0, 1)


def test_one_pair_alone_clears_nobody() -> None:
    assert heard((A, B), (A, B), (A, B)).cleared(A) == ()
