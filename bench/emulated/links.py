"""`python -m bench.emulated.links LINKS RELAYS`: carries every worker's bytes to every other as late as a link would.

For each ordered pair there is one port, at which the sender dials the receiver. What goes back on such a connection
takes the link of the other direction. When all ports listen, RELAYS is written.
"""

import asyncio
import resource
import signal
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from bench.emulated.fleet import RELAY_HOST, Links, Relays, write_whole
from bench.emulated.lines import Lines
from skein.wire.channel import join_address, split_address


class Clock(Protocol):
    """An event loop, as far as halves need one."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], None]) -> object: ...


class Half(asyncio.Protocol):
    """One socket of a relayed connection. What it receives goes to `other`, when it would have arrived there."""

    def __init__(self, lines: Lines, sender: int, receiver: int, *, clock: Clock) -> None:
        self.other: Half | None = None
        self.is_over = False
        self._lines = lines
        self._pair = sender, receiver
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._under_way: deque[tuple[float, bytes]] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self.other is None:
            transport.pause_reading()

    def join(self, other: "Half") -> None:
        """Let bytes go to `other`."""
        self.other = other
        if self._transport is not None:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        now = self._clock.time()
        at = self._lines.arrival_s(*self._pair, len(data), now=now)
        if self._under_way:
            at = max(at, self._under_way[-1][0])  # TCP never reorders
        self._under_way.append((at, data))
        if len(self._under_way) == 1:
            self._clock.call_at(at, self._arrived)

    def _arrived(self) -> None:
        assert self.other is not None
        now = self._clock.time()
        while self._under_way and self._under_way[0][0] <= now:
            self.other.write(self._under_way.popleft()[1])
        if self._under_way:
            self._clock.call_at(self._under_way[0][0], self._arrived)
        elif self.is_over:
            self.other.close()

    def write(self, data: bytes) -> None:
        """Hand on what has arrived; to nobody if the socket is closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Nothing more will come."""
        if self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over = True
        if not self._under_way and self.other is not None:
            self.other.close()


class Relay:
    """Listens for every ordered pair of workers, from `listen` to `close`."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._lines = Lines(links.latency_s, links.bytes_per_s)
        self._opening: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []

    async def listen(self) -> Relays:
        """Open all ports; where they are."""
        addresses = self._links.addresses
        ways: tuple[dict[str, str], ...] = tuple({} for _ in addresses)
        for sender, receiver in ((a, b) for a in range(len(ways)) for b in range(len(ways)) if a != b):
            server = await asyncio.get_running_loop().create_server(
                partial(self._accept, sender, receiver), RELAY_HOST, 0
            )
            self._servers.append(server)
            ways[sender][addresses[receiver]] = join_address(RELAY_HOST, server.sockets[0].getsockname()[1])
        return Relays(ways=ways)

    def close(self) -> None:
        """Listen no more; what is connected stays so."""
        for server in self._servers:
            server.close()

    def _accept(self, sender: int, receiver: int) -> Half:
        loop = asyncio.get_running_loop()
        here = Half(self._lines, sender, receiver, clock=loop)
        opening = loop.create_task(self._open(here, sender, receiver))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        return here

    async def _open(self, here: Half, sender: int, receiver: int) -> None:
        loop = asyncio.get_running_loop()
        there = Half(self._lines, receiver, sender, clock=loop)
        host, port = split_address("addresses", self._links.addresses[receiver])
        try:
            await loop.create_connection(lambda: there, host, port)
        except OSError:
            here.close()
            return
        here.join(there)
        there.join(here)
        if here.is_over:
            there.close()


async def relay(links: Links, out: Path) -> None:
    """Relay until a signal comes; `out` is written when everything listens."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    relays = await Relay(links).listen()
    write_whole(out, relays.model_dump_json())
    await stopped.wait()


def main() -> int:
    """Relay between the workers of the file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (most, most)
    )  # 20 workers are 380 ports and as many connections
    asyncio.run(relay(Links.model_validate_json(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
