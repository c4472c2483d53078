"""The Membership machine: who is here. The exemplar of a machine: events and the time go in, changes come out.

Rules of this file
- A worker is an id with an incarnation. Another incarnation of a live id is refused, unless it proves that it is the
  same worker, started again: then the old process died; should it live after all, it is refused from then on, or the
  two would take the name from each other for ever.
- After a coordinator's restart names belong to whom the log knows under them, for as long as a lease.
- Any report renews the lease. A broken stream shortens it to a grace, in which the same incarnation may return.
- A peer's word alone loses nobody: a doubted worker is lost at once if it has been silent here too.
- Leases are counted by what this process has been able to hear: a driver that is busy says how late it hears.
- While this process stood still nobody was heard, and that is nobody's fault: whoever would be lost is given time.
- Who is lost for silence alone and speaks again on the stream that it still has, joins again.
- Who is leaving stays so, however often it is lost and comes back; each time it is told again.
- Only `handle` changes anything, and every change is told.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from heapq import heappop, heappush, heapreplace
from typing import assert_never

from skein import PROTOCOL_VERSION
from skein.protocol.deadline import TimePassed
from skein.protocol.log.records import GenerationMember
from skein.protocol.messages.directives import Member
from skein.protocol.messages.reports import Hello
from skein.topology.fleet import FleetWorker
from skein.types import Incarnation, WorkerId

LEASE_S = 2.5
"""With the beat before a freeze up to a period old, and timers late by some, a frozen process is lost within 3 s."""
GRACE_S = 0.25
"""A live worker dials again within 0.05 s; a dead one is to be lost within 0.5 s. Over a long way a return may be late,
which costs a generation and no work."""
BEATS_PER_LEASE = 5
"""Four lost beats in a row are no death, and the fifth comes in time unless nothing does."""
DOUBT_BEATS = 2.5
"""So many periods of silence bear a peer's doubt out: two beats are missing then."""
_CURE = (
    "give each worker a name of its own; to replace that process, end it first, or start the new one on its host with "
    "its state directory"
)
LARGE_FLEET = 1000
"""Workers whose beats, each half a second, take about a fifth of a processor. A larger fleet beats less often."""
LATE_S = 1.0
"""A lease that is looked at so late was not looked after: this process stood still meanwhile."""

# --- events ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A worker said something on its stream; `progress` comes with beats."""

    worker: WorkerId
    incarnation: Incarnation
    progress: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedHeard:
    """A live worker has measured its device again."""

    worker: WorkerId
    flops_per_s: float
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBroke:
    """A worker's stream ended."""

    worker: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubted:
    """A peer cannot reach this worker."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveHeard:
    """A worker asked to go, or an operator asked for it."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRemembered:
    """An operator asked this process to go, and an earlier coordinator recorded it."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class NameRemembered:
    """A process had this name when the coordinator before this one was lost, and may be alive."""

    member: GenerationMember


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """The coordinator wants no more of this incarnation, now or later."""

    worker: WorkerId
    reason: str


MembershipEvent = (
    Hello
    | Heard
    | SpeedHeard
    | StreamBroke
    | Doubted
    | LeaveHeard
    | LeaveRemembered
    | NameRemembered
    | Evicted
    | TimePassed
)

# --- changes ---


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationJoined:
    """An incarnation is here that was not, or that was lost."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A known incarnation has a new stream: what was said on the old one may be lost."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Refusal of a Hello: nobody is admitted by it."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """An incarnation is dead, or counts as dead; if `is_final`, it will not be admitted again."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str
    silent_s: float
    """Since its last sign of life."""
    is_final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class IsLeaving:
    """A worker is to be given no more work."""

    worker: WorkerId


LEFT = "left when asked"
"""Reason for the loss of a worker that was to go and went."""

MembershipChange = IncarnationJoined | Returned | Rejected | Lost | IsLeaving


