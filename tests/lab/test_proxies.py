"""Proxies on loopback for real: who dials is known by its process, and its bytes wait as its link says."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from client.lab.network.links import DirectionSpec, LabNetwork
from client.lab.network.proxies import Proxies, dialler
from client.lab.preset import Endpoint
from client.lab.start import BEHIND_PROXY_HOST, PROXY_HOST
from tests.support.wan import make_network

PATIENCE_S = 300.0
QUICK = DirectionSpec(latency_s=0.0, bytes_per_s=1e9)
AGES = DirectionSpec(latency_s=3600.0, bytes_per_s=1e9)


def nobody(_name: str) -> None:
    return None


def this_is(name: str) -> Callable[[str], int | None]:
    """This process is that endpoint."""
    return lambda asked: os.getpid() if asked == name else None


async def _shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        writer.write(line.upper())
    writer.close()


@asynccontextmanager
async def echoing(
    network: LabNetwork, process_of: Callable[[str], int | None]
) -> AsyncIterator[tuple[Proxies, int]]:
    """Proxies in front of e0, where nobody listens, and e1, which answers in capitals at the port that is given."""
    server = await asyncio.start_server(_shout, BEHIND_PROXY_HOST, 0)
    ports = (unused_port(), server.sockets[0].getsockname()[1])
    endpoints = [
        Endpoint(name=name, site="x", address=PROXY_HOST, listen=BEHIND_PROXY_HOST, port=port)
        for name, port in zip(network.names, ports, strict=True)
    ]
    proxies = Proxies(network, endpoints, process_of)
    await proxies.open()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield proxies, ports[1]
    finally:
        await proxies.close()
        server.close()


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind((BEHIND_PROXY_HOST, 0))
        return int(probe.getsockname()[1])


async def ask(port: int, text: bytes, *, host: str = PROXY_HOST) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(text)
    answer = await reader.readline()
    writer.close()
    return answer


async def test_an_endpoint_waits_for_its_link() -> None:
    """A way of 0.1 s there and back, once to open the connection and once to ask."""
    network = make_network(DirectionSpec(latency_s=0.1, bytes_per_s=1e9))
    async with echoing(network, this_is("e0")) as (proxies, port):
        began_s = asyncio.get_running_loop().time()
        assert await ask(port, b"hello\n") == b"HELLO\n"
        assert asyncio.get_running_loop().time() - began_s >= 0.2
        assert proxies.traffic()[0, 1]["bytes"] == proxies.traffic()[1, 0]["bytes"] == 6


async def test_whoever_is_no_endpoint_is_let_through_at_once() -> None:
    async with echoing(make_network(AGES), nobody) as (_, port):
        assert await ask(port, b"hello\n") == b"HELLO\n"


async def test_much_arrives_whole() -> None:
    network = make_network(DirectionSpec(latency_s=0.001, bytes_per_s=1e9, jitter_s=0.002, loss=0.01))
    async with echoing(network, this_is("e0")) as (_, port):
        reader, writer = await asyncio.open_connection(PROXY_HOST, port)
        lines = b"".join(b"%d bottles\n" % i for i in range(100_000))
        writer.write(lines)
        assert await reader.readexactly(len(lines)) == lines.upper()
        writer.close()


async def test_a_cut_holds_connections_and_bytes_until_it_is_healed() -> None:
    network = make_network(QUICK)
    async with echoing(network, this_is("e0")) as (proxies, port):
        reader, writer = await asyncio.open_connection(PROXY_HOST, port)
        writer.write(b"before\n")
        assert await reader.readline() == b"BEFORE\n"
        network.cut((0, 1))
        writer.write(b"held\n")
        asking = asyncio.create_task(ask(port, b"later\n"))
        held = asyncio.create_task(reader.readline())
        for _ in range(20):  # all on one loop: what is let through would be there by then
            await ask(port, b"past the proxy\n", host=BEHIND_PROXY_HOST)
        assert not asking.done()
        assert not held.done()
        network.heal((0, 1))
        proxies.refresh()
        assert await held == b"HELD\n"
        assert await asking == b"LATER\n"
        writer.close()


async def test_where_nobody_listens_the_connection_ends() -> None:
    async with echoing(make_network(QUICK), nobody) as (proxies, _):
        port = proxies.endpoints[0].port
        assert await ask(port, b"") == b""


def test_who_dials_is_found_by_the_ports_of_the_connection() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        assert dialler(client.getsockname()[1], server.getsockname()[1]) == os.getpid()
    assert dialler(1, 1) is None
