"""`python -m bench.emulated.links LINKS RELAYS`: carries every worker's bytes to every other as late as a link would.

For each ordered pair there is one port, at which the sender dials the receiver. What goes back on such a connection
takes the link of the other direction. When all ports listen, RELAYS is written.
"""

import asyncio
import resource
import signal
import sys
from functools import partial
from pathlib import Path

from bench.emulated.fleet import RELAY_HOST, Links, Relays, write_whole
from bench.emulated.lines import Lines
from client.lab.network.halves import Half
from skein.wire.channel import join_address, split_address


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
