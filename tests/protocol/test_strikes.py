"""Who is to blame for failures, for how long, and what undoes that."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from skein.protocol.coordinator.coordinator_io import Log, Outbox
from skein.protocol.coordinator.runs.workers.blame import Blame
from skein.protocol.coordinator.runs.workers.disputes import MAX_STRIKES
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.history import History, JobHistory
from skein.protocol.membership.membership import Entry, Membership
from skein.types import Incarnation, JobId, WorkerId
from tests.support.hands import record
from tests.support.jobs import small_job
from tests.support.plans import grid_plan
from tests.support.reports import hello

W, V = WorkerId("w"), WorkerId("v")
FIRST, SECOND = Incarnation("1"), Incarnation("2")


class Strikes:
    """Blame for the failures of a job, and who it says is let back."""

    def __init__(self) -> None:
        self.outbox = Outbox(History())
        job = JobHistory(job=JobId("j"), key="k", spec=small_job(), submitted_wall_s=0.0)
        self.blame = Blame(Members(job, Membership(), self.outbox))

    def pardoned(self) -> list[str]:
        lines = [command.words for command in self.outbox.drain() if isinstance(command, Log)]
        return [line.partition("=")[2] for line in lines if line.startswith("pardoned=")]

    def commit(self) -> list[str]:
        self.outbox.drain()
        self.blame.committed(record(), grid_plan(), now=0.0)
        return self.pardoned()

    def pardon(self) -> list[str]:
        self.outbox.drain()
        self.blame.pardon()
        return self.pardoned()

    def acquit(self, worker: WorkerId) -> list[str]:
        self.outbox.drain()
        self.blame.acquit([worker])
        return self.pardoned()

    def join(self, worker: WorkerId, incarnation: Incarnation) -> None:
        said = replace(hello(worker), incarnation=incarnation)
        self.blame.joined(Entry(hello=said, lease_until=0.0))


def strike_often(strikes: Strikes, worker: WorkerId, *hearsay: bool) -> list[bool]:
    found = []
    for is_hearsay in hearsay:
        strikes.blame.strike(worker, "failed", is_hearsay=is_hearsay)
        found.append(worker in strikes.blame.excluded)
    return found


def test_the_third_strike_excludes() -> None:
    strikes = Strikes()
    assert strike_often(strikes, W, *[False] * MAX_STRIKES) == [False] * (MAX_STRIKES - 1) + [True]
    assert strikes.blame.excluded == {"w": "failed"}


def test_strikes_count_by_worker_and_between_commits() -> None:
    strikes = Strikes()
    strike_often(strikes, W, False, False)
    strike_often(strikes, V, False, False)
    strikes.commit()
    strike_often(strikes, W, False, False)
    assert strikes.blame.excluded == {}


def test_only_hearsay_can_be_pardoned() -> None:
    strikes = Strikes()
    strike_often(strikes, W, True, True, True)
    strike_often(strikes, V, True, False, True)
    assert strikes.blame.may_pardon
    assert strikes.pardon() == [W]
    assert strikes.blame.excluded == {"v": "failed"}
    assert strikes.pardon() == []


def test_a_new_process_begins_without_strikes() -> None:
    strikes = Strikes()
    strikes.join(W, FIRST)
    strike_often(strikes, W, False, False, False)
    strikes.join(W, SECOND)
    assert strikes.blame.excluded == {}
    assert strike_often(strikes, W, False, False) == [False, False]


def lie_often(strikes: Strikes, worker: WorkerId, num_lies: int) -> None:
    for _ in range(num_lies):
        strikes.blame.strike(worker, "lied", is_hearsay=False, lasts=True)


def say_unfit(strikes: Strikes) -> None:
    strikes.blame.set_aside({W: "no data here"}, lasts=True)


def say_unread(strikes: Strikes) -> None:
    strikes.blame.set_aside({W: "no checkpoint here"})


def go_and_come_back(strikes: Strikes) -> None:
    strikes.join(W, FIRST)


def fail_a_peer(strikes: Strikes) -> None:
    strikes.blame.strike(W, "cannot be reached", is_hearsay=True)


def be_late(strikes: Strikes) -> None:
    strikes.blame.exclude([W], "has not built")


@pytest.mark.parametrize("says", [say_unfit, say_unread, go_and_come_back, fail_a_peer, be_late])
def test_who_is_excluded_for_its_lies_does_not_come_back_by_what_it_says_or_does(
    says: Callable[[Strikes], None],
) -> None:
    strikes = Strikes()
    strikes.join(W, FIRST)
    lie_often(strikes, W, MAX_STRIKES)
    strikes.commit()
    says(strikes)
    assert strikes.commit() == []
    assert strikes.pardon() == []
    assert strikes.blame.excluded == {"w": "lied"}


@pytest.mark.parametrize("says", [say_unfit, say_unread, go_and_come_back])
def test_strikes_that_last_are_counted_on_after_a_worker_was_set_aside_and_let_back(
    says: Callable[[Strikes], None],
) -> None:
    strikes = Strikes()
    strikes.join(W, FIRST)
    lie_often(strikes, W, MAX_STRIKES - 1)
    says(strikes)
    strikes.commit()
    strikes.pardon()
    assert strikes.blame.excluded == {}
    lie_often(strikes, W, 1)
    assert strikes.blame.excluded == {"w": "lied"}


def test_lies_of_a_worker_that_was_set_aside_exclude_it_for_good() -> None:
    strikes = Strikes()
    say_unread(strikes)
    lie_often(strikes, W, MAX_STRIKES)
    assert strikes.commit() == []
    assert strikes.pardon() == []
    assert strikes.blame.lacking is None
    assert strikes.blame.excluded == {"w": "lied"}


def test_a_worker_that_was_only_away_is_let_back_from_what_peers_said_of_it() -> None:
    strikes = Strikes()
    strikes.join(W, FIRST)
    strike_often(strikes, W, True, True, True)
    go_and_come_back(strikes)
    assert strikes.blame.excluded == {}


def test_who_was_less_credible_comes_back_when_needed_or_cleared_and_not_by_itself() -> None:
    strikes = Strikes()
    for worker in (W, V):
        strikes.join(worker, FIRST)
        strikes.blame.convict(worker, "disagrees", may_be_wrong=True)
        strikes.join(worker, FIRST)
        strikes.blame.set_aside({worker: "no data here"})
    assert strikes.commit() == []
    assert strikes.acquit(V) == [V]
    assert strikes.blame.excluded == {"w": "disagrees"}
    assert strikes.pardon() == [W]


def test_where_nobody_is_more_credible_nobody_is_pardoned() -> None:
    strikes = Strikes()
    strikes.blame.convict(W, "disagrees", may_be_wrong=False)
    assert not strikes.blame.may_pardon
    assert strikes.acquit(W) == []


@pytest.mark.parametrize("may_be_wrong", [True, False])
def test_who_is_convicted_does_not_come_back_by_itself_whatever_peers_said_of_it_before(
    may_be_wrong: bool,
) -> None:
    strikes = Strikes()
    strikes.join(W, FIRST)
    strike_often(strikes, W, True)
    strikes.blame.convict(W, "disagrees", may_be_wrong=may_be_wrong)
    go_and_come_back(strikes)
    assert strikes.blame.excluded == {"w": "disagrees"}
    assert strikes.blame.may_pardon is may_be_wrong
