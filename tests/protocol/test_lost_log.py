"""A worker that has heard of more than the run log has: the log has lost its end, or it is another one."""

from dataclasses import replace
from functools import partial

import pytest

from skein.protocol.coordinator.coordinator_io import Halt, Log
from skein.protocol.log.history import History
from skein.protocol.log.records import EpochOpened, JobSubmitted, Record, RolledBack
from skein.protocol.messages.directives import Commit, NewGeneration, OtherLog, Refused, Welcome
from skein.protocol.messages.positions import LogPosition, is_signed, signed
from skein.protocol.messages.reports import Hello
from skein.protocol.worker.worker_io import DialAgain, ForgetJob, StreamLost, StreamOpened
from skein.sim.scenario import disturbed, judge
from skein.sim.shapes import shape_of
from skein.types import Epoch, Generation, JobId
from tests.support.desk import DESK_KEY, Desk
from tests.support.hands import JOB, Hand, record
from tests.support.jobs import small_job
from tests.support.reports import hello
from tests.support.runs import PLAN, began
from tests.support.stages import only
from tests.support.worlds import of_kind

SPEC = small_job().canonical_json()


def submitted(name: str) -> JobSubmitted:
    return JobSubmitted(job=JobId(name), key=name, spec=SPEC, wall_s=0.0)


def opened(epoch: int, wall_s: float, *, accepts_loss: bool = False) -> EpochOpened:
    return EpochOpened(epoch=Epoch(epoch), wall_s=wall_s, accepts_loss=accepts_loss)


def history_of(*log: Record) -> History:
    history = History()
    for entry in log:
        history.apply(entry)
    return history


def knows(epoch: int, opened_s: float, entry: int, *, origin_s: float = 1.0) -> LogPosition:
    return LogPosition(origin_s=origin_s, epoch=Epoch(epoch), opened_s=opened_s, entry=entry)


LOG = (opened(1, 1.0), submitted("a"), opened(2, 2.0), submitted("b"), submitted("c"), opened(3, 3.0))


@pytest.mark.parametrize("known", [knows(1, 1.0, 2), knows(2, 2.0, 3), knows(2, 2.0, 5), knows(3, 3.0, 6)])
def test_a_log_covers_what_was_told_of_it(known: LogPosition) -> None:
    assert history_of(*LOG).covers(known)


@pytest.mark.parametrize(
    "known", [knows(1, 1.0, 3), knows(2, 2.5, 3), knows(2, 2.0, 6), knows(3, 3.0, 7), knows(4, 4.0, 2)]
)
def test_a_log_lacks_what_comes_after_an_epoch_and_epochs_that_were_opened_otherwise(
    known: LogPosition,
) -> None:
    assert not history_of(*LOG).covers(known)


def test_the_origin_is_where_the_log_began_or_its_loss_was_accepted_last() -> None:
    assert history_of(*LOG).position == knows(3, 3.0, 6)
    accepted = history_of(*LOG, opened(4, 4.0, accepts_loss=True), opened(5, 5.0))
    assert accepted.position == knows(5, 5.0, 8, origin_s=4.0)


def join_knowing(desk: Desk, known: LogPosition) -> None:
    desk.report("w2", replace(hello("w2", "w2-1"), epoch=known.epoch, position=known))


def sign(known: LogPosition) -> LogPosition:
    return signed(known, DESK_KEY)


def test_a_worker_that_knows_a_lost_entry_ends_the_coordinator_with_both_positions() -> None:
    desk = Desk([opened(1, 1.0), submitted("a"), opened(2, 2.0), submitted("b")])
    join_knowing(desk, sign(knows(2, 2.0, 7)))
    [halt] = desk.found(Halt)
    assert halt.reason.startswith(
        "the run log ended at entry 4 of epoch 2, but worker w2 knows entry 7 of epoch 2: restore"
    )
    assert "--accept-lost-log" in halt.reason


def test_a_lost_epoch_is_noticed_though_the_next_one_has_its_number() -> None:
    desk = Desk([opened(1, 1.0), submitted("a")])
    join_knowing(desk, sign(knows(2, 2.0, 3)))
    [halt] = desk.found(Halt)
    assert "ended at entry 2 of epoch 1, but worker w2 knows entry 3 of epoch 2" in halt.reason


