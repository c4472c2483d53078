"""Holders that disagree without a majority: the least credible goes, and nobody where all are as credible."""

from skein.protocol.coordinator.runs.workers.disputes import MAX_STRIKES, Disputes
from skein.types import WorkerId
from tests.support.plans import grid_plan

OLD, OTHER, NEW, LAST = (WorkerId(name) for name in ("w0a", "w0b", "w0c", "w0d"))
PAIR = grid_plan(stages=1, replicas=2).groups


def dispute_often(disputes: Disputes, *workers: WorkerId) -> tuple[WorkerId, ...]:
    """Who goes in the end; nobody does before."""
    for _ in range(MAX_STRIKES - 1):
        assert disputes.disputed(workers) == ()
    return disputes.disputed(workers)


def test_of_two_who_are_equals_nobody_is_believed() -> None:
    disputes = Disputes()
    assert dispute_often(disputes, OLD, OTHER) == (OLD, OTHER)
    disputes.agreed(PAIR)
    assert dispute_often(disputes, OLD, OTHER) == (OLD, OTHER)


def test_who_has_agreed_on_fewer_steps_goes() -> None:
    disputes = Disputes()
    disputes.agreed(PAIR)
    assert dispute_often(disputes, OLD, NEW) == (NEW,)


def test_steps_that_a_worker_made_alone_speak_for_nobody() -> None:
    disputes = Disputes()
    for _ in range(9):
        disputes.agreed(grid_plan(stages=1, replicas=1).groups)
    assert dispute_often(disputes, OLD, NEW) == (OLD, NEW)


def test_who_disagrees_with_one_after_the_other_goes_and_the_others_are_cleared() -> None:
    disputes = Disputes()
    disputes.agreed(PAIR)
    assert dispute_often(disputes, OLD, NEW) == (NEW,)
    assert disputes.cleared(NEW) == ()
    assert dispute_often(disputes, OLD, LAST) == (OLD,)
    assert disputes.cleared(OLD) == (NEW, LAST)


def test_another_process_of_that_name_begins_anew() -> None:
    disputes = Disputes()
    disputes.agreed(PAIR)
    disputes.disputed((OLD, NEW))
    disputes.forget(OLD)
    assert disputes.cleared(NEW) == ()
    assert dispute_often(disputes, OLD, LAST) == (OLD, LAST)
