"""Carries every worker's bytes to its peers and to the coordinator, and can be cut between any two of them.

A cut is a black hole: connections stay, nothing arrives, not even that the other side has closed; new connections are
taken and lead nowhere. When it is healed, what was under way arrives, as TCP would send it again.
"""

import asyncio
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from pydantic import BaseModel, ConfigDict

from bench.emulated.fleet import RELAY_HOST
from skein.wire.channel import join_address, split_address

_CHUNK_BYTES = 1 << 18
_START_S = 10.0


class ChaosWorker(BaseModel):
    """All that one worker is told; `ways` are by the address that a peer advertises."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    join: str
    name: str
    port: int
    ways: dict[str, str]


class Wires:
    """One port for each ordered pair (who dials, who is dialled), on a thread of its own, while it is entered.

    Args:
        addresses: by name, host:port. Everybody dials everybody else.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = dict(sorted(addresses.items()))
        self._ways: dict[tuple[str, str], str] = {}
        self._gates: dict[frozenset[str], asyncio.Event] = {}
        self._num_cuts: dict[frozenset[str], int] = {}
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._is_listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wires", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_listening.wait(_START_S), "no port was to be had"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def way(self, sender: str, receiver: str) -> str:
        """host:port at which `sender` dials `receiver`."""
        return self._ways[sender, receiver]

    def ways_of(self, sender: str, *, but: str) -> dict[str, str]:
        """Where `sender` dials each peer other than `but`, by the address that the peer advertises."""
        peers = (name for name in self._addresses if name not in (sender, but))
        return {self._addresses[peer]: self._ways[sender, peer] for peer in peers}

    def cut(self, one: str, other: str) -> None:
        """Let nothing through between the two, either way, until it has been healed as often as it was cut."""
        self._loop.call_soon_threadsafe(self._change, frozenset((one, other)), 1)

    def heal(self, one: str, other: str) -> None:
        """Let everything through again."""
        self._loop.call_soon_threadsafe(self._change, frozenset((one, other)), -1)

    def _change(self, pair: frozenset[str], by: int) -> None:
        self._num_cuts[pair] = self._num_cuts.get(pair, 0) + by
        if self._num_cuts[pair] > 0:
            self._gates[pair].clear()
        else:
            self._gates[pair].set()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._carry())

    async def _carry(self) -> None:
        servers = []
        for sender in self._addresses:
            for receiver in self._addresses:
                if sender != receiver:
                    servers.append(await self._listen(sender, receiver))
        self._is_listening.set()
        await self._stop.wait()
        for server in servers:
            server.close()

    async def _listen(self, sender: str, receiver: str) -> asyncio.Server:
        gate = self._gates.setdefault(frozenset((sender, receiver)), asyncio.Event())
        gate.set()
        host, port = split_address("addresses", self._addresses[receiver])

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # Cancelled when the loop ends, which asyncio's streams would tell as an error.
            with suppress(asyncio.CancelledError):
                await gate.wait()
                try:
                    there_reader, there_writer = await asyncio.open_connection(host, port)
                except OSError:
                    writer.close()
                    return
                await asyncio.gather(_pump(reader, there_writer, gate), _pump(there_reader, writer, gate))

        server = await asyncio.start_server(relay, RELAY_HOST, 0)
        self._ways[sender, receiver] = join_address(RELAY_HOST, server.sockets[0].getsockname()[1])
        return server


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
    """Until either side ends; then the other is told, once the gate is open."""
    with suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            await gate.wait()
            writer.write(data)
            await writer.drain()
    await gate.wait()
    writer.close()
