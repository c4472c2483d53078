"""Tensors between two processes on loopback: the worker's transport beside a bare gRPC stream of equal parts.

    python -m bench.wire [--json]

In the clear and between certificates, which take turns. Ends with one JSON line; exit code 1 if a goal is missed.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import grpc
from grpc import aio

from bench.report import Row, finish, spread
from skein.plan import plan
from skein.plan.ops import Direction
from skein.protocol.messages.directives import Member
from skein.protocol.messages.tensors import Envelope, HopTensor, Phase
from skein.types import (
    ChunkRef,
    Epoch,
    Generation,
    Incarnation,
    JobId,
    MicrobatchId,
    StageIndex,
    Step,
    WorkerId,
)
from skein.wire.channel import PART_BYTES, Lane, bind, open_channel_to, open_server
from skein.wire.credentials import NO_CREDENTIALS, Credentials, Wallet
from skein.wire.extra import DType, FetchStateRequest
from skein.wire.identity.authority import Authority
from skein.wire.identity.names import worker_caller
from skein.wire.identity.passport import Passport
from skein.wire.v1 import peer_pb2, peer_pb2_grpc
from worker.bundle import Bundle, WireTensor, allocate
from worker.service import PeerService
from worker.transport.framing import SERVICE
from worker.transport.memory import keep_message_buffers
from worker.transport.peers import Peers
from worker.transport.statistics import Statistics

HERE, THERE = WorkerId("here"), WorkerId("there")
LARGE_BYTES, NUM_LARGE = 16 << 20, 32
SMALL_BYTES, NUM_SMALL = 64 << 10, 200
NUM_RUNS = 5
MIN_SHARE = 0.7
"""Of the bytes per second in the clear that certificates leave."""


def tensor(num_bytes: int) -> Bundle:
    data = allocate(num_bytes)
    return (WireTensor(name="x", dtype=DType.UINT8, shape=(num_bytes,), data=data),)


def envelope(sender: WorkerId, microbatch: int, direction: Direction) -> Envelope:
    hops = (ChunkRef(stage=StageIndex(0), worker=HERE), ChunkRef(stage=StageIndex(1), worker=THERE))
    header = HopTensor(
        direction=direction,
        phase=Phase.TRAIN,
        step=Step(0),
        microbatch=MicrobatchId(microbatch),
        hop=1,
        path=plan.Path(hops=hops),
    )
    return Envelope(
        job=JobId("wire"),
        epoch=Epoch(1),
        generation=Generation(1),
        sender=sender,
        incarnation=Incarnation("1"),
        header=header,
    )


class Station:
    """One side: takes tensors into `arrived`, sends with `peers`."""

    def __init__(self, name: WorkerId, group: asyncio.TaskGroup, credentials: Credentials) -> None:
        self.name = name
        self.arrived: asyncio.Queue[tuple[Envelope, Bundle]] = asyncio.Queue()
        statistics = Statistics()
        self.peers = Peers(
            name,
            group=group,
            dial=partial(open_channel_to, credentials=credentials),
            has_checksums=credentials.wallet is None,
            on_failed=self._failed,
            statistics=statistics,
        )
        self.service = PeerService(
            accepts=lambda _: None,
            on_tensor=lambda envelope, bundle: self.arrived.put_nowait((envelope, bundle)),
            state_of=self.no_state,
            statistics=statistics,
        )

    def _failed(self, to: WorkerId, generation: Generation, reason: str) -> None:
        raise RuntimeError(f"{to} did not take generation {generation}: {reason}")

    async def no_state(self, request: FetchStateRequest) -> Mapping[str, WireTensor] | None:
        return None


class Bare:
    """Reads parts and does nothing with them; answers when the sender has said all."""

    async def Deliver(
        self,
        request_iterator: AsyncIterator[peer_pb2.TensorPart],
        context: aio.ServicerContext[object, object],
    ) -> AsyncIterator[peer_pb2.PartReply]:
        num_bytes = 0
        async for part in request_iterator:
            num_bytes += len(part.tensor_data.data)
        yield peer_pb2.PartReply(credit_granted=peer_pb2.CreditGranted(num_bytes=num_bytes))

    def attach(self, server: aio.Server) -> None:
        """Make `server` answer as gRPC's own code would."""
        deliver = grpc.stream_stream_rpc_method_handler(
            self.Deliver,
            request_deserializer=peer_pb2.TensorPart.FromString,
            response_serializer=peer_pb2.PartReply.SerializeToString,
        )
        handlers = grpc.method_handlers_generic_handler(SERVICE, {"Deliver": deliver})
        server.add_generic_rpc_handlers((handlers,))


