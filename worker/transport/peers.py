"""The sending half of a worker's data plane."""

import asyncio
from collections.abc import Callable, Collection, Iterable

from skein.errors import RemoteError
from skein.plan.ops import Direction
from skein.protocol.messages.directives import Member
from skein.protocol.messages.tensors import Envelope, HopTensor, TensorHeader
from skein.types import Generation, JobId, StageIndex, Step, WorkerId
from skein.wire.calling import DialPeer
from skein.wire.channel import Lane
from skein.wire.extra import DialBack, FetchStateRequest, StateKind
from worker.bundle import Bundle, Limits, WireTensor
from worker.transport.fetching.fetch import AbsentError, Fetcher
from worker.transport.links import MeasuredLinks, Sight, is_usable, look_at, measure_link
from worker.transport.outbox import LaneOutbox, OnFailed, OnTaken, ignore_taken
from worker.transport.pace import PeerPace, PeerPatience
from worker.transport.statistics import Statistics
from worker.transport.watch import Watch

LOOK_S = 2.0
"""Seconds within which a peer answers, unless it stands still or nothing passes."""
LANES = (Lane.FORWARD, Lane.BACKWARD, Lane.REDUCE)


def lane_of(header: TensorHeader) -> Lane:
    """Lane that a tensor takes: neither activations, gradients nor shards wait for one another."""
    if isinstance(header, HopTensor):
        return Lane.FORWARD if header.direction is Direction.FORWARD else Lane.BACKWARD
    return Lane.REDUCE


