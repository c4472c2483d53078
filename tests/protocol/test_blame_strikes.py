"""Who is to blame for failures, for how long, and what undoes that."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from skein.protocol.coordinator.coordinator_io import Log, Outbox
from skein.protocol.coordinator.runs.workers.blame import Blame
from skein.protocol.coordinator.runs.workers.disputes import MAX_STRIKES
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.history import History, JobHistory
from skein.protocol.membership.membership import Entry
from skein.types import Incarnation, JobId, WorkerId
from tests.support.hands import record
from tests.support.jobs import small_job
from tests.support.plans import grid_plan
from tests.support.reports import hello

W, V, ACCUSER = WorkerId("w"), WorkerId("v"), WorkerId("accuser")
FIRST, SECOND = Incarnation("1"), Incarnation("2")


class Blamed:
    """Blame for the failures of a job, and who it says is let back."""

    def __init__(self) -> None:
        self.outbox = Outbox(History())
        job = JobHistory(job=JobId("j"), key="k", spec=small_job(), submitted_wall_s=0.0)
        self.blame = Blame(Members(job, {}, self.outbox))

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


def strike_often(blamed: Blamed, worker: WorkerId, *hearsay: bool) -> list[bool]:
    found = []
    for is_hearsay in hearsay:
        if is_hearsay:
            blamed.blame.accused(ACCUSER, worker, "failed", is_possible=True)
        else:
            blamed.blame.strike(worker, "failed")
        found.append(worker in blamed.blame.excluded)
    return found


def test_the_third_strike_excludes() -> None:
    blamed = Blamed()
    assert strike_often(blamed, W, *[False] * MAX_STRIKES) == [False] * (MAX_STRIKES - 1) + [True]
    assert blamed.blame.excluded == {"w": "failed"}


def test_strikes_count_by_worker_and_between_commits() -> None:
    blamed = Blamed()
    strike_often(blamed, W, False, False)
    strike_often(blamed, V, False, False)
    blamed.commit()
    strike_often(blamed, W, False, False)
    assert blamed.blame.excluded == {}


def test_only_hearsay_can_be_pardoned() -> None:
    blamed = Blamed()
    strike_often(blamed, V, False, False, False)
    strike_often(blamed, W, True, True, True)
    assert blamed.blame.may_pardon
    assert blamed.pardon() == [W]
    assert blamed.blame.excluded == {"v": "failed"}
    assert blamed.pardon() == []


def test_a_new_process_begins_without_strikes() -> None:
    blamed = Blamed()
    blamed.join(W, FIRST)
    strike_often(blamed, W, False, False, False)
    blamed.join(W, SECOND)
    assert blamed.blame.excluded == {}
    assert strike_often(blamed, W, False, False) == [False, False]


def lie_often(blamed: Blamed, worker: WorkerId, num_lies: int) -> None:
    for _ in range(num_lies):
        blamed.blame.strike(worker, "lied", lasts=True)


def say_unfit(blamed: Blamed) -> None:
    blamed.blame.set_aside({W: "no data here"}, lasts=True)


def say_unread(blamed: Blamed) -> None:
    blamed.blame.set_aside({W: "no checkpoint here"})


def go_and_come_back(blamed: Blamed) -> None:
    blamed.join(W, FIRST)


def fail_a_peer(blamed: Blamed) -> None:
    blamed.blame.accused(ACCUSER, W, "cannot be reached", is_possible=True)


def be_late(blamed: Blamed) -> None:
    blamed.blame.exclude([W], "has not built")


@pytest.mark.parametrize("says", [say_unfit, say_unread, go_and_come_back, fail_a_peer, be_late])
def test_who_is_excluded_for_its_lies_does_not_come_back_by_what_it_says_or_does(
    says: Callable[[Blamed], None],
) -> None:
    blamed = Blamed()
    blamed.join(W, FIRST)
    lie_often(blamed, W, MAX_STRIKES)
    blamed.commit()
    says(blamed)
    assert blamed.commit() == []
    assert blamed.pardon() == []
    assert blamed.blame.excluded == {"w": "lied"}


@pytest.mark.parametrize("says", [say_unfit, say_unread, go_and_come_back])
def test_strikes_that_last_are_counted_on_after_a_worker_was_set_aside_and_let_back(
    says: Callable[[Blamed], None],
) -> None:
    blamed = Blamed()
    blamed.join(W, FIRST)
    lie_often(blamed, W, MAX_STRIKES - 1)
    says(blamed)
    blamed.commit()
    blamed.pardon()
    assert blamed.blame.excluded == {}
    lie_often(blamed, W, 1)
    assert blamed.blame.excluded == {"w": "lied"}


def test_lies_of_a_worker_that_was_set_aside_exclude_it_for_good() -> None:
    blamed = Blamed()
    say_unread(blamed)
    lie_often(blamed, W, MAX_STRIKES)
    assert blamed.commit() == []
    assert blamed.pardon() == []
    assert blamed.blame.lacking is None
    assert blamed.blame.excluded == {"w": "lied"}


def test_a_worker_that_was_only_away_is_let_back_from_what_peers_said_of_it() -> None:
    blamed = Blamed()
    blamed.join(W, FIRST)
    strike_often(blamed, W, True, True, True)
    go_and_come_back(blamed)
    assert blamed.blame.excluded == {}


def test_who_was_less_credible_comes_back_when_needed_or_cleared_and_not_by_itself() -> None:
    blamed = Blamed()
    for worker in (W, V):
        blamed.join(worker, FIRST)
        blamed.blame.convict(worker, "disagrees", may_be_wrong=True)
        blamed.join(worker, FIRST)
        blamed.blame.set_aside({worker: "no data here"})
    assert blamed.commit() == []
    assert blamed.acquit(V) == [V]
    assert blamed.blame.excluded == {"w": "disagrees"}
    assert blamed.pardon() == [W]


def test_where_nobody_is_more_credible_nobody_is_pardoned() -> None:
    blamed = Blamed()
    blamed.blame.convict(W, "disagrees", may_be_wrong=False)
    assert not blamed.blame.may_pardon
    assert blamed.acquit(W) == []


@pytest.mark.parametrize("may_be_wrong", [True, False])
def test_who_is_convicted_does_not_come_back_by_itself_whatever_peers_said_of_it_before(
    may_be_wrong: bool,
) -> None:
    blamed = Blamed()
    blamed.join(W, FIRST)
    strike_often(blamed, W, True)
    blamed.blame.convict(W, "disagrees", may_be_wrong=may_be_wrong)
    go_and_come_back(blamed)
    assert blamed.blame.excluded == {"w": "disagrees"}
    assert blamed.blame.may_pardon is may_be_wrong
