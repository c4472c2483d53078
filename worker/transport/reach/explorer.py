"""Links as a worker finds them: which peers it reaches, by which way, how well, and who cannot dial it."""

import asyncio
import logging
from collections.abc import Sequence

from skein.errors import RemoteError
from skein.protocol.messages.directives import Member
from skein.protocol.messages.reports import LinksMeasured
from skein.protocol.messages.ways import Unreached
from skein.protocol.worker.worker_io import Identity
from skein.topology.fleet import Link
from skein.types import Incarnation, WorkerId
from skein.wire.extra import DialBack
from worker.transport.links import Sight
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

    async def explore(self, peers: Sequence[Member]) -> LinksMeasured:
        """Links to these peers, and which of them cannot be reached so or so."""
        # All at once, for what drops packets takes its time; links one by one, for two probes would measure each other.
        dialled = await asyncio.gather(*(self._peers.is_dialled(peer) for peer in peers))
        links: list[Link] = []
        unreached: list[Unreached] = []
        shut_out: list[WorkerId] = []
        for peer, is_dialled in zip(peers, dialled, strict=True):
            via = None
            if is_dialled:
                self._ways.forget(peer.worker)
                self._undialled.pop(peer.incarnation, None)
            else:
                self._remember(peer.incarnation)
                unreached.append(Unreached(peer=peer.worker))
                if (via := self._ways.via(peer.worker)) is None:
                    continue
            try:
                back_to = self._me if is_dialled else None
                found = await self._peers.measure_link(peer, back_to=back_to, via=via)
            except RemoteError as error:
                unreached += [] if is_dialled else [Unreached(peer=peer.worker, via=via)]
                _log.warning("peer=%s could not be probed: %s", peer.worker, error)
            else:
                links += found.links
                shut_out += [peer.worker] if found.is_dialled is False else []
        return LinksMeasured(links=tuple(links), unreached=tuple(unreached), shut_out=tuple(shut_out))

    def _remember(self, undialled: Incarnation) -> None:
        self._undialled[undialled] = None
        if len(self._undialled) > _MAX_UNDIALLED:
            del self._undialled[next(iter(self._undialled))]