class Peers:
    """Sends tensors to peers, and asks them for theirs.

    Senders run in `group`, so that a failure of our own ends the group's owner instead of passing unnoticed.

    Args:
        me: this worker.
        group: entered before the first `send` and left after `close`.
        dial: opens channels to a peer, `skein.wire.channel.open_channel_to` with credentials, for instance.
        dial_directly: the same at the peer's address, where `dial` may go another way.
        relay_trouble: gives the reason why a peer's relay does not carry, empty if it does: added to failures.
        on_failed: told when a peer did not take what was sent to it.
        on_taken: told of each tensor that a peer has accepted, and how long that took.
        has_checksums: whether parts of tensors carry one; between certificates TLS refuses what was changed on its way,
            and peers look at none.
        fetch_patience_s: raise this if a donor's longest op, during which it copies no state, takes longer.
    """

    def __init__(
        self,
        me: WorkerId,
        *,
        group: asyncio.TaskGroup,
        dial: DialPeer,
        dial_directly: DialPeer | None = None,
        relay_trouble: Callable[[WorkerId], str] = lambda _: "",
        on_failed: OnFailed,
        on_taken: OnTaken = ignore_taken,
        statistics: Statistics,
        limits: Limits | None = None,
        patience: PeerPatience | None = None,
        has_checksums: bool = True,
        fetch_patience_s: float = 60.0,
    ) -> None:
        self._me = me
        self._group = group
        self._dial = dial
        self._dial_directly = dial_directly or dial
        self._relay_trouble = relay_trouble
        self._on_failed = on_failed
        self._on_taken = on_taken
        self._statistics = statistics
        self._patience = patience or PeerPatience()
        self._has_checksums = has_checksums
        self._fetcher = Fetcher(
            dial=dial, limits=limits or Limits(), statistics=statistics, patience_s=fetch_patience_s
        )
        self._outboxes: dict[tuple[WorkerId, Lane], tuple[LaneOutbox, asyncio.Task[None]]] = {}
        self._watches: dict[WorkerId, tuple[Member, asyncio.Task[None]]] = {}
        self._paces: dict[WorkerId, tuple[Member, PeerPace]] = {}
        self._generation = Generation(0)

    def send(self, to: Member, envelope: Envelope, bundle: Bundle) -> None:
        """Send `bundle`, whose bytes do not change from now on. Returns at once; failure is told to `on_failed`."""
        self._generation = max(self._generation, envelope.generation)
        self._outbox(to, lane_of(envelope.header)).put(envelope, bundle)

    def forget(self, generation: Generation, *, members: Collection[WorkerId] | None = None) -> None:
        """Send nothing more of generations older than `generation`; hang up on peers outside `members`, if given."""
        left = [key for key in self._outboxes if members is not None and key[0] not in members]
        for key in left:
            _, sending = self._outboxes.pop(key)
            sending.cancel()
        for peer in {peer for peer, _ in left}:
            self._watches.pop(peer)[1].cancel()
        self._generation = max(self._generation, generation)
        for outbox, _ in self._outboxes.values():
            outbox.forget(generation)

    async def close(self) -> None:
        """Stop sending; what is not accepted by now is dropped."""
        ending = [
            *(sending for _, sending in self._outboxes.values()),
            *(watching for _, watching in self._watches.values()),
        ]
        self._outboxes.clear()
        self._watches.clear()
        for sending in ending:
            sending.cancel()
        # What one of them may have died of is the group's to raise.
        await asyncio.gather(*ending, return_exceptions=True)

    def queue_depths(self) -> dict[Lane, int]:
        """Tensors that peers have not accepted yet, by lane."""
        depths = dict.fromkeys(LANES, 0)
        for (_, lane), (outbox, _) in self._outboxes.items():
            depths[lane] += outbox.depth
        return depths

    async def fetch_state(
        self,
        member: Member,
        job: JobId,
        stage: StageIndex,
        version: Step,
        names: Iterable[str] | None = None,
    ) -> dict[str, WireTensor]:
        """A chunk's state at `version` by tensor name, from a holder; only `names`, if given. All hashes are checked.

        Raises:
            AbsentError: the peer does not have it, or not yet.
            RemoteError: the peer cannot be reached, or sends something else.
        """
        wanted = None if names is None else tuple(sorted(names))
        if wanted == ():
            return {}
        request = FetchStateRequest(
            job=job,
            stage=stage,
            version=version,
            names=wanted or (),
            kind=StateKind.STATE,
            door=member.door,
        )
        return await self._fetch(member, request)

    async def fetch_result(
        self, member: Member, job: JobId, stage: StageIndex, step: Step
    ) -> dict[str, WireTensor]:
        """Result that `step` applied to a stage, by group, from a holder that keeps it. All hashes are checked.

        Raises:
            AbsentError: the peer does not have it, or not yet.
            RemoteError: the peer cannot be reached, or sends something else.
        """
        request = FetchStateRequest(
            job=job, stage=stage, version=step, names=(), kind=StateKind.RESULT, door=member.door
        )
        return await self._fetch(member, request)

    async def _fetch(self, member: Member, request: FetchStateRequest) -> dict[str, WireTensor]:
        try:
            return await self._fetcher.state(member, request)
        except AbsentError:
            raise
        except RemoteError as error:
            raise RemoteError(self._explained(member.worker, str(error))) from error

    def _failed(self, peer: WorkerId, generation: Generation, reason: str) -> None:
        self._on_failed(peer, generation, self._explained(peer, reason))

    def _explained(self, peer: WorkerId, reason: str) -> str:
        """Reason of a failure, or that of the peer's relay where it refused: the channel saw no more than a close."""
        return self._relay_trouble(peer) or reason

    async def measure_link(
        self, member: Member, *, back_to: DialBack | None = None, via: WorkerId | None = None
    ) -> MeasuredLinks:
        """The links to `member` and from it; they also tell how long to wait for its first answers.

        Args:
            back_to: this process, for the peer to dial; None: it does not.
            via: the relay of the way there; None: the peer is dialled.

        Raises:
            RemoteError: the peer cannot be reached.
        """
        dial = self._dial_directly if via is None else self._dial
        found = await measure_link(
            self._me,
            member,
            dial=dial(member.worker),
            patience_s=self._patience.most_s,
            back_to=back_to,
            via=via,
        )
        there, _ = found.links
        now = asyncio.get_running_loop().time()
        self._pace(member).probed(2 * there.latency_s, there.bytes_per_s, now=now)
        return found

    async def look_at(self, member: Member) -> Sight:
        """Whether `member` answers, by the way that there is."""
        return await look_at(member, dial=self._dial(member.worker), patience_s=LOOK_S)

    async def is_dialled(self, member: Member) -> bool:
        """Whether `member` answers at its address, and full packets pass.

        Raises:
            FullPacketsVanishError: it answers small messages only.
        """
        return await is_usable(member, dial=self._dial_directly(member.worker), patience_s=LOOK_S)

    def _pace(self, member: Member) -> PeerPace:
        """Pace of a peer's process; another process that has taken its name begins anew."""
        known = self._paces.get(member.worker)
        if known is None or known[0] != member:
            known = self._paces[member.worker] = member, PeerPace()
        return known[1]

    def _watch(self, member: Member) -> None:
        """Watch a peer that is sent to, at its present address."""
        before = self._watches.get(member.worker)
        if before is not None:
            if before[0] == member:
                return
            before[1].cancel()
        watch = Watch(
            member,
            dial=self._dial(member.worker),
            patience=self._patience,
            pace=self._pace(member),
            on_silent=lambda reason: self._failed(member.worker, self._generation, reason),
        )
        self._watches[member.worker] = member, self._group.create_task(watch.run())

    def _outbox(self, to: Member, lane: Lane) -> LaneOutbox:
        known = self._outboxes.get((to.worker, lane))
        if known is not None:
            outbox, sending = known
            if outbox.to == to:
                return outbox
            sending.cancel()
        self._watch(to)
        outbox = LaneOutbox(
            to,
            lane,
            dial=self._dial(to.worker),
            patience=self._patience,
            pace=self._pace(to),
            statistics=self._statistics,
            on_failed=self._failed,
            on_taken=self._on_taken,
            has_checksums=self._has_checksums,
        )
        self._outboxes[to.worker, lane] = (outbox, self._group.create_task(outbox.run()))
        return outbox
