"""A vector summed over all: the worker's own transport beside torch.distributed's gloo, in the same processes.

Four processes on this machine, 64 MiB of float32. Each holds both: our exchange machine with the transport as the
daemon uses it (gRPC streams over loopback, checksums, credit, memory bounds, a torch thread beside the event loop), and
a gloo process group. They take turns, so that what else the machine does falls on both. Time is from the first process
to begin to the last that has the whole sum, one clock for all.

Ours ends with the joined vector; the hash and the norm that a vote carries besides are not in it, as gloo has none.
"""

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median

import torch
from torch import Tensor, distributed

from bench.report import Row, spread
from skein.errors import UserError
from skein.numeric.gradients import shard_bounds, sum_in_order
from skein.plan.agreeing.exchange import DIRECT, Pattern, Ring
from skein.plan.plan import Group
from skein.protocol.messages.directives import Member
from skein.protocol.messages.tensors import Envelope, ShardTensor
from skein.protocol.worker.keeping.desk import Desk
from skein.protocol.worker.ops import JoinOp, PackOp, ReductionOp, SumOp, TensorKey
from skein.protocol.worker.reduction import Exchange, Moves, handed_out
from skein.types import (
    Attempt,
    ChunkRef,
    Epoch,
    Generation,
    Incarnation,
    JobId,
    Own,
    StageIndex,
    Step,
    WorkerId,
)
from skein.wire.channel import bind, open_channel_to, open_server
from skein.wire.credentials import NO_CREDENTIALS
from skein.wire.extra import FetchStateRequest
from worker.boundary import BoundaryLog
from worker.bundle import Bundle, WireTensor
from worker.compute.payload import Payload, concatenated, pack, unpack, weight_bytes
from worker.service import PeerService
from worker.transport.memory import keep_message_buffers
from worker.transport.peers import Peers
from worker.transport.statistics import Statistics

NUM_PROCESSES = 4
NUM_BYTES = 64 << 20
NUM_ROUNDS = 9
PATTERNS: Mapping[str, Pattern] = {"direct": DIRECT, "ring": Ring()}
GOAL = 0.5

_CPU = torch.device("cpu")
_GENERATION = Generation(1)
_ATTEMPT = Attempt(epoch=Epoch(1), generation=_GENERATION, number=0)
_SHARD = "shard"
_MARK = ">"


def rows(*, is_quick: bool) -> list[Row]:
    """Throughput of each pattern beside gloo's."""
    num_rounds = 2 if is_quick else NUM_ROUNDS
    seconds = asyncio.run(_measured(num_rounds))
    gloo_s = seconds["gloo"]
    found = []
    for name in PATTERNS:
        ours = [NUM_BYTES / s / 1e9 for s in seconds[name]]
        theirs = NUM_BYTES / median(gloo_s) / 1e9
        ratio = median(ours) / theirs
        found.append(
            Row(
                what=f"all-reduce, {NUM_PROCESSES} processes, {NUM_BYTES >> 20} MiB fp32, {name}",
                value=round(median(ours), 4),
                unit="GB/s",
                against=f"gloo, {theirs:.3f} GB/s (spread {spread(gloo_s):.2f})",
                ratio=round(ratio, 3),
                goal=f">= {GOAL} of gloo" if name == "direct" else "told only",
                holds=ratio >= GOAL or name != "direct",
                spread=round(spread(ours), 3),
            )
        )
    return found


# --- one process ---


