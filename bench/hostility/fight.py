"""The fight: attackers with and without certificates one beside the other, and real calls all the while."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from random import Random

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from bench.hostility.messages import WAYS, Method, messages, methods
from skein.wire.channel import Lane, open_channel
from skein.wire.credentials import Credentials
from skein.wire.identity.names import COORDINATOR, Caller, worker_caller
from skein.wire.v1 import jobs_pb2, jobs_pb2_grpc, peer_pb2, peer_pb2_grpc

NUM_ATTACKERS = 8
NUM_STREAMS = 1000
_PATIENCE_S = 1.0
"""How long an attacker listens for what it is told."""
_SLOW_S = 0.3
_EVERY_S = 0.2
"""Between two real calls."""
_DEADLINE_S = 10.0
_AGAIN_S = 0.05


@dataclass(slots=True, kw_only=True)
class Tally:
    """What came of it."""

    num_attacks: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    """Tensors that were taken, by attack."""
    real_s: list[float] = field(default_factory=list)
    num_unanswered: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Who is attacked, and by what attackers and honest callers are known; `workers` are addresses by name."""

    coordinator: str
    workers: Mapping[str, str]
    attackers: Sequence[Credentials]
    honest: Credentials
    honest_worker: Credentials

    def place(self, method: Method, draw: Random) -> tuple[str, Caller]:
        """Address and name of somebody who serves a method."""
        if not method.is_workers:
            return self.coordinator, COORDINATOR
        name = draw.choice(sorted(self.workers))
        return self.workers[name], worker_caller(name)


async def attack(
    address: str, served_by: Caller, shown: Credentials, method: Method, way: str, draw: Random
) -> tuple[str, int]:
    """One call, or with `streams` so many; the status that it ended with, or "open", and how many tensors it got in."""
    async with open_channel(address, Lane.CONTROL, credentials=shown, expected=served_by) as channel:
        calls = [
            channel.stream_stream(method.path, None, None)(None)
            for _ in range(NUM_STREAMS if way == "streams" else 1)
        ]
        call, num_taken = calls[0], 0
        try:
            async with asyncio.timeout(_PATIENCE_S):
                for message in messages(method, way, draw):
                    await call.write(message)
                    if way == "slow":
                        await asyncio.sleep(_SLOW_S)
                async for reply in call:
                    num_taken += is_taken(method, reply)
        except aio.AioRpcError as error:
            return error.code().name, num_taken
        except (TimeoutError, asyncio.InvalidStateError, asyncio.CancelledError):
            return "open" if not call.done() else (await call.code()).name, num_taken
        finally:
            for one in calls:
                one.cancel()
    return "OK", num_taken


def is_taken(method: Method, reply: object) -> bool:
    """Whether a reply says that a tensor was taken."""
    if not method.path.endswith("/Deliver") or not isinstance(reply, bytes):
        return False
    with suppress(DecodeError):
        return peer_pb2.PartReply.FromString(reply).HasField("tensor_accepted")
    return False


def fight(at: Field, *, seconds: float, seed: int) -> Tally:
    """Attackers one beside the other, each method in each way in turn; real calls from another process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
        attacking = apart.submit(_attack_all, at, seconds, seed)
        real = asyncio.run(real_calls(at, seconds))
        tally = attacking.result()
    tally.real_s, tally.num_unanswered = real.real_s, real.num_unanswered
    return tally


def _attack_all(at: Field, seconds: float, seed: int) -> Tally:
    return asyncio.run(attack_all(at, seconds=seconds, seed=seed))


async def attack_all(at: Field, *, seconds: float, seed: int) -> Tally:
    """What became of so many seconds of attacks."""
    tally, ends_s = Tally(), time.monotonic() + seconds
    turns = [(method, way) for method in methods() for way in WAYS]
    Random(seed).shuffle(turns)

    async def attacker(number: int) -> None:
        draw, turn = Random(seed * NUM_ATTACKERS + number), number
        while time.monotonic() < ends_s:
            method, way = turns[turn % len(turns)]
            address, served_by = at.place(method, draw)
            status, num_taken = await attack(address, served_by, draw.choice(at.attackers), method, way, draw)
            tally.num_attacks[f"{method.path} {way}"] += 1
            tally.statuses[status] += 1
            tally.accepted[f"{method.path} {way}"] += num_taken
            turn += NUM_ATTACKERS

    async with asyncio.TaskGroup() as group:
        for number in range(NUM_ATTACKERS):
            group.create_task(attacker(number))
    return tally


async def real_calls(at: Field, seconds: float) -> Tally:
    """What honest callers want: the list of jobs, and an answer to a probe."""
    tally, ends_s = Tally(), time.monotonic() + seconds
    name, address = next(iter(sorted(at.workers.items())))
    async with (
        open_channel(at.coordinator, Lane.CONTROL, credentials=at.honest) as control,
        open_channel(
            address, Lane.STATE, credentials=at.honest_worker, expected=worker_caller(name)
        ) as state,
    ):

        async def listed() -> None:
            await jobs_pb2_grpc.JobsStub(control).List(jobs_pb2.ListJobsRequest(), timeout=_DEADLINE_S)

        async def probed() -> None:
            probe = peer_pb2_grpc.PeerStub(state).Probe(iter([peer_pb2.ProbePart()]), timeout=_DEADLINE_S)
            async for _ in probe:
                pass

        while time.monotonic() < ends_s:
            for ask in (listed, probed):
                began_s = time.monotonic()
                if await answered(ask, until_s=began_s + _DEADLINE_S):
                    tally.real_s.append(time.monotonic() - began_s)
                else:
                    tally.num_unanswered += 1
            await asyncio.sleep(_EVERY_S)
    return tally


async def answered(ask: Callable[[], Awaitable[None]], *, until_s: float) -> bool:
    """Whether there is an answer in time; who is told that others are being served asks again."""
    while time.monotonic() < until_s:
        try:
            await ask()
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                return False
            await asyncio.sleep(_AGAIN_S)
        else:
            return True
    return False
