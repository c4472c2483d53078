"""Hostile input: every method of every service is sent what is malformed, oversized, silent and forged, all the while.

    python -m bench.hostile [--seconds 60] [--workers 2] [--seed 1]

Real processes on loopback, attacked by somebody whom they let in. Beside the attacks real calls are made: jobs are
listed, workers probed. Ends with one JSON line; exit code 1 if a process ended, grew by more than 64 MiB after as many
attacks as fit into a tenth of the time, or answered real calls later than within a second (p99).
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import quantiles

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio
from grpc_health.v1 import health_pb2

from bench.cluster import Cluster, running
from bench.report import Row, finish
from coordinator.records.store import LOCK_FILE
from skein.wire.channel import MAX_MESSAGE_BYTES, Lane, open_channel
from skein.wire.credentials import NO_CREDENTIALS
from skein.wire.v1 import checkpoint_pb2, control_pb2, jobs_pb2, jobs_pb2_grpc, peer_pb2, peer_pb2_grpc

WAYS = ("malformed", "oversized", "silent", "forged")
MOST_GROWTH_BYTES = 64 << 20
MOST_P99_S = 1.0
NUM_ATTACKERS = 8
_PATIENCE_S = 1.0
"""How long an attacker listens for what it is told."""
_EVERY_S = 0.2
"""Between two real calls."""
_DEADLINE_S = 10.0
_DEEPEST = 4
_INTEGERS = (0, 1, 2, 255, 2**31, 2**32 - 1)
_FLOATS = (0.0, -1.0, 1.0, 1e30, float("inf"), float("-inf"), float("nan"))
_NAMES = ("", "w0", "nobody", "../../etc", "x" * 300, "s0", "sim-1", "\u2028")


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One RPC: where it is served, and what it is sent."""

    path: str
    is_workers: bool
    request: type[Message]


def methods() -> Iterator[Method]:
    """Every method of every service, health included."""
    for file, is_workers in (
        (control_pb2, False),
        (jobs_pb2, False),
        (checkpoint_pb2, False),
        (peer_pb2, True),
        (health_pb2, False),
    ):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield Method(
                    path=f"/{service.full_name}/{method.name}",
                    is_workers=is_workers,
                    request=GetMessageClass(method.input_type),
                )


def messages(method: Method, way: str, draw: Random) -> list[bytes]:
    """What an attack in this way sends, in order."""
    match way:
        case "malformed":
            return [draw.randbytes(draw.randrange(1, 200)) for _ in range(3)]
        case "oversized":
            return [bytes(MAX_MESSAGE_BYTES + draw.randrange(1, 1 << 20))]
        case "silent":
            return []
        case _:
            return [forged(method, draw).SerializeToString() for _ in range(8)]


def forged(method: Method, draw: Random) -> Message:
    """A well-formed request of made-up content. Nobody is drained by name: that is what an operator may do."""
    message = method.request()
    _fill(message, draw, names=_NAMES[2:] if method.path.endswith("/Drain") else _NAMES)
    return message


def _fill(message: Message, draw: Random, *, names: tuple[str, ...], depth: int = 0) -> None:
    for one in message.DESCRIPTOR.fields:
        assert isinstance(one, FieldDescriptor)
        oneof = one.containing_oneof
        is_there = draw.random() < (0.8 if oneof is None else 1 / len(oneof.fields))
        if not is_there or (one.message_type is not None and depth == _DEEPEST):
            continue
        if one.message_type is not None:
            held = getattr(message, one.name)
            for _ in range(draw.randrange(3) if one.is_repeated else 1):
                child = held.add() if one.is_repeated else held
                child.SetInParent()
                _fill(child, draw, names=names, depth=depth + 1)
        elif one.is_repeated:
            getattr(message, one.name).extend(_value(one, draw, names) for _ in range(draw.randrange(4)))
        else:
            setattr(message, one.name, _value(one, draw, names))