class Station:
    """One member: its transport, its payloads, and a thread that computes."""

    def __init__(self, place: int, tasks: asyncio.TaskGroup) -> None:
        self.name = worker_at(place)
        self._store = Desk[Payload](self.name, BoundaryLog(), weigh=weight_bytes, release=())
        self._torch = ThreadPoolExecutor(1, initializer=partial(torch.set_num_threads, 1))
        self._exchange: Exchange | None = None
        self._early: list[ShardTensor] = []
        self._vector = torch.empty(0)
        self._joined: asyncio.Future[Tensor] | None = None
        self._members: dict[WorkerId, Member] = {}
        statistics = Statistics()
        self._tasks = tasks
        self._peers = Peers(
            self.name,
            group=tasks,
            dial=partial(open_channel_to, credentials=NO_CREDENTIALS),
            on_failed=self._failed,
            statistics=statistics,
        )
        self.service = PeerService(
            accepts=lambda _: None, on_tensor=self._arrived, state_of=self._no_state, statistics=statistics
        )

    def meet(self, ports: Sequence[int]) -> None:
        """Everybody listens by now."""
        for place, port in enumerate(ports):
            name = worker_at(place)
            self._members[name] = Member(
                worker=name, incarnation=Incarnation("1"), address=f"127.0.0.1:{port}"
            )

    async def all_reduce(self, step: int, vector: Tensor, pattern: Pattern) -> Tensor:
        """The sum of everybody's vectors."""
        members = tuple(ChunkRef(stage=StageIndex(0), worker=name) for name in self._members)
        group = Group(group=Own(StageIndex(0)), members=members, num_shards=len(members), pattern=pattern)
        self._vector = vector
        self._joined = asyncio.get_running_loop().create_future()
        self._exchange = Exchange(self.name, Step(step), _ATTEMPT)
        early, self._early = self._early, []
        self._advance(self._exchange.prepare(group))
        for header in early:
            self._advance(self._exchange.arrive(header))
        return await self._joined

    async def close(self) -> None:
        await self._peers.close()
        self._torch.shutdown()

    def _advance(self, moves: Moves) -> None:
        assert self._exchange is not None
        for to, header in moves.parcels:
            if to == self.name:
                self._advance(self._exchange.arrive(header))
            else:
                self._send(to, header)
        for op in moves.ops:
            self._tasks.create_task(self._run(op))

    def _send(self, to: WorkerId, header: ShardTensor) -> None:
        envelope = Envelope(
            job=JobId("bench"),
            epoch=Epoch(1),
            generation=_GENERATION,
            sender=self.name,
            incarnation=Incarnation("1"),
            header=header,
        )
        payload = self._store.for_sending(envelope)
        assert payload is not None
        bundle = payload if isinstance(payload, tuple) else pack(payload)
        self._peers.send(self._members[to], envelope, bundle)

    async def _run(self, op: ReductionOp) -> None:
        """An op on the torch thread, then what it makes possible: what `worker.compute.ops` does with gradients."""
        loop = asyncio.get_running_loop()
        if isinstance(op, JoinOp):
            operands = self._take(op.results)
            joined = await loop.run_in_executor(self._torch, self._join, operands)
            assert self._joined is not None
            self._joined.set_result(joined)
            return
        if isinstance(op, PackOp):
            outputs = await loop.run_in_executor(self._torch, self._pack, op)
        else:
            outputs = await loop.run_in_executor(self._torch, self._sum, op, self._take(op.parts))
        for key, payload in outputs.items():
            self._store.file(_GENERATION, key, payload)
        self._advance(Moves(parcels=handed_out(op)))

    def _take(self, keys: Sequence[ShardTensor]) -> list[Payload]:
        found = [self._store.drop(_GENERATION, key) for key in keys]
        return [payload for payload in found if payload is not None]

    def _pack(self, op: PackOp) -> dict[TensorKey, Payload]:
        bounds = shard_bounds(self._vector.numel(), op.group.num_shards)
        outputs: dict[TensorKey, Payload] = {}
        for to, key in op.parcels:
            start, stop = bounds[key.shard]
            part = {_SHARD: self._vector[start:stop].clone()}
            outputs[key] = part if to == self.name else pack(part)
        return outputs

    def _sum(self, op: SumOp, parts: Sequence[Payload]) -> dict[TensorKey, Payload]:
        return {op.total: pack({_SHARD: sum_in_order([unpack(part, _CPU)[_SHARD] for part in parts])})}

    def _join(self, results: Sequence[Payload]) -> Tensor:
        return concatenated([unpack(result, _CPU)[_SHARD] for result in results])

    def _arrived(self, envelope: Envelope, bundle: Bundle) -> None:
        header = envelope.header
        assert isinstance(header, ShardTensor)
        self._store.file(_GENERATION, header, bundle)
        if self._exchange is None or self._exchange.step != header.step:
            self._early.append(header)
        else:
            self._advance(self._exchange.arrive(header))

    def _failed(self, to: WorkerId, generation: Generation, reason: str) -> None:
        raise RuntimeError(f"{to} did not take generation {generation}: {reason}")

    async def _no_state(self, request: FetchStateRequest) -> Mapping[str, WireTensor] | None:
        return None