@dataclass(slots=True, kw_only=True)
class Entry:
    """State of one live worker, as known here."""

    hello: Hello
    lease_until: float
    queued_at: float = 0.0
    """The one time in the lease heap that counts: no later than `lease_until`."""
    is_connected: bool = True
    is_leaving: bool = False
    is_called_away: bool = False
    """Whether another run is to get the worker once its own can do without it."""
    progress: int = 0
    heard_at: float = 0.0
    progressed_at: float = 0.0
    measured_at: float = 0.0
    """Time when the worker's speed was last measured, as far as is known here."""

    def call_away(self) -> None:
        """Another run is to get the worker."""
        self.is_called_away = True

    def stay(self) -> None:
        """The worker stays with whom it is."""
        self.is_called_away = False

    @property
    def is_going(self) -> bool:
        """Whether its run is to give it no more work."""
        return self.is_leaving or self.is_called_away

    @property
    def holder(self) -> GenerationMember:
        """Process that has the name, as the log knows it."""
        worker, incarnation = self.process
        return GenerationMember(
            worker=worker, incarnation=incarnation, proof=proof_of(self.hello), address=self.hello.address
        )

    @property
    def process(self) -> tuple[WorkerId, Incarnation]:
        """Process that the control stream leads to."""
        return self.hello.worker, self.hello.incarnation

    @property
    def member(self) -> Member:
        worker, incarnation = self.process
        return Member(worker=worker, incarnation=incarnation, address=self.hello.address)

    @property
    def fleet_worker(self) -> FleetWorker:
        return FleetWorker(worker=self.hello.worker, site=self.hello.site, profile=self.hello.profile)


def proof_of(hello: Hello) -> str:
    """Digest that is kept of the secret of a process; "" of none."""
    return sha256(hello.secret.encode()).hexdigest() if hello.secret else ""


