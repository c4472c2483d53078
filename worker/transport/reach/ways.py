"""Ways of this worker to its peers: by their addresses, or by relays, as the coordinator has told."""

from collections.abc import Callable
from functools import partial

from grpc import aio

from skein.protocol.messages.ways import COORDINATOR_RELAY, RelayPlace, Ways
from skein.types import Incarnation, WorkerId
from skein.wire.calling import Dial
from skein.wire.channel import Lane, join_address, open_channel, open_channel_to
from skein.wire.credentials import Credentials
from skein.wire.identity.names import COORDINATOR, worker_caller
from skein.wire.relay.answering import Listening
from skein.wire.relay.calling import RelayedPeers

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - only compared with


class WorkerWays:
    """Ways of one worker, which serves at `listen` and `port` itself.

    Args:
        coordinator_at: address of the coordinator, at the moment.
        way_to: gives the address to dial for the one that a worker advertises.
    """

    def __init__(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        *,
        listen: str,
        port: int,
        credentials: Credentials,
        coordinator_at: Callable[[], str],
        way_to: Callable[[str], str] = str,
    ) -> None:
        self._me = worker
        self._credentials = credentials
        self._coordinator_at = coordinator_at
        self._way_to = way_to
        host = _EVERYWHERE.get(listen, listen)
        self._own = join_address(host, port)
        self._relayed = RelayedPeers(self._dial_relay)
        self._listening = Listening(worker, incarnation, dial=self._dial_relay, host=host, port=port)

    def take(self, told: Ways) -> None:
        """Use these ways from now on: connections by others end, and are dialled anew."""
        self._relayed.take(told.ways)
        self._listening.take(told.listens)

    def via(self, peer: WorkerId) -> WorkerId | None:
        """Relay by which a peer is reached; None: it is dialled."""
        way = self._relayed.way_to(peer)
        return None if way is None else way.relay.worker

    def trouble(self, peer: WorkerId) -> str:
        """Reason why the relay to a peer does not carry; empty where it does, or where the peer is dialled."""
        return self._relayed.trouble(peer)

    def forget(self, peer: WorkerId) -> None:
        """Dial a peer from now on."""
        self._relayed.forget(peer)

    def dial(self, peer: WorkerId) -> Dial:
        """Opens channels to a peer, by whichever way there is when one is opened."""
        return self._opened(peer, lambda address: self._relayed.target(peer) or self._way_to(address))

    def dial_directly(self, peer: WorkerId) -> Dial:
        """Opens channels to a peer at its address, whether there is another way or not."""
        return self._opened(peer, self._way_to)

    def close(self) -> None:
        """End what goes by relays."""
        self._relayed.close()
        self._listening.close()

    def _opened(self, peer: WorkerId, way_to: Callable[[str], str]) -> Dial:
        return open_channel_to(peer, credentials=self._credentials, way_to=way_to)

    def _dial_relay(self, relay: RelayPlace, lane: Lane) -> aio.Channel:
        """A channel to a relay; who dials this worker is called by way of its own server."""
        dial = partial(open_channel, lane=lane, credentials=self._credentials)
        if relay.worker == COORDINATOR_RELAY:
            return dial(self._coordinator_at(), expected=COORDINATOR)
        target = self._own if relay.worker == self._me else self._way_to(relay.address)
        return dial(target, expected=worker_caller(relay.worker))
