"""Who is to blame for failures, for how long, and what undoes that."""

from collections.abc import Callable

import pytest

from skein.protocol.coordinator.runs.workers.strikes import MAX_STRIKES, Strikes
from skein.types import Incarnation, WorkerId

W, V = WorkerId("w"), WorkerId("v")
FIRST, SECOND = Incarnation("1"), Incarnation("2")


def strike_often(strikes: Strikes, worker: WorkerId, *hearsay: bool) -> list[bool]:
    return [strikes.strike(worker, "failed", is_hearsay=is_hearsay) for is_hearsay in hearsay]


def test_the_third_strike_excludes() -> None:
    strikes = Strikes()
    assert strike_often(strikes, W, *[False] * MAX_STRIKES) == [False] * (MAX_STRIKES - 1) + [True]
    assert strikes.excluded == {"w": "failed"}


def test_strikes_count_by_worker_and_between_commits() -> None:
    strikes = Strikes()
    strike_often(strikes, W, False, False)
    strike_often(strikes, V, False, False)
    strikes.committed()
    strike_often(strikes, W, False, False)
    assert strikes.excluded == {}


def test_only_hearsay_can_be_pardoned() -> None:
    strikes = Strikes()
    strike_often(strikes, W, True, True, True)
    strike_often(strikes, V, True, False, True)
    assert strikes.may_pardon
    assert strikes.pardon() == (W,)
    assert strikes.excluded == {"v": "failed"}
    assert strikes.pardon() == ()


def test_a_new_process_begins_without_strikes() -> None:
    strikes = Strikes()
    strikes.joined(W, FIRST)
    strike_often(strikes, W, False, False, False)
    strikes.joined(W, SECOND)
    assert strikes.excluded == {}
    assert strike_often(strikes, W, False, False) == [False, False]


def lie_often(strikes: Strikes, worker: WorkerId, num_lies: int) -> None:
    for _ in range(num_lies):
        strikes.strike(worker, "lied", is_hearsay=False, lasts=True)


def say_unfit(strikes: Strikes) -> None:
    strikes.set_aside(W, "no data here", lasts=True)


def say_unread(strikes: Strikes) -> None:
    strikes.set_aside(W, "no checkpoint here")


def go_and_come_back(strikes: Strikes) -> None:
    strikes.joined(W, FIRST)


def fail_a_peer(strikes: Strikes) -> None:
    strikes.strike(W, "cannot be reached", is_hearsay=True)


def be_late(strikes: Strikes) -> None:
    strikes.exclude(W, "has not built")


@pytest.mark.parametrize("says", [say_unfit, say_unread, go_and_come_back, fail_a_peer, be_late])
def test_who_is_excluded_for_its_lies_does_not_come_back_by_what_it_says_or_does(
    says: Callable[[Strikes], None],
) -> None:
    strikes = Strikes()
    strikes.joined(W, FIRST)
    lie_often(strikes, W, MAX_STRIKES)
    strikes.committed()
    says(strikes)
    assert strikes.committed() == ()
    assert strikes.pardon() == ()
    assert strikes.excluded == {"w": "lied"}


@pytest.mark.parametrize("says", [say_unfit, say_unread, go_and_come_back])
def test_strikes_that_last_are_counted_on_after_a_worker_was_set_aside_and_let_back(
    says: Callable[[Strikes], None],
) -> None:
    strikes = Strikes()
    strikes.joined(W, FIRST)
    lie_often(strikes, W, MAX_STRIKES - 1)
    says(strikes)
    strikes.committed()
    strikes.pardon()
    assert strikes.excluded == {}
    lie_often(strikes, W, 1)
    assert strikes.excluded == {"w": "lied"}


def test_lies_of_a_worker_that_was_set_aside_exclude_it_for_good() -> None:
    strikes = Strikes()
    say_unread(strikes)
    lie_often(strikes, W, MAX_STRIKES)
    assert strikes.committed() == ()
    assert strikes.pardon() == ()
    assert strikes.lacking is None
    assert strikes.excluded == {"w": "lied"}


def test_a_worker_that_was_only_away_is_let_back_from_what_peers_said_of_it() -> None:
    strikes = Strikes()
    strikes.joined(W, FIRST)
    strike_often(strikes, W, True, True, True)
    go_and_come_back(strikes)
    assert strikes.excluded == {}


def test_who_was_less_credible_comes_back_when_needed_or_cleared_and_not_by_itself() -> None:
    strikes = Strikes()
    for worker in (W, V):
        strikes.joined(worker, FIRST)
        strikes.convict(worker, "disagrees", may_be_wrong=True)
        strikes.joined(worker, FIRST)
        strikes.set_aside(worker, "no data here")
    assert strikes.committed() == ()
    assert strikes.acquit((V,)) == (V,)
    assert strikes.excluded == {"w": "disagrees"}
    assert strikes.pardon() == (W,)


def test_where_nobody_is_more_credible_nobody_is_pardoned() -> None:
    strikes = Strikes()
    strikes.convict(W, "disagrees", may_be_wrong=False)
    assert not strikes.may_pardon
    assert strikes.acquit((W,)) == ()


@pytest.mark.parametrize("may_be_wrong", [True, False])
def test_who_is_convicted_does_not_come_back_by_itself_whatever_peers_said_of_it_before(
    may_be_wrong: bool,
) -> None:
    strikes = Strikes()
    strikes.joined(W, FIRST)
    strike_often(strikes, W, True)
    strikes.convict(W, "disagrees", may_be_wrong=may_be_wrong)
    go_and_come_back(strikes)
    assert strikes.excluded == {"w": "disagrees"}
    assert strikes.may_pardon is may_be_wrong
