"""Tensors between two processes on loopback: the worker's transport beside a bare gRPC stream of equal parts.

    python -m bench.wire [--json]

Ends with one JSON line; exit code 1 if a goal is missed.
"""

import argparse
import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
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
from skein.wire.channel import PART_BYTES, Lane, bind, open_channel, open_channel_to, open_server
from skein.wire.credentials import NO_CREDENTIALS
from skein.wire.extra import DType, FetchStateRequest
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

    def __init__(self, name: WorkerId, group: asyncio.TaskGroup) -> None:
        self.name = name
        self.arrived: asyncio.Queue[tuple[Envelope, Bundle]] = asyncio.Queue()
        statistics = Statistics()
        self.peers = Peers(
            name,
            group=group,
            dial=partial(open_channel_to, credentials=NO_CREDENTIALS),
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


async def listen(service: PeerService | Bare) -> tuple[aio.Server, int]:
    server = open_server(credentials=NO_CREDENTIALS)
    service.attach(server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    return server, port


# --- the other process ---


async def answer(parent_port: int) -> None:
    """Send small tensors back, and an empty bundle for each large one."""
    async with asyncio.TaskGroup() as group:
        station = Station(THERE, group)
        parent = Member(worker=HERE, incarnation=Incarnation("1"), address=f"127.0.0.1:{parent_port}")
        server, port = await listen(station.service)
        bare_server, bare_port = await listen(Bare())
        print(port, bare_port, flush=True)
        group.create_task(server.wait_for_termination())
        group.create_task(bare_server.wait_for_termination())
        while True:
            arrived, bundle = await station.arrived.get()
            assert isinstance(arrived.header, HopTensor)
            back = envelope(THERE, arrived.header.microbatch, Direction.BACKWARD)
            station.peers.send(parent, back, bundle if len(bundle[0].data) <= SMALL_BYTES else ())


@asynccontextmanager
async def other_process(port: int) -> AsyncIterator[tuple[int, int]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.wire", "--answer", str(port), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        first, second = (await process.stdout.readline()).split()
        yield int(first), int(second)
    finally:
        process.kill()
        await process.wait()


# --- measurements ---


async def bare_bytes_per_s(port: int) -> float:
    """Of the same bytes as parts on a bare stream: no checksum, no credit, nothing kept."""
    loop = asyncio.get_running_loop()
    data = bytes(PART_BYTES)
    async with open_channel(f"127.0.0.1:{port}", Lane.FORWARD, credentials=NO_CREDENTIALS) as channel:
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


async def measure() -> list[Row]:
    async with asyncio.TaskGroup() as group:
        station = Station(HERE, group)
        server, port = await listen(station.service)
        async with other_process(port) as (there_port, bare_port):
            to = Member(worker=THERE, incarnation=Incarnation("1"), address=f"127.0.0.1:{there_port}")
            exchange = Exchange(station, to)
            small, large = tensor(SMALL_BYTES), tensor(LARGE_BYTES)
            ours, bare = [], []
            await exchange.elapsed_s(large, NUM_LARGE)
            for _ in range(NUM_RUNS):
                bare.append(await bare_bytes_per_s(bare_port) / 1e9)
                ours.append(NUM_LARGE * LARGE_BYTES / await exchange.elapsed_s(large, NUM_LARGE) / 1e9)
            one_way = [await exchange.elapsed_s(small, 1) / 2 * 1e3 for _ in range(NUM_SMALL)]
            there, _ = await station.peers.measure_link(to)
        await station.peers.close()
        await server.stop(None)
    bare_ms = there.latency_s * 1e3
    return [
        Row(
            what="16 MiB tensors, send to arrival",
            value=round(median(ours), 3),
            unit="GB/s",
            against=f"bare gRPC stream, {median(bare):.2f} GB/s",
            ratio=round(median(ours) / median(bare), 3),
            goal=">= 0.8 GB/s",
            holds=median(ours) >= 0.8,
            spread=round(spread(ours), 3),
        ),
        Row(
            what="64 KiB tensor, send to arrival",
            value=round(median(one_way), 3),
            unit="ms",
            against=f"quickest empty message, {bare_ms:.2f} ms",
            ratio=round(median(one_way) / bare_ms, 3),
            goal="< 1.5 ms",
            holds=median(one_way) < 1.5,
            spread=round(spread(one_way), 3),
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="skein bench wire", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    parser.add_argument("--answer", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    keep_message_buffers()
    if arguments.answer is not None:
        asyncio.run(answer(arguments.answer))
        return 0
    rows = asyncio.run(measure())
    if not arguments.json:
        for row in rows:
            print(f"{row.what}: {row.value} {row.unit} ({row.against}; goal {row.goal}, holds: {row.holds})")
    return finish("wire", rows)


if __name__ == "__main__":
    sys.exit(main())
