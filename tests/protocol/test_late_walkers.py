"""What a worker does with a step that was decided without it: give up its own, or go on with it."""

import pytest

from skein.plan.rounds import local_group
from skein.protocol.messages import Commit
from skein.protocol.ops import ApplyOp, LossOp
from skein.protocol.reports import StageDone
from skein.types import Epoch, Generation
from tests.support.hands import Hand, record
from tests.support.plans import chunk, path, plan_of
from tests.support.reports import attempt

MINE, OTHERS = chunk(0, "a"), chunk(0, "b")
PLAN = plan_of([MINE, OTHERS], [path(MINE), path(OTHERS), path(MINE), path(OTHERS)])
WITHOUT_ME = record(0, attempts={str(local_group(OTHERS).group): attempt(0)})


def halfway() -> Hand:
    """One of two microbatches is done, the other has begun."""
    hand = Hand("a")
    hand.connect()
    hand.settle(PLAN)
    hand.start()
    hand.end()
    assert isinstance(hand.running, LossOp)
    return hand


def commit(hand: Hand, *, keeps_late: bool) -> None:
    hand.hear(
        Commit(
            epoch=Epoch(1), generation=Generation(1), record=WITHOUT_ME, goes_on=True, keeps_late=keeps_late
        )
    )


@pytest.mark.parametrize("keeps_late", [False, True])
def test_the_version_grows_after_the_op_that_runs(keeps_late: bool) -> None:
    hand = halfway()
    commit(hand, keeps_late=keeps_late)
    hand.end()
    assert hand.running == ApplyOp(record=WITHOUT_ME, keeps_step=keeps_late)
    hand.end()
    assert hand.machine.version == 1


def test_who_gives_its_step_up_begins_the_next_with_all_microbatches() -> None:
    hand = halfway()
    commit(hand, keeps_late=False)
    ops = hand.run_all()
    losses = [op for op in ops if isinstance(op, LossOp)]
    assert [(op.step, op.microbatch) for op in losses] == [(0, 2), (1, 0), (1, 2)]
    (done,) = [report for report in hand.said() if isinstance(report, StageDone)]
    assert (done.step, done.ledger.microbatches) == (1, (0, 2))


def test_who_keeps_its_step_computes_nothing_again_and_reports_it_as_the_next() -> None:
    hand = halfway()
    commit(hand, keeps_late=True)
    ops = hand.run_all()
    assert [(op.step, op.microbatch) for op in ops if isinstance(op, LossOp)] == [(0, 2)]
    (done,) = [report for report in hand.said() if isinstance(report, StageDone)]
    assert done.ledger.microbatches == (0, 2)
    assert done.step == 1


def test_who_ends_a_kept_step_while_nobody_waits_tells_it_again_when_the_next_begins() -> None:
    hand = halfway()
    hand.hear(
        Commit(epoch=Epoch(1), generation=Generation(1), record=WITHOUT_ME, goes_on=False, keeps_late=True)
    )
    hand.run_all()
    assert [type(report) for report in hand.said()] == [StageDone], "between steps, where nobody takes it"
    hand.start(step=1)
    (done,) = [report for report in hand.said() if isinstance(report, StageDone)]
    assert (done.step, done.ledger.microbatches) == (1, (0, 2))


def test_who_is_steps_behind_takes_one_decision_after_the_other() -> None:
    hand = halfway()
    commit(hand, keeps_late=True)
    second = record(1, attempts={str(local_group(OTHERS).group): attempt(0)})
    hand.hear(Commit(epoch=Epoch(1), generation=Generation(1), record=second, goes_on=True, keeps_late=True))
    ops = hand.run_all()
    assert [op.record.step for op in ops if isinstance(op, ApplyOp)] == [0, 1]
    assert hand.machine.version == 2
