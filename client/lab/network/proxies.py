"""The emulated WAN where network namespaces are not permitted: a TCP proxy in front of each endpoint, on loopback.

Rules of this file
- Who dials a proxy is known by which process holds the other end of the connection; whoever is no endpoint (a user's
  command) is let through at once.
- A proxy sees streams, no packets. What is lost comes a round trip later instead, and in a cut direction bytes and
  ends of connections wait until it is healed, as TCP's own repetitions would make them. Unlike on a real network a cut
  in one direction does not stop the other one, which would miss its acknowledgements sooner or later.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from weakref import WeakSet

import psutil

from client.lab.network.halves import Half
from client.lab.network.links import LabNetwork, TimeSpan
from client.lab.preset import Endpoint

_WINDOW_BYTES = 8 << 20
"""About what Linux lets a connection have under way."""
_OUTSIDE = -1


class StreamTimes:
    """Arrival times of bytes of streams; see `client.lab.network.halves.ArrivalTiming`."""

    def __init__(self, network: LabNetwork) -> None:
        self.bytes_by_pair: dict[tuple[int, int], int] = {}
        self._network = network

    def arrival_s(self, sender: int, receiver: int, num_bytes: int, *, now: float) -> float:
        """Infinity while the direction is cut; `now` from and to outside, and within an endpoint."""
        line = self._network.lines.get((sender, receiver))
        if line is None:
            return now
        if line.is_cut:
            return inf
        pair = sender, receiver
        self.bytes_by_pair[pair] = self.bytes_by_pair.get(pair, 0) + num_bytes
        sent = self._network.ups[sender].carry(TimeSpan(now, now), num_bytes)
        passed = line.send_reliably(sent, num_bytes)
        return self._network.downs[receiver].carry(passed, num_bytes).last_s


class Proxies:
    """Carries connections between endpoints, from `open` to `close`.

    Args:
        network: may change at any time; call `refresh` afterwards.
        endpoints: each is dialled at `address` and listens at `listen`.
        process_of: an endpoint's process id by its name, None while it has none.
    """

    def __init__(
        self, network: LabNetwork, endpoints: Sequence[Endpoint], process_of: Callable[[str], int | None]
    ) -> None:
        self._network = network
        self.endpoints = tuple(endpoints)
        self._process_of = process_of
        self._times = StreamTimes(network)
        self._loop = asyncio.get_running_loop()
        self._servers: list[asyncio.Server] = []
        self._halves: WeakSet[Half] = WeakSet()
        self._opening: set[asyncio.Task[None]] = set()
        self._healed = asyncio.Event()

    async def open(self) -> None:
        """Listen in front of every endpoint."""
        for receiver, endpoint in enumerate(self.endpoints):
            server = await self._loop.create_server(
                partial(self._accept, receiver), endpoint.address, endpoint.port
            )
            self._servers.append(server)

    def refresh(self) -> None:
        """Take note that links have changed: what waited may go on."""
        for half in list(self._halves):
            half.resume()
        self._healed.set()
        self._healed = asyncio.Event()

    async def close(self) -> None:
        """Give everything up; what is under way is lost."""
        for opening in list(self._opening):
            opening.cancel()
        for server in self._servers:
            server.close()
        for half in list(self._halves):
            half.close()

    def traffic(self) -> Mapping[tuple[int, int], Mapping[str, int]]:
        """Bytes so far, by (sender, receiver)."""
        return {pair: {"bytes": count} for pair, count in sorted(self._times.bytes_by_pair.items())}

    def _accept(self, receiver: int) -> "_Door":
        return _Door(partial(self._begin, receiver))

    def _begin(self, receiver: int, door: "_Door", transport: asyncio.Transport) -> None:
        opening = self._loop.create_task(self._connect(receiver, door, transport))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _connect(self, receiver: int, door: "_Door", transport: asyncio.Transport) -> None:
        port = transport.get_extra_info("peername")[1]
        sender = await asyncio.to_thread(self._sender, port, self.endpoints[receiver].port)
        await self._travel(sender, receiver)
        here = self._half(sender, receiver)
        there = self._half(receiver, sender)
        endpoint = self.endpoints[receiver]
        try:
            await self._loop.create_connection(lambda: there, endpoint.listen, endpoint.port)
        except OSError:
            await self._travel(receiver, sender)
            transport.close()
            return
        if door.is_over:
            there.close()
            return
        transport.set_protocol(here)
        here.connection_made(transport)
        here.join(there)
        there.join(here)

    async def _travel(self, sender: int, receiver: int) -> None:
        """Wait as long as the first packet of a connection is under way."""
        while (at := self._times.arrival_s(sender, receiver, 0, now=self._loop.time())) == inf:
            await self._healed.wait()
        await asyncio.sleep(at - self._loop.time())

    def _half(self, sender: int, receiver: int) -> Half:
        half = Half(self._times, sender, receiver, clock=self._loop, window_bytes=_WINDOW_BYTES)
        self._halves.add(half)
        return half

    def _sender(self, port: int, dialled_port: int) -> int:
        process = dialler(port, dialled_port)
        processes = [self._process_of(endpoint.name) for endpoint in self.endpoints]
        return _OUTSIDE if process is None or process not in processes else processes.index(process)


class _Door(asyncio.Protocol):
    """Holds an accepted connection, unread, until it is known where it goes."""

    def __init__(self, begin: "Callable[[_Door, asyncio.Transport], None]") -> None:
        self.is_over = False
        self._begin = begin

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        self._begin(self, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over = True


def dialler(port: int, dialled_port: int) -> int | None:
    """The process of this machine whose TCP socket is bound to `port` and connected to `dialled_port`."""
    for found in psutil.net_connections("tcp"):
        if found.laddr and found.raddr and (found.laddr.port, found.raddr.port) == (port, dialled_port):
            return found.pid
    return None