async def listen(service: PeerService | Bare, credentials: Credentials) -> tuple[aio.Server, int]:
    server = open_server(credentials=credentials)
    service.attach(server)
    port = bind(server, "127.0.0.1", 0, credentials=credentials)
    await server.start()
    return server, port


# --- the other process ---


async def answer(parent_port: int, credentials: Credentials) -> None:
    """Send small tensors back, and an empty bundle for each large one."""
    async with asyncio.TaskGroup() as group:
        station = Station(THERE, group, credentials)
        parent = Member(worker=HERE, incarnation=Incarnation("1"), address=f"127.0.0.1:{parent_port}")
        server, port = await listen(station.service, credentials)
        bare_server, bare_port = await listen(Bare(), credentials)
        print(port, bare_port, flush=True)
        group.create_task(server.wait_for_termination())
        group.create_task(bare_server.wait_for_termination())
        while True:
            arrived, bundle = await station.arrived.get()
            assert isinstance(arrived.header, HopTensor)
            back = envelope(THERE, arrived.header.microbatch, Direction.BACKWARD)
            station.peers.send(parent, back, bundle if len(bundle[0].data) <= SMALL_BYTES else ())


@asynccontextmanager
async def other_process(port: int, identity: Path | None) -> AsyncIterator[tuple[int, int]]:
    given = () if identity is None else ("--identity", str(identity))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.wire", "--answer", str(port), *given), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        first, second = (await process.stdout.readline()).split()
        yield int(first), int(second)
    finally:
        process.kill()
        await process.wait()


# --- measurements ---