@pytest.mark.parametrize("origin_s", [1.0, 0.5])
def test_once_a_loss_is_accepted_or_in_another_log_the_worker_is_refused_instead(origin_s: float) -> None:
    log: list[Record] = [opened(1, origin_s), submitted("a")]
    if origin_s == 1.0:
        log.append(opened(2, 9.0, accepts_loss=True))
    desk = Desk(log)
    join_knowing(desk, sign(knows(3, 2.0, 7)))
    assert desk.found(Halt) == []
    why = "whose loss was accepted" if origin_s == 1.0 else "which is not in the run log"
    assert f"knows entry 7 of epoch 3, {why}" in desk.told(Refused)["w2"].reason


def test_a_worker_that_followed_this_log_from_before_the_accepted_loss_is_welcome() -> None:
    desk = Desk([opened(1, 1.0), submitted("a"), opened(2, 9.0, accepts_loss=True)])
    join_knowing(desk, knows(1, 1.0, 2))
    assert desk.told(Welcome).keys() == {"w2"}


def test_a_worker_says_the_newest_position_that_it_has_heard_of() -> None:
    hand = Hand()
    hand.give(StreamOpened())
    hand.hear(Welcome(epoch=Epoch(1), lease_s=3.0, beat_s=1.0, position=sign(knows(1, 1.0, 2))))
    fence = NewGeneration(
        epoch=Epoch(1),
        generation=Generation(1),
        job=JobId("j"),
        key=b"",
        last_commit=None,
        position=sign(knows(1, 1.0, 5)),
    )
    hand.hear(fence)
    newest = sign(knows(1, 1.0, 8))
    hand.hear(
        Commit(epoch=Epoch(1), generation=Generation(1), record=record(0), goes_on=False, position=newest)
    )
    # An older generation's commit is not acted on, and its number is of no more use.
    hand.hear(replace(fence, position=sign(knows(1, 1.0, 6))))
    hand.give(StreamLost(reason="reset"))
    hand.give(StreamOpened())
    assert only(hand.said(), Hello).position == newest


@pytest.mark.parametrize(
    "claim",
    [
        knows(2, 2.0, 7),
        signed(knows(2, 2.0, 7), b"made up"),
        replace(signed(knows(2, 2.0, 4), DESK_KEY), entry=7),
        replace(knows(2, 2.0, 7), signature="\u2028" * 64),
    ],
    ids=["unsigned", "another key", "another entry's", "no digits"],
)
def test_a_claim_to_know_more_that_no_coordinator_signed_ends_nobody(claim: LogPosition) -> None:
    desk = Desk([opened(1, 1.0), submitted("a"), opened(2, 2.0), submitted("b")])
    join_knowing(desk, claim)
    assert desk.found(Halt) == []
    assert "knows entry 7 of epoch 2, as it says without a signature" in desk.told(Refused)["w2"].reason
    assert any(line.line.startswith("worker=w2 refused: ") for line in desk.found(Log))
    # What the log has needs no proof: a worker of a release before has none.
    join_knowing(desk, knows(2, 2.0, 4))
    assert desk.told(Welcome).keys() == {"w2"}


def test_every_position_that_is_told_is_signed() -> None:
    desk = began()
    first = PLAN.workers[0]
    told: list[LogPosition | None] = [desk.told(NewGeneration)[first].position]
    desk.settle(PLAN)
    desk.step(PLAN)
    told.append(desk.told(Commit)[first].position)
    desk.join("w9")
    told.append(desk.told(Welcome)["w9"].position)
    assert all(position is not None and is_signed(position, DESK_KEY) for position in told)
    assert len({position.entry for position in told if position is not None}) > 1


# --- a coordinator on the wrong state directory ---


