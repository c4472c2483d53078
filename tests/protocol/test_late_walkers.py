"""What a worker does with a step that was decided without it: give up its own, or go on with it."""

import pytest

from skein.config.rule import Reach
from skein.plan.agreeing.rounds import local_group
from skein.plan.plan import Group
from skein.protocol.messages.directives import Commit, ExchangeTerms, Prepare, Save
from skein.protocol.messages.reports import StageDone
from skein.protocol.worker.ops import ApplyOp, LossOp, PackOp, SaveOp
from skein.types import Epoch, Generation, Step, parse_group
from tests.support.hands import Hand, record
from tests.support.plans import chunk, path, plan_of
from tests.support.reports import attempt, ledger

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


def in_time_and_applying(*, keeps_late: bool) -> Hand:
    """The first step was decided with this worker, which is at its update."""
    hand = Hand("a")
    hand.connect()
    hand.settle(PLAN)
    hand.start()
    hand.run_all()
    hand.prepare(local_group(MINE).group, [ledger(0, "a", 0, 2)])
    hand.run_all()
    both = record(0, attempts={str(local_group(x).group): attempt(0) for x in (MINE, OTHERS)})
    hand.hear(
        Commit(epoch=Epoch(1), generation=Generation(1), record=both, goes_on=True, keeps_late=keeps_late)
    )
    assert isinstance(hand.running, ApplyOp)
    return hand


@pytest.mark.parametrize("keeps_late", [False, True])
def test_who_is_left_out_of_a_step_while_it_applies_the_one_before_takes_both(keeps_late: bool) -> None:
    hand = in_time_and_applying(keeps_late=keeps_late)
    second = record(1, attempts={str(local_group(OTHERS).group): attempt(0)})
    hand.hear(
        Commit(epoch=Epoch(1), generation=Generation(1), record=second, goes_on=True, keeps_late=keeps_late)
    )
    ops = hand.run_all()
    assert [op.record.step for op in ops if isinstance(op, ApplyOp)] == [0, 1]
    assert hand.machine.version == 2


@pytest.mark.parametrize(("step", "taken_at"), [(1, None), (2, 1)])
def test_an_exchange_of_a_version_to_come_is_taken_up_with_that_version(
    step: int, taken_at: int | None
) -> None:
    hand = in_time_and_applying(keeps_late=False)
    group = Group(group=parse_group("x0"), members=(MINE, OTHERS), num_shards=2)
    terms = ExchangeTerms(
        reach=Reach.ALL,
        learning_rate=0.1,
        scales=(0.0, 1.0),
        due_step=Step(step),
        num_steps=100,
        taken_at=None if taken_at is None else Step(taken_at),
    )
    hand.hear(
        Prepare(
            epoch=Epoch(1),
            generation=Generation(1),
            step=Step(step),
            group=group,
            attempt=attempt(0),
            parts=(),
            exchange=terms,
        )
    )
    ops = hand.run_all()
    kinds = [type(op) for op in ops if isinstance(op, ApplyOp | PackOp)]
    assert kinds == [ApplyOp, PackOp]


def test_what_is_to_be_saved_after_decisions_that_are_still_to_be_applied_is_saved_then() -> None:
    hand = halfway()
    commit(hand, keeps_late=True)
    second = record(1, attempts={str(local_group(OTHERS).group): attempt(0)})
    hand.hear(Commit(epoch=Epoch(1), generation=Generation(1), record=second, goes_on=False, keeps_late=True))
    hand.hear(
        Save(
            epoch=Epoch(1),
            generation=Generation(1),
            version=Step(2),
            stages=(MINE.stage,),
            url=None,
            walkers=(0,),
        )
    )
    ops = hand.run_all()
    assert [type(op) for op in ops if isinstance(op, ApplyOp | SaveOp)] == [ApplyOp, ApplyOp, SaveOp]


# --- a new generation, before all that was decided is applied ---


def steps_behind() -> Hand:
    """Two steps were decided without this worker, which has an op running that it began before."""
    hand = halfway()
    commit(hand, keeps_late=True)
    second = record(1, attempts={str(local_group(OTHERS).group): attempt(0)})
    hand.hear(Commit(epoch=Epoch(1), generation=Generation(1), record=second, goes_on=True, keeps_late=True))
    return hand


@pytest.mark.parametrize("last_step", [1, 2])
def test_who_was_left_out_comes_to_the_version_of_the_others(last_step: int) -> None:
    hand = steps_behind()
    last = record(last_step, attempts={str(local_group(OTHERS).group): attempt(0)})
    hand.fence(PLAN, generation=2, last_commit=last)
    (held,) = hand.acknowledge().chunks
    assert held.version == last_step + 1


def test_who_was_no_part_of_the_plan_that_decided_a_step_is_not_at_its_version() -> None:
    hand = steps_behind()
    others = record(0, attempts={str(local_group(OTHERS).group): attempt(0, generation=2)})
    hand.fence(PLAN, generation=3, last_commit=others)
    (held,) = hand.acknowledge().chunks
    assert held.version == 0
