"""Links as a worker finds them: which peers it reaches, by which way, how well, and who cannot dial it."""

import asyncio
import logging
from collections.abc import Sequence

from skein.errors import RemoteError
from skein.protocol.messages.directives import Member
from skein.protocol.messages.reports import LinksMeasured
from skein.protocol.messages.ways import Obstacle, Unreached
from skein.protocol.worker.worker_io import Identity
from skein.topology.fleet import Link
from skein.types import Incarnation, WorkerId
from skein.wire.extra import DialBack
from worker.transport.links import FullPacketsVanishError, MeasuredLinks, Sight
from worker.transport.peers import Peers
from worker.transport.reach.ways import WorkerWays

_log = logging.getLogger(__name__)
_MAX_UNDIALLED = 1024


class Explorer:
    """Probes peers for one worker: by dialling them where they answer to that, else by relays that were told."""

    def __init__(self, me: Identity, peers: Peers, ways: WorkerWays) -> None:
        self._me = DialBack(worker=me.worker, incarnation=me.incarnation, address=me.address)
        self._peers = peers
        self._ways = ways
        self._undialled: dict[Incarnation, None] = {}

    async def look_at(self, peer: Member) -> Sight:
        """Whether a peer answers.

        Where it never could be dialled, it is a router or another machine that says nobody is there: no death.
        """
        sight = await self._peers.look_at(peer)
        return Sight.SILENT if sight is Sight.GONE and peer.incarnation in self._undialled else sight

    async def explore(self, peers: Sequence[Member], *, only_direct: bool = False) -> LinksMeasured:
        """Links to these peers, and the ways by which one cannot be reached.

        Args:
            peers: processes to probe.
            only_direct: measure no relay where a peer cannot be dialled.
        """
        # All at once, for what drops packets takes its time; links one by one, for two probes would measure each other.
        obstacles = await asyncio.gather(*(self._obstacle_to(peer) for peer in peers))
        links: list[Link] = []
        unreached: list[Unreached] = []
        shut_out: list[WorkerId] = []
        for peer, obstacle in zip(peers, obstacles, strict=True):
            measured = None
            if obstacle is Obstacle.NO_ANSWER:
                self._remember(peer.incarnation)
            else:
                self._undialled.pop(peer.incarnation, None)
            if obstacle is None and (measured := await self._measured(peer, via=None)) is not None:
                self._ways.forget(peer.worker)
            else:
                unreached.append(Unreached(peer=peer.worker, obstacle=obstacle or Obstacle.NO_ANSWER))
                via = None if only_direct else self._ways.via(peer.worker)
                if via is not None and (measured := await self._measured(peer, via=via)) is None:
                    unreached.append(Unreached(peer=peer.worker, via=via))
            if measured is not None:
                links += measured.links
                shut_out += [peer.worker] if measured.is_dialled is False else []
        return LinksMeasured(links=tuple(links), unreached=tuple(unreached), shut_out=tuple(shut_out))

    async def _obstacle_to(self, peer: Member) -> Obstacle | None:
        """Fault of the direct way to a peer; None if it can be used."""
        try:
            return None if await self._peers.is_dialled(peer) else Obstacle.NO_ANSWER
        except FullPacketsVanishError as error:
            _log.warning("peer=%s full packets vanish: %s", peer.worker, error)
            return Obstacle.FULL_PACKETS_VANISH

    async def _measured(self, peer: Member, *, via: WorkerId | None) -> MeasuredLinks | None:
        """The links to a peer and back by one way; None if bulk does not pass there."""
        try:
            return await self._peers.measure_link(peer, back_to=self._me if via is None else None, via=via)
        except RemoteError as error:
            _log.warning("peer=%s could not be probed: %s", peer.worker, error)
            return None

    def _remember(self, undialled: Incarnation) -> None:
        self._undialled[undialled] = None
        if len(self._undialled) > _MAX_UNDIALLED:
            del self._undialled[next(iter(self._undialled))]