class Membership:
    """Live workers and their leases.

    Args:
        lease_s: silence after which a worker is lost, in a fleet of up to `LARGE_FLEET`.
        grace_s: the same after its stream broke.
    """

    def __init__(self, *, lease_s: float = LEASE_S, grace_s: float = GRACE_S) -> None:
        self._least_lease_s = lease_s
        self.grace_s = grace_s
        self._entries: dict[WorkerId, Entry] = {}
        # One entry per live lease counts, no later than its end; what is too early is put right when it comes up.
        self._leases: list[tuple[float, WorkerId, Incarnation]] = []
        self._silent: dict[WorkerId, Entry] = {}
        self._refused: dict[Incarnation, str] = {}
        self._leaving: set[Incarnation] = set()
        self._lag_s = 0.0
        """Seconds by which this process hears late: a lease is over once nothing that renews it can be unread."""
        self._remembered: dict[WorkerId, tuple[GenerationMember, float]] = {}
        """Process that had each name, and until when nobody else gets it."""

    @property
    def live(self) -> Mapping[WorkerId, Entry]:
        """Every worker that is not lost, leaving ones included."""
        return self._entries

    @property
    def num_remembered(self) -> int:
        """Workers that the run log knows, and that have not joined this coordinator yet."""
        return len(self._remembered)

    @property
    def lease_s(self) -> float:
        """Silence after which a worker is lost; longer in a fleet above `LARGE_FLEET` workers, in proportion."""
        return self._least_lease_s * max(1.0, len(self._entries) / LARGE_FLEET)

    @property
    def beat_s(self) -> float:
        """Seconds from one beat of a worker to the next."""
        return self.lease_s / BEATS_PER_LEASE

    def handle(self, event: MembershipEvent, *, now: float) -> list[MembershipChange]:
        """Take one event at time `now` (seconds); gives what changed."""
        match event:
            case Hello():
                return self._hello(event, now=now)
            case Heard():
                return self._heard(event, now=now)
            case SpeedHeard():
                self._speed(event, now=now)
                return []
            case StreamBroke():
                self._broke(event, now=now)
                return []
            case Doubted():
                return self._doubt(event, now=now)
            case LeaveHeard():
                return self._leave(event.worker)
            case LeaveRemembered():
                self._leaving.add(event.incarnation)
                return []
            case NameRemembered():
                # Who has shown no proof could not show it now, were it the same worker.
                if event.member.proof:
                    self._remembered[event.member.worker] = event.member, now + self.lease_s
                return []
            case Evicted():
                return self._refuse(event.worker, event.reason, now=now)
            case TimePassed():
                self._lag_s = 0.0 if event.heard_until is None else max(0.0, now - event.heard_until)
                return self._expire(now=now)
            case _:
                assert_never(event)

    def deadline(self) -> float | None:
        """Time when the next lease ends, by what will have been heard then; None if no worker has one."""
        at = self._next_lease()
        return None if at is None else at + self._lag_s

    def _next_lease(self) -> float | None:
        while self._leases:
            at, worker, incarnation = self._leases[0]
            entry = self._entries.get(worker)
            if entry is None or entry.hello.incarnation != incarnation or entry.queued_at != at:
                heappop(self._leases)
            elif entry.lease_until > at:
                entry.queued_at = entry.lease_until
                heapreplace(self._leases, (entry.lease_until, worker, incarnation))
            else:
                return at
        return None

    def is_current(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Whether this incarnation is the live one."""
        entry = self._entries.get(worker)
        return entry is not None and entry.hello.incarnation == incarnation

    def is_refused(self, incarnation: Incarnation) -> bool:
        """Whether this process was turned away for good."""
        return incarnation in self._refused

    def is_from_holder(self, hello: Hello) -> bool:
        """Whether this is said by the live process of its name, and not by one that only knows its incarnation."""
        entry = self._entries.get(hello.worker)
        said = hello.incarnation, proof_of(hello)
        return entry is not None and (entry.holder.incarnation, entry.holder.proof) == said

    def _hello(self, hello: Hello, *, now: float) -> list[MembershipChange]:
        reason = self._objection(hello, now=now)
        if reason is not None:
            return [Rejected(worker=hello.worker, incarnation=hello.incarnation, reason=reason)]
        self._remembered.pop(hello.worker, None)
        if self.is_current(hello.worker, hello.incarnation):
            entry = self._entries[hello.worker]
            entry.is_connected = True
            entry.heard_at = now
            entry.lease_until = now + self.lease_s
            return [Returned(worker=hello.worker), *self._still_leaving(entry)]
        changes = self._displace(hello, now=now)
        return changes + self._join(Entry(hello=hello, lease_until=now, progressed_at=now), now=now)

    def _objection(self, hello: Hello, *, now: float) -> str | None:
        """Reason for which this process is not admitted; None if it is."""
        if hello.protocol_version != PROTOCOL_VERSION:
            return (
                f"protocol version {hello.protocol_version}, but this coordinator speaks {PROTOCOL_VERSION}: "
                "install the same release of Skein on both"
            )
        reason = self._refused.get(hello.incarnation)
        return self._taken(hello, now=now) if reason is None else reason

    def _taken(self, hello: Hello, *, now: float) -> str | None:
        """Reason to refuse this process its name: another one has it, and this one proves no succession."""
        entry = self._entries.get(hello.worker)
        remembered, until = self._remembered.get(hello.worker, (None, now))
        if entry is not None:
            holder = entry.holder
            host, heard_s = entry.hello.host or "a nameless host", now - entry.heard_at
            who = f"a living process on {host}, at {entry.hello.address}, heard {heard_s:.1f} s ago"
        elif remembered is not None and now < until:
            holder, who = remembered, "a process that may live and come back within seconds"
        else:
            return None
        proof = proof_of(hello)
        if proof == holder.proof and (proof or hello.incarnation == holder.incarnation):
            return None
        return f"the name {hello.worker} is that of {who}: {_CURE}"

    def _displace(self, hello: Hello, *, now: float) -> list[MembershipChange]:
        """Refuse another process of this name, live or silent."""
        reason = f"another process took the name {hello.worker}: give each worker its own"
        changes = self._refuse(hello.worker, reason, now=now)
        silent = self._silent.pop(hello.worker, None)
        if silent is not None and silent.hello.incarnation != hello.incarnation:
            incarnation = silent.hello.incarnation
            self._refused[incarnation] = reason
            changes.append(Rejected(worker=hello.worker, incarnation=incarnation, reason=reason))
        return changes

    def _still_leaving(self, entry: Entry) -> list[MembershipChange]:
        return [IsLeaving(worker=entry.hello.worker)] if entry.is_leaving else []

    def _join(self, entry: Entry, *, now: float) -> list[MembershipChange]:
        worker, incarnation = entry.hello.worker, entry.hello.incarnation
        entry.is_leaving = incarnation in self._leaving
        entry.heard_at = entry.measured_at = now
        entry.lease_until = now + self.lease_s
        self._entries[worker] = entry
        self._queue_lease(entry)
        return [IncarnationJoined(worker=worker), *self._still_leaving(entry)]

    def _queue_lease(self, entry: Entry) -> None:
        entry.queued_at = entry.lease_until
        heappush(self._leases, (entry.lease_until, entry.hello.worker, entry.hello.incarnation))

    def _heard(self, event: Heard, *, now: float) -> list[MembershipChange]:
        changes: list[MembershipChange] = []
        silent = self._silent.get(event.worker)
        if silent is not None and silent.hello.incarnation == event.incarnation:
            changes += self._join(self._silent.pop(event.worker), now=now)
        if self.is_current(event.worker, event.incarnation):
            entry = self._entries[event.worker]
            entry.heard_at = now
            if entry.is_connected:
                entry.lease_until = now + self.lease_s
            if event.progress is not None and event.progress != entry.progress:
                entry.progress = event.progress
                entry.progressed_at = now
        return changes

    def _speed(self, event: SpeedHeard, *, now: float) -> None:
        entry = self._entries[event.worker]
        profile = replace(entry.hello.profile, flops_per_s=event.flops_per_s, spread=event.spread)
        entry.hello = replace(entry.hello, profile=profile)
        entry.measured_at = now

    def _broke(self, event: StreamBroke, *, now: float) -> None:
        silent = self._silent.get(event.worker)
        if silent is not None and silent.hello.incarnation == event.incarnation:
            del self._silent[event.worker]
        if not self.is_current(event.worker, event.incarnation):
            return
        entry = self._entries[event.worker]
        entry.is_connected = False
        entry.lease_until = min(entry.lease_until, now + self.grace_s)
        if entry.lease_until < entry.queued_at:
            self._queue_lease(entry)

    def _leave(self, worker: WorkerId) -> list[MembershipChange]:
        entry = self._entries.get(worker)
        if entry is None or entry.is_leaving:
            return []
        entry.is_leaving = True
        self._leaving.add(entry.hello.incarnation)
        return [IsLeaving(worker=worker)]

    def _expire(self, *, now: float) -> list[MembershipChange]:
        changes: list[MembershipChange] = []
        due = self.deadline()
        if due is None or due > now:
            return changes
        if now - due > LATE_S:
            self._forgive(now=now)
            return changes
        heard_until = now - self._lag_s
        for worker in sorted(w for w, entry in self._entries.items() if entry.lease_until <= heard_until):
            entry = self._entries[worker]
            how = "lease" if entry.is_connected else "stream broke"
            reason = f"{how}, silent for {now - entry.heard_at:.1f} s"
            if entry.is_leaving and not entry.is_connected:
                reason = LEFT
            changes += self._lose_silent(entry, reason, now=now)
        return changes

    def _forgive(self, *, now: float) -> None:
        """Let everybody be heard first: what they said meanwhile is still to be read."""
        for entry in self._entries.values():
            if entry.lease_until <= now:
                entry.lease_until = now + (DOUBT_BEATS * self.beat_s if entry.is_connected else self.grace_s)

    def _doubt(self, event: Doubted, *, now: float) -> list[MembershipChange]:
        entry = self._entries.get(event.worker)
        if entry is None:
            return []
        silent_s = now - entry.heard_at
        if entry.is_connected and silent_s - self._lag_s < DOUBT_BEATS * self.beat_s:
            return []
        return self._lose_silent(entry, f"{event.reason}, silent here for {silent_s:.1f} s", now=now)

    def _lose_silent(self, entry: Entry, reason: str, *, now: float) -> list[MembershipChange]:
        """Lose a worker that may speak again."""
        changes = self._lose(entry.hello.worker, reason, now=now)
        if entry.is_connected:
            self._silent[entry.hello.worker] = entry
        return changes

    def _refuse(self, worker: WorkerId, reason: str, *, now: float) -> list[MembershipChange]:
        """Lose a worker for good."""
        entry = self._entries.get(worker)
        if entry is not None:
            self._refused[entry.hello.incarnation] = reason
        return self._lose(worker, reason, now=now)

    def _lose(self, worker: WorkerId, reason: str, *, now: float) -> list[MembershipChange]:
        entry = self._entries.pop(worker, None)
        if entry is None:
            return []
        incarnation = entry.hello.incarnation
        is_final = incarnation in self._refused
        silent_s = now - entry.heard_at
        return [
            Lost(worker=worker, incarnation=incarnation, reason=reason, silent_s=silent_s, is_final=is_final)
        ]