async def bare_bytes_per_s(port: int, credentials: Credentials) -> float:
    """Of the same bytes as parts on a bare stream: no checksum, no credit, nothing kept."""
    loop = asyncio.get_running_loop()
    data = bytes(PART_BYTES)
    async with open_channel_to(THERE, credentials=credentials)(f"127.0.0.1:{port}", Lane.FORWARD) as channel:
        await channel.channel_ready()
        began_s = loop.time()
        call = peer_pb2_grpc.PeerStub(channel).Deliver(None)
        for _ in range(NUM_LARGE * LARGE_BYTES // PART_BYTES):
            await call.write(peer_pb2.TensorPart(tensor_data=peer_pb2.TensorData(data=data)))
        await call.done_writing()
        async for _ in call:
            pass
        return NUM_LARGE * LARGE_BYTES / (loop.time() - began_s)


class Exchange:
    """Sends tensors and waits for their answers."""

    def __init__(self, station: Station, to: Member) -> None:
        self._station = station
        self._to = to
        self._count = 0

    async def elapsed_s(self, bundle: Bundle, count: int) -> float:
        """Seconds for `count` tensors at once, until the last answer."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for _ in range(count):
            self._station.peers.send(self._to, envelope(HERE, self._count, Direction.FORWARD), bundle)
            self._count += 1
        for _ in range(count):
            await self._station.arrived.get()
        return loop.time() - began_s


@dataclass(slots=True, kw_only=True)
class Wire:
    """A way between the two processes, and what was measured on it."""

    station: Station
    to: Member
    exchange: Exchange
    credentials: Credentials
    bare_port: int
    ours: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    one_way: list[float] = field(default_factory=list)


@asynccontextmanager
async def wire(identities: Mapping[WorkerId, Path]) -> AsyncIterator[Wire]:
    """Two processes that have spoken; between certificates where there are `identities`."""
    credentials = credentials_of(identities.get(HERE))
    async with asyncio.TaskGroup() as group:
        station = Station(HERE, group, credentials)
        server, port = await listen(station.service, credentials)
        async with other_process(port, identities.get(THERE)) as (there_port, bare_port):
            to = Member(worker=THERE, incarnation=Incarnation("1"), address=f"127.0.0.1:{there_port}")
            exchange = Exchange(station, to)
            await exchange.elapsed_s(tensor(LARGE_BYTES), NUM_LARGE)
            yield Wire(
                station=station, to=to, exchange=exchange, credentials=credentials, bare_port=bare_port
            )
        await station.peers.close()
        await server.stop(None)


def credentials_of(identity: Path | None) -> Credentials:
    return NO_CREDENTIALS if identity is None else Credentials(wallet=Wallet(Passport.load(identity)))


def make_identities(folder: Path) -> dict[WorkerId, Path]:
    """Identities of both processes, made out by an authority of their own."""
    authority = Authority.new(now_s=time.time())
    files = {name: folder / name for name in (HERE, THERE)}
    for name, file in files.items():
        authority.make_out(worker_caller(name), now_s=time.time()).save(file)
    return files


async def measure() -> list[Row]:
    small, large = tensor(SMALL_BYTES), tensor(LARGE_BYTES)
    async with AsyncExitStack() as stack:
        identities = make_identities(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        wires = [await stack.enter_async_context(wire(known)) for known in ({}, identities)]
        for _ in range(NUM_RUNS):
            for one in wires:
                one.bare.append(await bare_bytes_per_s(one.bare_port, one.credentials) / 1e9)
                elapsed_s = await one.exchange.elapsed_s(large, NUM_LARGE)
                one.ours.append(NUM_LARGE * LARGE_BYTES / elapsed_s / 1e9)
        for _ in range(NUM_SMALL):
            for one in wires:
                one.one_way.append(await one.exchange.elapsed_s(small, 1) / 2 * 1e3)
        plain, secure = wires
        there, _ = (await plain.station.peers.measure_link(plain.to)).links
    bare_ms = there.latency_s * 1e3
    shares = [one / other for one, other in zip(secure.ours, plain.ours, strict=True)]
    return [
        Row(
            what="16 MiB tensors, send to arrival",
            value=round(median(plain.ours), 3),
            unit="GB/s",
            against=f"bare gRPC stream, {median(plain.bare):.2f} GB/s",
            ratio=round(median(plain.ours) / median(plain.bare), 3),
            goal=">= 0.8 GB/s",
            holds=median(plain.ours) >= 0.8,
            spread=round(spread(plain.ours), 3),
        ),
        Row(
            what="64 KiB tensor, send to arrival",
            value=round(median(plain.one_way), 3),
            unit="ms",
            against=f"quickest empty message, {bare_ms:.2f} ms",
            ratio=round(median(plain.one_way) / bare_ms, 3),
            goal="< 1.5 ms",
            holds=median(plain.one_way) < 1.5,
            spread=round(spread(plain.one_way), 3),
        ),
        Row(
            what="16 MiB tensors between certificates",
            value=round(median(secure.ours), 3),
            unit="GB/s",
            against=f"in the clear, {median(plain.ours):.2f} GB/s",
            ratio=round(median(shares), 3),
            goal=">= 0.7 of in the clear",
            holds=median(shares) >= MIN_SHARE,
            spread=round(spread(shares), 3),
        ),
        Row(
            what="16 MiB on a bare gRPC stream between certificates",
            value=round(median(secure.bare), 3),
            unit="GB/s",
            against=f"in the clear, {median(plain.bare):.2f} GB/s",
            ratio=round(median(secure.bare) / median(plain.bare), 3),
            goal="none: what TLS alone costs",
            holds=True,
            spread=round(spread(secure.bare), 3),
        ),
        Row(
            what="64 KiB tensor between certificates",
            value=round(median(secure.one_way), 3),
            unit="ms",
            against=f"in the clear, {median(plain.one_way):.2f} ms",
            ratio=round(median(secure.one_way) / median(plain.one_way), 3),
            goal="< 1.5 ms",
            holds=median(secure.one_way) < 1.5,
            spread=round(spread(secure.one_way), 3),
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="skein bench wire", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    parser.add_argument("--answer", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--identity", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    keep_message_buffers()
    if arguments.answer is not None:
        asyncio.run(answer(arguments.answer, credentials_of(arguments.identity)))
        return 0
    rows = asyncio.run(measure())
    if not arguments.json:
        for row in rows:
            print(f"{row.what}: {row.value} {row.unit} ({row.against}; goal {row.goal}, holds: {row.holds})")
    return finish("wire", rows)


if __name__ == "__main__":
    sys.exit(main())