def test_a_worker_that_knows_another_log_may_ask_again_and_is_logged_once() -> None:
    desk = Desk([opened(1, 100.0)])
    lines: list[str] = []
    for _ in range(3):
        join_knowing(desk, knows(3, 3.0, 81))
        lines += [command.line for command in desk.found(Log)]
        refused = desk.told(Refused)["w2"]
        assert refused.log is OtherLog.UNKNOWN
        assert "start the coordinator on that; if not, start the worker again" in refused.reason
    assert sum(line.startswith("worker=w2 refused: ") for line in lines) == 1


def test_a_worker_whose_entries_an_operator_gave_up_is_to_forget_them() -> None:
    desk = Desk([opened(1, 1.0), submitted("a"), opened(2, 9.0, accepts_loss=True)])
    join_knowing(desk, sign(knows(1, 1.0, 7)))
    assert desk.told(Refused)["w2"].log is OtherLog.GIVEN_UP


@pytest.mark.parametrize("known", [knows(1, 1.0, 7), knows(2, 8.0, 7)])
def test_a_log_that_accepted_a_loss_twice_has_given_up_what_came_before_either(known: LogPosition) -> None:
    history = history_of(
        opened(1, 1.0), opened(2, 9.0, accepts_loss=True), opened(3, 12.0, accepts_loss=True)
    )
    assert history.has_given_up(known)
    assert history.has_given_up(replace(known, origin_s=9.0))
    assert not history.has_given_up(replace(known, origin_s=12.0))
    assert not history.has_given_up(replace(known, origin_s=5.0))


def of_another_log(log: OtherLog = OtherLog.UNKNOWN) -> Refused:
    return Refused(reason="entry 81 is not in the run log", log=log)


def working() -> Hand:
    hand = Hand()
    hand.connect(epoch=3)
    hand.fence(PLAN, epoch=3)
    return hand


def test_a_worker_of_a_job_keeps_it_and_asks_again_with_growing_pauses() -> None:
    hand = working()
    pauses = []
    for _ in range(6):
        [again] = hand.hear(of_another_log())
        assert isinstance(again, DialAgain)
        pauses.append((again.after_s, again.is_news))
        hand.give(StreamLost(reason="refused"))
        hand.give(StreamOpened())
    assert pauses == [(0.5, True), (1.0, False), (2.0, False), (4.0, False), (4.0, False), (4.0, False)]
    assert (hand.machine.epoch, hand.machine.job) == (3, JOB)


def test_pauses_begin_anew_once_the_right_coordinator_is_back() -> None:
    hand = working()
    hand.hear(of_another_log())
    hand.hear(of_another_log())
    hand.hear(Welcome(epoch=Epoch(4), lease_s=3.0, beat_s=1.0))
    hand.hear(of_another_log())
    assert [(again.after_s, again.is_news) for again in hand.found(DialAgain)] == [(0.5, True)]


@pytest.mark.parametrize("log", OtherLog)
def test_a_worker_without_a_job_follows_the_log_that_it_finds(log: OtherLog) -> None:
    hand = Hand()
    hand.connect(epoch=3)
    hand.hear(of_another_log(log))
    assert [again.is_news for again in hand.found(DialAgain)] == [True]
    hand.give(StreamLost(reason="refused"))
    hand.give(StreamOpened())
    said = only(hand.said(), Hello)
    assert (said.epoch, said.position) == (0, None)
    hand.hear(Welcome(epoch=Epoch(1), lease_s=3.0, beat_s=1.0))
    assert hand.machine.epoch == 1


def test_a_worker_drops_state_that_an_operator_gave_up() -> None:
    hand = working()
    hand.hear(of_another_log(OtherLog.GIVEN_UP))
    assert hand.found(ForgetJob)
    assert hand.machine.job is None


@pytest.mark.parametrize("shape", ["line 2x2", "line 1x1", "line 2x1"])
def test_no_step_is_lost_while_a_coordinator_serves_an_empty_state_directory(shape: str) -> None:
    world = disturbed(shape_of(shape), seed=0, num_faults=0)
    world.clock.at(3.0, partial(world.misplace_log, 60.0))
    outcome = judge(shape_of(shape), world)
    assert outcome.seconds > 63.0
    assert of_kind(world.log, RolledBack) == []