def worker_at(place: int) -> WorkerId:
    return WorkerId(f"w{place}")


async def _serve(place: int, gloo_port: int) -> None:
    """Do what the lines of standard input say, and tell when each began and ended."""
    loop = asyncio.get_running_loop()
    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{gloo_port}", rank=place, world_size=NUM_PROCESSES
    )
    vector = torch.rand(NUM_BYTES // 4, generator=torch.Generator().manual_seed(place))
    async with asyncio.TaskGroup() as tasks:
        station = Station(place, tasks)
        server = open_server(credentials=NO_CREDENTIALS)
        station.service.attach(server)
        port = bind(server, "127.0.0.1", 0)
        await server.start()
        print(_MARK, port, flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            kind, *arguments = line.split()
            if kind == "meet":
                station.meet([int(x) for x in arguments])
                continue
            mine = vector.clone()
            began_s = time.monotonic()
            if kind == "gloo":
                await loop.run_in_executor(None, distributed.all_reduce, mine)
                total = mine
            else:
                total = await station.all_reduce(int(arguments[0]), mine, PATTERNS[kind])
            ended_s = time.monotonic()
            print(_MARK, began_s, ended_s, float(total.double().sum()), flush=True)
        await station.close()
        station.service.close()
        await server.stop(None)
    distributed.destroy_process_group()


# --- all processes ---


async def _measured(num_rounds: int) -> dict[str, list[float]]:
    """Seconds of each round by what was measured; the first round of each is not counted."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        gloo_port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "bench.studies.aggregation.all_reduce", str(gloo_port)]
    processes = [
        await asyncio.create_subprocess_exec(
            *command, str(place), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        for place in range(NUM_PROCESSES)
    ]
    try:
        ports = " ".join([await _line(process) for process in processes])
        _tell(processes, f"meet {ports}")
        seconds: dict[str, list[float]] = {"gloo": [], **{name: [] for name in PATTERNS}}
        step = 0
        for number in range(num_rounds + 1):
            for kind, found in seconds.items():
                step += 1
                _tell(processes, f"{kind} {step}")
                answers = [[float(x) for x in (await _line(process)).split()] for process in processes]
                # Everybody has the same sum, and that of four times 16 Mi numbers between 0 and 1.
                assert len({x[2] for x in answers}) == 1, answers
                assert abs(answers[0][2] / (NUM_PROCESSES * NUM_BYTES / 8) - 1) < 1e-3, answers
                if number:
                    found.append(max(x[1] for x in answers) - min(x[0] for x in answers))
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            await process.wait()
    return seconds


def _tell(processes: Sequence[asyncio.subprocess.Process], line: str) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{line}\n".encode())


async def _line(process: asyncio.subprocess.Process) -> str:
    """The next line that is meant for us: gloo says on standard output whom it has found."""
    assert process.stdout is not None
    while line := (await process.stdout.readline()).decode():
        if line.startswith(_MARK):
            return line.removeprefix(_MARK).strip()
    raise UserError("processes", NUM_PROCESSES, "one of them has ended: its standard error says why")


def main() -> None:
    """One of the processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("gloo_port", type=int)
    parser.add_argument("place", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_message_buffers()
    asyncio.run(_serve(arguments.place, arguments.gloo_port))


if __name__ == "__main__":
    main()
