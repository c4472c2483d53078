"""Whose a worker's name is: strangers, proofs, restarts."""

import pytest

from skein.protocol.deadline import TimePassed
from skein.protocol.log.records import GenerationMember
from skein.protocol.membership.membership import (
    Evicted,
    IncarnationJoined,
    Lost,
    Membership,
    NameRemembered,
    Rejected,
    Returned,
    proof_of,
)
from skein.protocol.messages.reports import Hello
from skein.types import Incarnation
from tests.protocol.test_membership import LEASE_S, W, broke, heard, membership, with_one
from tests.support.reports import hello


def test_a_new_incarnation_means_that_the_old_one_died() -> None:
    machine = with_one()
    gone, come = machine.handle(hello("w", "w-2"), now=0.1)
    assert isinstance(gone, Lost)
    assert (gone.incarnation, gone.is_final) == ("w-1", True)
    assert come == IncarnationJoined(worker=W)
    assert machine.is_current(W, Incarnation("w-2"))


def test_of_two_processes_with_one_name_the_older_is_refused_for_good() -> None:
    machine = with_one()
    machine.handle(hello("w", "w-2"), now=0.1)
    [change] = machine.handle(hello("w", "w-1"), now=0.2)
    assert isinstance(change, Rejected)
    assert "give each worker its own" in change.reason
    assert machine.is_current(W, Incarnation("w-2"))


def stranger(incarnation: str = "stranger", *, secret: str = "another") -> Hello:  # noqa: S107 - to test with
    """A process elsewhere that was given the same name."""
    return hello("w", incarnation, secret=secret)


@pytest.mark.parametrize("secret", ["another", ""])
def test_a_stranger_is_refused_while_the_lease_lives_and_told_who_has_the_name(secret: str) -> None:
    machine = with_one()
    [change] = machine.handle(stranger(secret=secret), now=1.2)
    assert isinstance(change, Rejected)
    assert change.incarnation == "stranger"
    assert "the name w is that of a living process on w.lab, at w:1, heard 1.2 s ago" in change.reason
    assert "give each worker a name of its own" in change.reason
    assert machine.is_current(W, Incarnation("w-1"))
    # Not even a broken stream gives the name away before the grace is over.
    machine.handle(broke("w"), now=1.3)
    assert [type(change) for change in machine.handle(stranger(), now=1.4)] == [Rejected]
    assert machine.handle(hello("w"), now=1.5) == [Returned(worker=W)]


def test_a_stranger_gets_the_name_of_the_lost_who_is_refused_then() -> None:
    machine = with_one()
    machine.handle(TimePassed(), now=LEASE_S)
    changes = machine.handle(stranger(), now=4.0)
    assert [type(change) for change in changes] == [Rejected, IncarnationJoined]
    assert machine.is_current(W, Incarnation("stranger"))
    [change] = machine.handle(hello("w", "w-2"), now=4.1)
    assert isinstance(change, Rejected)


def test_who_has_no_secret_is_replaced_by_nobody_and_returns_all_the_same() -> None:
    machine = membership()
    assert machine.handle(stranger("first", secret=""), now=0.0) == [IncarnationJoined(worker=W)]
    assert [type(change) for change in machine.handle(stranger("second", secret=""), now=0.1)] == [Rejected]
    assert machine.handle(stranger("first", secret=""), now=0.2) == [Returned(worker=W)]


def test_another_process_that_says_to_be_the_same_incarnation_is_refused() -> None:
    machine = with_one()
    assert [type(change) for change in machine.handle(stranger("w-1"), now=0.1)] == [Rejected]


def remembering(*, proof: str) -> Membership:
    """As after a coordinator's restart, whose log knows a member of this name."""
    machine = membership()
    member = GenerationMember(worker=W, incarnation=Incarnation("w-1"), proof=proof)
    machine.handle(NameRemembered(member=member), now=10.0)
    return machine


PROOF = proof_of(hello("w"))


def test_after_a_restart_a_name_waits_a_lease_for_whom_the_log_knows() -> None:
    machine = remembering(proof=PROOF)
    [change] = machine.handle(stranger(), now=10.1)
    assert isinstance(change, Rejected)
    assert "may live and come back" in change.reason
    assert machine.handle(hello("w"), now=10.2) == [IncarnationJoined(worker=W)]


@pytest.mark.parametrize(
    ("proof", "said", "at"),
    [
        (PROOF, hello("w", "w-2"), 10.1),
        (PROOF, stranger(), 10.0 + LEASE_S),
        ("", stranger(), 10.1),
    ],
    ids=["its successor", "a stranger, later", "no proof to show"],
)
def test_after_a_restart_others_get_it_by_proof_or_later(proof: str, said: Hello, at: float) -> None:
    assert remembering(proof=proof).handle(said, now=at) == [IncarnationJoined(worker=W)]


def test_what_the_old_incarnation_still_says_or_loses_changes_nothing() -> None:
    machine = with_one()
    machine.handle(hello("w", "w-2"), now=0.0)
    assert machine.handle(heard("w", incarnation="w-1"), now=2.0) == []
    assert machine.handle(broke("w", incarnation="w-1"), now=2.1) == []
    assert machine.deadline() == LEASE_S


def test_a_silent_process_whose_name_another_takes_is_refused_on_the_stream_it_has() -> None:
    machine = with_one()
    machine.handle(TimePassed(), now=LEASE_S)
    gone, come = machine.handle(hello("w", "w-2"), now=4.0)
    assert isinstance(gone, Rejected)
    assert gone.incarnation == "w-1"
    assert come == IncarnationJoined(worker=W)


def test_who_was_evicted_is_not_admitted_again() -> None:
    machine = with_one()
    [change] = machine.handle(Evicted(worker=W, reason="stuck"), now=0.0)
    assert isinstance(change, Lost)
    assert change.is_final
    assert machine.handle(heard("w"), now=0.1) == []
    [change] = machine.handle(hello("w"), now=0.2)
    assert change == Rejected(worker=W, incarnation=Incarnation("w-1"), reason="stuck")
    assert machine.handle(Evicted(worker=W, reason="again"), now=0.3) == []