def _value(one: FieldDescriptor, draw: Random, names: tuple[str, ...]) -> object:
    match one.cpp_type:
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return draw.choice(_FLOATS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return draw.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            assert one.enum_type is not None
            return draw.choice([value.number for value in one.enum_type.values])
        case FieldDescriptor.CPPTYPE_STRING if one.type == FieldDescriptor.TYPE_BYTES:
            return draw.randbytes(draw.randrange(64))
        case FieldDescriptor.CPPTYPE_STRING:
            return draw.choice(names)
        case _:
            return draw.choice(_INTEGERS)


# --- the fight ---


@dataclass(slots=True, kw_only=True)
class Tally:
    """What came of it."""

    num_attacks: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    real_s: list[float] = field(default_factory=list)
    num_unanswered: int = 0


async def attack(address: str, method: Method, way: str, draw: Random) -> str:
    """One call; the status that it ended with, or "open"."""
    async with open_channel(address, Lane.CONTROL, credentials=NO_CREDENTIALS) as channel:
        call = channel.stream_stream(method.path, None, None)(None)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                for message in messages(method, way, draw):
                    await call.write(message)
                async for _ in call:
                    pass
        except aio.AioRpcError as error:
            return error.code().name
        except (TimeoutError, asyncio.InvalidStateError, asyncio.CancelledError):
            return "open" if not call.done() else (await call.code()).name
        finally:
            call.cancel()
    return "OK"


async def fight(coordinator: str, workers: list[str], tally: Tally, *, seconds: float, seed: int) -> None:
    """Attackers one beside the other, each method in each way in turn; real calls all the while."""
    ends_s = time.monotonic() + seconds
    turns = [(method, way) for method in methods() for way in WAYS]
    Random(seed).shuffle(turns)

    async def attacker(number: int) -> None:
        draw, turn = Random(seed * NUM_ATTACKERS + number), number
        while time.monotonic() < ends_s:
            method, way = turns[turn % len(turns)]
            address = draw.choice(workers) if method.is_workers else coordinator
            status = await attack(address, method, way, draw)
            tally.num_attacks[f"{method.path} {way}"] += 1
            tally.statuses[status] += 1
            turn += NUM_ATTACKERS

    async with asyncio.TaskGroup() as group:
        for number in range(NUM_ATTACKERS):
            group.create_task(attacker(number))
        group.create_task(real_calls(coordinator, workers, tally, ends_s))


async def real_calls(coordinator: str, workers: list[str], tally: Tally, ends_s: float) -> None:
    """What honest callers want: the list of jobs, and an answer to a probe."""
    async with (
        open_channel(coordinator, Lane.CONTROL, credentials=NO_CREDENTIALS) as control,
        open_channel(workers[0], Lane.STATE, credentials=NO_CREDENTIALS) as state,
    ):
        while time.monotonic() < ends_s:
            began_s = time.monotonic()
            try:
                await jobs_pb2_grpc.JobsStub(control).List(jobs_pb2.ListJobsRequest(), timeout=_DEADLINE_S)
                tally.real_s.append(time.monotonic() - began_s)
                began_s = time.monotonic()
                probe = peer_pb2_grpc.PeerStub(state).Probe(iter([peer_pb2.ProbePart()]), timeout=_DEADLINE_S)
                async for _ in probe:
                    pass
                tally.real_s.append(time.monotonic() - began_s)
            except aio.AioRpcError:
                tally.num_unanswered += 1
            await asyncio.sleep(_EVERY_S)


# --- the processes ---


def processes_of(cluster: Cluster) -> dict[str, int]:
    """Process ids by name."""
    coordinator = int((cluster.directory / "state" / LOCK_FILE).read_text())
    return {"coordinator": coordinator} | {name: process.pid for name, process in cluster.workers.items()}


def resident_bytes(pid: int) -> int | None:
    """What a process holds in memory; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return None
    lines = (line.split() for line in text.splitlines() if line.startswith("VmRSS:"))
    return next((int(line[1]) << 10 for line in lines), None)


def rows_of(tally: Tally, before: dict[str, int], after: dict[str, int | None]) -> list[Row]:
    """What must hold."""
    gone = [name for name, held in after.items() if held is None]
    growth = max((held - before[name] for name, held in after.items() if held is not None), default=0)
    p99_s = quantiles(tally.real_s, n=100)[98] if len(tally.real_s) > 1 else float("inf")

    def row(what: str, value: float, unit: str, most: float) -> Row:
        ratio = value / most if most else value
        return Row(
            what=what,
            value=value,
            unit=unit,
            against=f"{most:g} {unit}",
            ratio=ratio,
            goal=f"at most {most:g}",
            holds=value <= most,
            spread=0.0,
        )

    return [
        row("processes that ended", float(len(gone)), "processes", 0.0),
        row("largest growth of a process", float(growth), "bytes", float(MOST_GROWTH_BYTES)),
        row("real calls, p99", p99_s, "s", MOST_P99_S),
        row("real calls without an answer", float(tally.num_unanswered), "calls", 0.0),
    ]


def main() -> int:
    """Attack for so long, and print the line."""
    parser = argparse.ArgumentParser(prog="skein bench hostile", description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), args.workers) as cluster:
        with cluster.client() as client:
            workers = sorted(worker.address for worker in client.workers())
        pids = processes_of(cluster)
        # Buffers, threads and caches that any use fills are there after the first tenth.
        asyncio.run(fight(cluster.target, workers, Tally(), seconds=args.seconds / 10, seed=args.seed))
        before = {name: resident_bytes(pid) or 0 for name, pid in pids.items()}
        asyncio.run(fight(cluster.target, workers, tally, seconds=args.seconds, seed=args.seed))
        after = {name: resident_bytes(pid) for name, pid in pids.items()}
    figures = {"seconds": args.seconds, "statuses": {k: float(v) for k, v in tally.statuses.items()}}
    figures |= {"attacks": float(tally.num_attacks.total()), "kinds of attack": float(len(tally.num_attacks))}
    return finish("hostile", rows_of(tally, before, after), figures=figures)


if __name__ == "__main__":
    sys.exit(main())
