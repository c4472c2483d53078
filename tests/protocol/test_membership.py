"""The Membership machine: leases, grace, returns, and names that two processes want."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from skein.protocol.deadline import TimePassed
from skein.protocol.membership import membership as defaults
from skein.protocol.membership.membership import (
    Doubted,
    Evicted,
    Heard,
    IncarnationJoined,
    IsLeaving,
    LeaveHeard,
    Lost,
    Membership,
    MembershipChange,
    Rejected,
    Returned,
    StreamBroke,
)
from skein.types import Incarnation, WorkerId
from tests.support.reports import hello

LEASE_S, GRACE_S = 3.0, 0.5
W = WorkerId("w")


def membership() -> Membership:
    return Membership(lease_s=LEASE_S, grace_s=GRACE_S)


def heard(worker: str, *, incarnation: str | None = None, progress: int | None = None) -> Heard:
    return Heard(
        worker=WorkerId(worker), incarnation=Incarnation(incarnation or f"{worker}-1"), progress=progress
    )


def broke(worker: str, *, incarnation: str | None = None) -> StreamBroke:
    return StreamBroke(worker=WorkerId(worker), incarnation=Incarnation(incarnation or f"{worker}-1"))


def with_one(*, at: float = 0.0) -> Membership:
    machine = membership()
    machine.handle(hello("w"), now=at)
    return machine


def lost(changes: list[MembershipChange]) -> list[str]:
    return [change.worker for change in changes if isinstance(change, Lost)]


def test_a_hello_joins() -> None:
    machine = membership()
    assert machine.deadline() is None
    assert machine.handle(hello("w"), now=1.0) == [IncarnationJoined(worker=W)]
    assert list(machine.live) == ["w"]
    assert machine.deadline() == 1.0 + LEASE_S


def test_silence_beyond_the_lease_is_a_loss_and_not_before() -> None:
    machine = with_one()
    assert machine.handle(TimePassed(), now=LEASE_S - 0.001) == []
    [change] = machine.handle(TimePassed(), now=LEASE_S)
    assert change == Lost(
        worker=W,
        incarnation=Incarnation("w-1"),
        reason="lease, silent for 3.0 s",
        silent_s=LEASE_S,
        is_final=False,
    )
    assert machine.live == {}
    assert machine.deadline() is None


def test_any_report_renews_the_lease() -> None:
    machine = with_one()
    machine.handle(heard("w"), now=2.0)
    assert machine.handle(TimePassed(), now=4.9) == []
    assert machine.deadline() == 5.0


def test_a_broken_stream_shortens_the_lease_to_the_grace() -> None:
    machine = with_one()
    machine.handle(broke("w"), now=1.0)
    assert machine.deadline() == 1.0 + GRACE_S
    [change] = machine.handle(TimePassed(), now=1.5)
    assert isinstance(change, Lost)
    assert change.reason.startswith("stream broke")


def test_a_broken_stream_never_lengthens_a_lease() -> None:
    machine = with_one()
    machine.handle(broke("w"), now=LEASE_S - 0.1)
    assert machine.deadline() == LEASE_S


def test_what_still_arrives_from_a_broken_stream_renews_nothing() -> None:
    machine = with_one()
    machine.handle(broke("w"), now=1.0)
    machine.handle(heard("w"), now=1.2)
    assert lost(machine.handle(TimePassed(), now=1.5)) == ["w"]


def test_the_same_incarnation_may_return_within_the_grace() -> None:
    machine = with_one()
    machine.handle(broke("w"), now=1.0)
    assert machine.handle(hello("w"), now=1.4) == [Returned(worker=W)]
    assert machine.handle(TimePassed(), now=4.3) == []
    assert machine.deadline() == 1.4 + LEASE_S


def test_who_was_only_silent_joins_again_on_the_stream_it_has() -> None:
    machine = with_one()
    machine.handle(LeaveHeard(worker=W), now=0.1)
    machine.handle(TimePassed(), now=LEASE_S)
    assert machine.handle(heard("w", progress=7), now=5.0) == [
        IncarnationJoined(worker=W),
        IsLeaving(worker=W),
    ]
    entry = machine.live[W]
    assert (entry.lease_until, entry.progress, entry.is_leaving) == (8.0, 7, True)
    assert machine.deadline() == 8.0


def test_who_was_silent_and_then_lost_its_stream_must_say_hello() -> None:
    machine = with_one()
    machine.handle(TimePassed(), now=LEASE_S)
    machine.handle(broke("w"), now=4.0)
    assert machine.handle(heard("w"), now=5.0) == []
    assert machine.handle(hello("w"), now=6.0) == [IncarnationJoined(worker=W)]


def test_another_protocol_version_is_rejected_with_the_cure() -> None:
    machine = membership()
    [change] = machine.handle(hello("w", version=999), now=0.0)
    assert isinstance(change, Rejected)
    assert "999" in change.reason
    assert "install the same release" in change.reason
    assert machine.live == {}


def test_leaving_is_told_once() -> None:
    machine = with_one()
    assert machine.handle(LeaveHeard(worker=W), now=0.0) == [IsLeaving(worker=W)]
    assert machine.handle(LeaveHeard(worker=W), now=0.1) == []
    assert machine.handle(LeaveHeard(worker=WorkerId("unknown")), now=0.1) == []
    assert machine.live[W].is_leaving


def test_who_is_leaving_stays_so_through_losses_and_returns() -> None:
    machine = with_one()
    machine.handle(LeaveHeard(worker=W), now=0.0)
    machine.handle(broke("w"), now=0.1)
    returned = machine.handle(hello("w"), now=0.2)
    assert returned == [Returned(worker=W), IsLeaving(worker=W)]
    machine.handle(broke("w"), now=0.3)
    machine.handle(TimePassed(), now=0.9)
    assert machine.handle(hello("w"), now=1.0) == [
        IncarnationJoined(worker=W),
        IsLeaving(worker=W),
    ]
    _, again = machine.handle(hello("w", "w-2"), now=1.1)
    assert again == IncarnationJoined(worker=W)
    assert not machine.live[W].is_leaving


def doubted(worker: str = "w") -> Doubted:
    return Doubted(worker=WorkerId(worker), reason="a cannot reach it")


def test_a_doubted_worker_whose_stream_broke_is_lost_at_once() -> None:
    machine = with_one()
    machine.handle(broke("w"), now=1.0)
    [change] = machine.handle(doubted(), now=1.1)
    assert change == Lost(
        worker=W,
        incarnation=Incarnation("w-1"),
        reason="a cannot reach it, silent here for 1.1 s",
        silent_s=1.1,
        is_final=False,
    )
    assert machine.deadline() is None
    assert machine.handle(hello("w"), now=1.2) == [IncarnationJoined(worker=W)]


def test_a_doubted_worker_that_misses_beats_is_lost_before_its_lease_ends_and_may_speak_again() -> None:
    machine = with_one()
    assert lost(machine.handle(doubted(), now=LEASE_S / 2)) == ["w"]
    assert machine.handle(heard("w"), now=2.0) == [IncarnationJoined(worker=W)]


def test_a_peers_doubt_alone_loses_nobody() -> None:
    machine = with_one()
    machine.handle(heard("w"), now=5.0)
    assert machine.handle(doubted(), now=5.0 + 2 * machine.beat_s) == []
    assert machine.handle(doubted("unknown"), now=5.0) == []
    assert machine.deadline() == 5.0 + LEASE_S


def test_the_defaults_notice_in_time_with_a_tenth_of_a_second_for_late_timers() -> None:
    machine = Membership()
    assert (machine.lease_s, machine.grace_s) == (defaults.LEASE_S, defaults.GRACE_S)
    assert machine.grace_s <= 0.5 - 0.1  # a process that died
    assert machine.lease_s <= 3.0 - 0.1  # a frozen one, heard just before
    assert machine.beat_s <= machine.lease_s / 4


def test_progress_moves_only_when_the_count_does() -> None:
    machine = with_one()
    machine.handle(heard("w", progress=1), now=1.0)
    machine.handle(heard("w", progress=1), now=2.0)
    machine.handle(heard("w"), now=2.5)
    assert (machine.live[W].progressed_at, machine.live[W].heard_at) == (1.0, 2.5)


def test_those_who_are_late_together_are_lost_in_order() -> None:
    machine = membership()
    for name in ("c", "a", "b"):
        machine.handle(hello(name), now=0.0)
    assert lost(machine.handle(TimePassed(), now=LEASE_S + 0.5)) == ["a", "b", "c"]


def test_time_in_which_nobody_listened_loses_nobody_who_speaks_at_once() -> None:
    machine = membership()
    for name in ("a", "b"):
        machine.handle(hello(name), now=0.0)
    assert machine.handle(TimePassed(), now=60.0) == []
    deadline = machine.deadline()
    assert deadline is not None
    assert 60.0 < deadline < 60.0 + LEASE_S
    machine.handle(heard("a"), now=60.1)
    assert lost(machine.handle(TimePassed(), now=deadline)) == ["b"]
    assert machine.deadline() == 60.1 + LEASE_S


NAMES = st.sampled_from(["a", "b", "c"])
TURNS = st.integers(1, 3)


class LeasesAgainstAModel(RuleBasedStateMachine):
    """Compares the machine with a dictionary that is searched from end to end every time."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = membership()
        self.now = 0.0
        self.leases: dict[str, tuple[str, float, bool]] = {}
        self.silent: dict[str, str] = {}
        self.refused: set[str] = set()
        self.heard: dict[str, float] = {}

    def join(self, name: str, incarnation: str) -> None:
        self.leases[name] = (incarnation, self.now + LEASE_S, True)
        self.silent.pop(name, None)
        self.heard[name] = self.now

    @rule(seconds=st.sampled_from([0.1, 0.3, 0.5, 1.0, 2.9, 3.0]))
    def time_passes(self, seconds: float) -> None:
        until_s = self.now + seconds
        gone: list[str] = []
        while (deadline := self.machine.deadline()) is not None and deadline <= until_s:
            gone += lost(self.machine.handle(TimePassed(), now=deadline))
        self.now = until_s
        expired = sorted(name for name, (_, until, _) in self.leases.items() if until <= self.now)
        assert sorted(gone) == expired
        for name in expired:
            incarnation, _, is_connected = self.leases.pop(name)
            if is_connected:
                self.silent[name] = incarnation

    @rule(name=NAMES, turn=TURNS)
    def says_hello(self, name: str, turn: int) -> None:
        incarnation = f"{name}-{turn}"
        changes = self.machine.handle(hello(name, incarnation), now=self.now)
        held = self.leases.get(name)
        if incarnation in self.refused:
            assert [type(change) for change in changes] == [Rejected]
        elif held is not None and held[0] == incarnation:
            assert changes == [Returned(worker=WorkerId(name))]
            self.heard[name] = self.now
            self.leases[name] = (incarnation, self.now + LEASE_S, True)
        else:
            silent = self.silent.get(name, incarnation)
            gone = ([Lost] if held else []) + ([Rejected] if silent != incarnation else [])
            assert [type(change) for change in changes] == [*gone, IncarnationJoined]
            if held is not None:
                self.refused.add(held[0])
            if silent != incarnation:
                self.refused.add(silent)
            self.join(name, incarnation)

    @rule(name=NAMES)
    def comes_as_a_stranger(self, name: str) -> None:
        said = hello(name, "stranger", secret="another")
        changes = self.machine.handle(said, now=self.now)
        if name in self.leases or "stranger" in self.refused:
            assert [type(change) for change in changes] == [Rejected]
            return
        silent = self.silent.pop(name, None)
        assert [type(change) for change in changes] == [
            *([] if silent is None else [Rejected]),
            IncarnationJoined,
        ]
        if silent is not None:
            self.refused.add(silent)
        # It goes at once, and its grace passes.
        self.machine.handle(broke(name, incarnation="stranger"), now=self.now)
        assert lost(self.machine.handle(doubted(name), now=self.now)) == [name]

    @rule(name=NAMES, turn=TURNS)
    def says_something(self, name: str, turn: int) -> None:
        incarnation = f"{name}-{turn}"
        changes = self.machine.handle(heard(name, incarnation=incarnation), now=self.now)
        if self.silent.get(name) == incarnation:
            assert changes == [IncarnationJoined(worker=WorkerId(name))]
            self.join(name, incarnation)
            return
        assert changes == []
        held = self.leases.get(name)
        if held is not None and held[0] == incarnation:
            self.heard[name] = self.now
        if held is not None and held[0] == incarnation and held[2]:
            self.leases[name] = (incarnation, self.now + LEASE_S, True)

    @rule(name=NAMES, turn=TURNS)
    def loses_its_stream(self, name: str, turn: int) -> None:
        incarnation = f"{name}-{turn}"
        assert self.machine.handle(broke(name, incarnation=incarnation), now=self.now) == []
        if self.silent.get(name) == incarnation:
            del self.silent[name]
        held = self.leases.get(name)
        if held is not None and held[0] == incarnation:
            self.leases[name] = (incarnation, min(held[1], self.now + GRACE_S), False)

    @rule(name=NAMES)
    def is_doubted(self, name: str) -> None:
        changes = self.machine.handle(doubted(name), now=self.now)
        held = self.leases.get(name)
        is_silent = held is not None and self.now - self.heard[name] >= LEASE_S / 2
        assert lost(changes) == ([name] if held is not None and (is_silent or not held[2]) else [])
        if changes and held is not None:
            del self.leases[name]
            if held[2]:
                self.silent[name] = held[0]

    @rule(name=NAMES)
    def is_evicted(self, name: str) -> None:
        changes = self.machine.handle(Evicted(worker=WorkerId(name), reason="stuck"), now=self.now)
        assert len(changes) == (name in self.leases)
        if name in self.leases:
            self.refused.add(self.leases.pop(name)[0])

    @invariant()
    def the_deadline_is_the_end_of_the_next_lease(self) -> None:
        expected = min((until for _, until, _ in self.leases.values()), default=None)
        assert self.machine.deadline() == expected

    @invariant()
    def the_same_workers_are_live(self) -> None:
        found = {name: entry.hello.incarnation for name, entry in self.machine.live.items()}
        assert found == {name: incarnation for name, (incarnation, _, _) in self.leases.items()}


