"""The Membership machine: who is here. The exemplar of a machine: events and the time go in, changes come out.

Rules of this file
- A worker is an id with an incarnation. The same id with another incarnation means that the old process died.
- Any report renews the lease. A broken stream shortens it to a grace, in which the same incarnation may return.
- Only `handle` changes anything, and every change is told.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import assert_never

from skein import PROTOCOL_VERSION
from skein.protocol.messages import Hello, Member
from skein.protocol.story import Story
from skein.topology.fleet import FleetWorker
from skein.types import Incarnation, WorkerId

# --- events ---


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloHeard:
    """A worker opened a control stream."""

    hello: Hello


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A worker said something on its stream; `progress` comes with beats."""

    worker: WorkerId
    incarnation: Incarnation
    progress: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBroke:
    """A worker's stream ended."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveHeard:
    """A worker asked to go, or an operator asked for it."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """The coordinator wants no more of this incarnation."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTime:
    """The deadline may have come."""


MembershipEvent = HelloHeard | Heard | StreamBroke | LeaveHeard | Evicted | LeaseTime

# --- changes ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A new incarnation is here."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A known incarnation has a new stream: what was said on the old one may be lost."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """This Hello admits nobody."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """An incarnation is dead, or counts as dead."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IsLeaving:
    """A worker is to be given no more work."""

    worker: WorkerId


MembershipChange = Joined | Returned | Rejected | Lost | IsLeaving


@dataclass(slots=True, kw_only=True)
class Entry:
    """What is known of one live worker."""

    hello: Hello
    lease_until: float
    is_connected: bool = True
    is_leaving: bool = False
    progress: int = 0
    heard_at: float = 0.0
    progressed_at: float = 0.0

    @property
    def member(self) -> Member:
        hello = self.hello
        return Member(worker=hello.worker, incarnation=hello.incarnation, address=hello.address)

    @property
    def fleet_worker(self) -> FleetWorker:
        return FleetWorker(worker=self.hello.worker, site=self.hello.site, profile=self.hello.profile)


class Membership:
    """Live workers and their leases.

    Args:
        lease_s: silence after which a worker is lost.
        grace_s: the same after its stream broke.
    """

    def __init__(self, *, lease_s: float = 3.0, grace_s: float = 0.5) -> None:
        self.lease_s = lease_s
        self.grace_s = grace_s
        self._entries: dict[WorkerId, Entry] = {}
        # No later than each live lease's end; what is too early is put right when it comes up.
        self._leases: list[tuple[float, WorkerId, Incarnation]] = []
        self._story = Story()

    @property
    def live(self) -> Mapping[WorkerId, Entry]:
        """Every worker that is not lost, leaving ones included."""
        return self._entries

    def handle(self, event: MembershipEvent, *, now: float) -> list[MembershipChange]:
        """Take one event at time `now` (seconds); gives what changed."""
        match event:
            case HelloHeard():
                return self._hello(event.hello, now=now)
            case Heard():
                self._heard(event, now=now)
                return []
            case StreamBroke():
                self._broke(event, now=now)
                return []
            case LeaveHeard():
                return self._leave(event.worker, now=now)
            case Evicted():
                return self._lose([event.worker], event.reason, now=now)
            case LeaseTime():
                return self._expire(now=now)
            case _:
                assert_never(event)

    def deadline(self) -> float | None:
        """When the next lease ends."""
        while self._leases:
            at, worker, incarnation = self._leases[0]
            if not self.is_current(worker, incarnation):
                heappop(self._leases)
            elif self._entries[worker].lease_until > at:
                heapreplace(self._leases, (self._entries[worker].lease_until, worker, incarnation))
            else:
                return at
        return None

    def story(self, worker: WorkerId) -> tuple[str, ...]:
        """The last lines about a worker."""
        return self._story.of(worker)

    def is_current(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Whether this incarnation is the live one."""
        entry = self._entries.get(worker)
        return entry is not None and entry.hello.incarnation == incarnation

    def _hello(self, hello: Hello, *, now: float) -> list[MembershipChange]:
        if hello.protocol_version != PROTOCOL_VERSION:
            reason = (
                f"protocol version {hello.protocol_version}, but this coordinator speaks {PROTOCOL_VERSION}: "
                "install the same release of Skein on both"
            )
            rejected = Rejected(worker=hello.worker, incarnation=hello.incarnation, reason=reason)
            return [rejected]
        if self.is_current(hello.worker, hello.incarnation):
            entry = self._entries[hello.worker]
            entry.is_connected = True
            entry.lease_until = now + self.lease_s
            self._story.tell(hello.worker, "returned on a new stream", now=now)
            return [Returned(worker=hello.worker)]
        changes: list[MembershipChange] = []
        if hello.worker in self._entries:
            changes += self._lose([hello.worker], "another process took its name", now=now)
        self._entries[hello.worker] = Entry(
            hello=hello, lease_until=now + self.lease_s, heard_at=now, progressed_at=now
        )
        heappush(self._leases, (now + self.lease_s, hello.worker, hello.incarnation))
        self._story.tell(hello.worker, f"joined as {hello.incarnation}", now=now)
        return [*changes, Joined(worker=hello.worker)]

    def _heard(self, event: Heard, *, now: float) -> None:
        if not self.is_current(event.worker, event.incarnation):
            return
        entry = self._entries[event.worker]
        entry.heard_at = now
        if entry.is_connected:
            entry.lease_until = now + self.lease_s
        if event.progress is not None and event.progress != entry.progress:
            entry.progress = event.progress
            entry.progressed_at = now

    def _broke(self, event: StreamBroke, *, now: float) -> None:
        if not self.is_current(event.worker, event.incarnation):
            return
        entry = self._entries[event.worker]
        entry.is_connected = False
        entry.lease_until = min(entry.lease_until, now + self.grace_s)
        heappush(self._leases, (entry.lease_until, event.worker, event.incarnation))
        self._story.tell(event.worker, f"stream broke: {event.reason}", now=now)

    def _leave(self, worker: WorkerId, *, now: float) -> list[MembershipChange]:
        entry = self._entries.get(worker)
        if entry is None or entry.is_leaving:
            return []
        entry.is_leaving = True
        self._story.tell(worker, "is leaving", now=now)
        return [IsLeaving(worker=worker)]

    def _expire(self, *, now: float) -> list[MembershipChange]:
        changes: list[MembershipChange] = []
        for worker in sorted(w for w, entry in self._entries.items() if entry.lease_until <= now):
            silent = now - self._entries[worker].heard_at
            how = "lease" if self._entries[worker].is_connected else "stream broke"
            changes += self._lose([worker], f"{how}, silent for {silent:.1f} s", now=now)
        return changes

    def _lose(self, workers: list[WorkerId], reason: str, *, now: float) -> list[MembershipChange]:
        changes: list[MembershipChange] = []
        for worker in workers:
            entry = self._entries.pop(worker, None)
            if entry is not None:
                changes.append(Lost(worker=worker, incarnation=entry.hello.incarnation, reason=reason))
                self._story.tell(worker, f"lost: {reason}", now=now)
        return changes