TestLeasesAgainstAModel = LeasesAgainstAModel.TestCase


@pytest.mark.parametrize("num_flaps", [1000])
def test_a_stream_that_flaps_costs_no_memory(num_flaps: int) -> None:
    machine = with_one()
    for flap in range(num_flaps):
        machine.handle(broke("w"), now=0.1 * flap)
        machine.handle(hello("w"), now=0.1 * flap + 0.05)
        machine.deadline()
    assert len(machine._leases) < 10


def test_a_lease_is_over_once_what_was_said_before_its_end_is_heard() -> None:
    machine = with_one()
    late = LEASE_S + 0.5
    assert machine.handle(TimePassed(heard_until=LEASE_S - 0.1), now=late) == []
    again = machine.deadline()
    assert again is not None
    assert again > late
    assert lost(machine.handle(TimePassed(heard_until=late), now=again)) == [W]


def test_a_worker_that_is_heard_late_keeps_its_lease() -> None:
    machine = with_one()
    assert machine.handle(TimePassed(heard_until=0.0), now=LEASE_S + 0.9) == []
    assert machine.handle(heard("w"), now=LEASE_S + 0.9) == []
    assert machine.handle(TimePassed(heard_until=LEASE_S + 0.8), now=LEASE_S + 1.0) == []
    assert machine.live


def test_a_doubt_is_not_borne_out_by_a_silence_of_the_listener() -> None:
    machine = with_one()
    silent_s = LEASE_S - 0.1
    doubted = Doubted(worker=W, reason="refused")
    machine.handle(TimePassed(heard_until=0.0), now=silent_s)
    assert machine.handle(doubted, now=silent_s) == []
    machine.handle(TimePassed(heard_until=silent_s), now=silent_s)
    assert lost(machine.handle(doubted, now=silent_s)) == [W]


@pytest.mark.parametrize(("num_workers", "lease_s"), [(1, LEASE_S), (1000, LEASE_S), (2000, 2 * LEASE_S)])
def test_leases_of_a_large_fleet_are_longer(num_workers: int, lease_s: float) -> None:
    machine = membership()
    for number in range(num_workers):
        machine.handle(hello(f"w{number}"), now=0.0)
    assert machine.lease_s == lease_s
