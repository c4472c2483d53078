"""The worker's end of the control stream, and of the coordinator's store of checkpoint files.

Rules of this file
- Of several addresses the one that leads is used; it is sought again before each stream.
- The stream is opened again for ever. What was said on a broken one is lost: the machine says Hello on each, and the
  coordinator repeats what matters.
- Nothing here knows what a report or a directive means.
"""

import asyncio
import hashlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import grpc
from grpc import aio

from skein.errors import RemoteError, UserError
from skein.protocol.messages.directives import CheckpointFile, Directive
from skein.types import JobId, Step
from skein.wire.calling import Dial, dialled, reached
from skein.wire.channel import PART_BYTES, Lane
from skein.wire.codec import (
    DIRECTIVE,
    GET_PART,
    GET_REQUEST,
    MANIFEST_REPLY,
    MANIFEST_REQUEST,
    PUT_PART,
    PUT_REPLY,
    REPORT,
)
from skein.wire.extra import (
    FileData,
    FileEnd,
    GetRequest,
    GetStart,
    ManifestReply,
    ManifestRequest,
    PutPart,
    PutStart,
    Upward,
)
from skein.wire.failures import describe_rpc_error
from skein.wire.greeting import Coordinators
from skein.wire.leader import find_leader, named_leader, with_addresses
from skein.wire.v1 import checkpoint_pb2, checkpoint_pb2_grpc, control_pb2, control_pb2_grpc
from worker.transport.fetching.fetch import patiently
from worker.transport.outbox import FINAL

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 0.5
_PATIENCE_S = 30.0
"""For each part of a file."""
_DISK_BYTES_PER_S = 20e6
"""Rate of a slow disk when all of a file is made durable at its end."""

ControlCall = aio.StreamStreamCall[control_pb2.Report, control_pb2.Directive]


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """End of a stream: its reason, and whether the coordinator had said anything on it."""

    reason: str
    is_final: bool
    was_heard: bool


class Listener(Protocol):
    """Listener to what happens to the control stream. Called on the event loop, so it only notes and returns."""

    def opened(self) -> None:
        """A new stream; what is sent now goes there."""

    def heard(self, directive: Directive) -> None:
        """The coordinator said something."""

    def lost(self, reason: str) -> None:
        """The stream broke, or could not be opened."""


class Whereabouts:
    """Address of the coordinator: one of `addresses`, or what a standby says.

    `at` is the address to dial now; it changes with `seek` only.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        dial: Dial,
        on_learned: Callable[[Coordinators], None] = lambda _: None,
    ) -> None:
        """`on_learned` is called with coordinators that the leader names, so that a later process knows them too."""
        self.at = addresses[0]
        self._addresses = tuple(addresses)
        self._on_learned = on_learned
        self._named: str | None = None
        self._dial = dial
        self._num_failed = 0

    def heard(self, error: aio.AioRpcError) -> None:
        """A call to `at` failed; perhaps with the name of another."""
        self._named = named_leader(error) or self._named

    def learn(self, coordinators: Coordinators) -> None:
        """The leader names all coordinators: one of them may lead next."""
        known = with_addresses(self._addresses, coordinators.addresses)
        if known != self._addresses:
            _log.info("coordinators=%s", ",".join(known))
            self._addresses = known
        self._on_learned(coordinators)

    async def seek(self) -> None:
        """Find out who leads; where nobody says so, `at` is one after the other."""
        candidates = [*self._addresses, *(() if self._named is None else (self._named,))]
        if len(set(candidates)) == 1:
            return
        found = await find_leader(candidates, dial=self._dial)
        if found is None:
            self._num_failed += 1
            found = candidates[self._num_failed % len(candidates)]
        self.at = found


Explain = Callable[[str], str | None]
"""Gives the fault of a clock or a certificate by which no TLS connection to an address comes up; may block."""


class ControlStream:
    """Keeps a control stream to the coordinator open.

    Args:
        where: address of the coordinator.
        dial: opens channels.
        listener: hears of streams and directives.
        explain: asked after a stream that the coordinator never answered on; None: connections are in the clear.
    """

    def __init__(
        self, where: Whereabouts, *, dial: Dial, listener: Listener, explain: Explain | None = None
    ) -> None:
        self._where = where
        self._dial = dial
        self._listener = listener
        self._explain = explain
        self._outgoing: asyncio.Queue[Upward | None] | None = None
        self._was_welcome = False
        self._pause_s = 0.0
        """Least pause before the next stream, once."""
        self._reading: asyncio.Timeout | None = None
        """Bound of the stream that is open: unbounded until this worker itself ends the stream."""
        self._jitter = random.Random()

    def send(self, report: Upward) -> None:
        """Say something; lost if there is no stream."""
        if self._outgoing is not None:
            self._outgoing.put_nowait(report)

    def dial_again(self, after_s: float) -> None:
        """End this stream, and open the next one no earlier than after so many seconds."""
        self._pause_s = after_s
        if self._reading is not None and not self._reading.expired():
            self._reading.reschedule(asyncio.get_running_loop().time())

    async def run(self) -> NoReturn:
        """Open a stream, and again.

        Raises:
            UserError: the coordinator has never answered, and what it says instead will not change by waiting.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            await self._where.seek()
            target = self._where.at
            end = await self._converse(target)
            if end.is_final and not self._was_welcome:
                raise UserError("join", target, end.reason.removeprefix(f"{target}: "))
            self._listener.lost(await self._explained(end, target))
            pause_s = _FIRST_PAUSE_S if end.was_heard else min(2 * pause_s, _LAST_PAUSE_S)
            self._was_welcome |= end.was_heard
            asked_s, self._pause_s = self._pause_s, 0.0
            await asyncio.sleep(max(asked_s, pause_s) * self._jitter.uniform(0.5, 1.0))

    async def _explained(self, end: "_End", target: str) -> str:
        """Reason of a stream's end; where a clock or a certificate is in the way, that reason."""
        if end.was_heard or self._explain is None:
            return end.reason
        why = await asyncio.to_thread(self._explain, target)
        return end.reason if why is None else f"{target}: {why}"

    async def flush(self, timeout_s: float) -> None:
        """Return once what was said has been written, or after `timeout_s`."""
        if self._outgoing is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._outgoing.join()
            except TimeoutError:
                return

    async def _converse(self, target: str) -> "_End":
        """Hold one control stream from its beginning to its end."""
        outgoing: asyncio.Queue[Upward | None] = asyncio.Queue()
        async with dialled(self._dial, target, Lane.CONTROL) as channel:
            try:
                call = control_pb2_grpc.ControlStub(channel).Session(_reports(outgoing))
                self._outgoing = outgoing
                self._listener.opened()
                return await self._read(call, target)
            finally:
                self._outgoing = self._reading = None
                outgoing.put_nowait(None)

    async def _read(self, call: ControlCall, target: str) -> "_End":
        was_heard = False
        try:
            async with asyncio.timeout(None) as self._reading:
                async for message in call:
                    directive = DIRECTIVE.decode(message)
                    was_heard = True
                    if isinstance(directive, Coordinators):
                        self._where.learn(directive)
                    else:
                        self._listener.heard(directive)
        except TimeoutError:
            return _End(reason=f"{target}: to be asked again", is_final=False, was_heard=was_heard)
        except aio.AioRpcError as error:
            self._where.heard(error)
            reason = describe_rpc_error(error, target)
            return _End(reason=reason, is_final=error.code() in FINAL, was_heard=was_heard)
        except RemoteError as error:
            return _End(reason=f"{target}: {error}", is_final=False, was_heard=was_heard)
        reason = f"{target}: the coordinator ended the stream"
        return _End(reason=reason, is_final=False, was_heard=was_heard)


async def _reports(outgoing: asyncio.Queue[Upward | None]) -> AsyncIterator[control_pb2.Report]:
    while (report := await outgoing.get()) is not None:
        yield REPORT.encode(report)
        outgoing.task_done()


class FullError(RemoteError):
    """The coordinator has no room for a file."""


class CheckpointFiles:
    """Files of checkpoints at the coordinator, for jobs that name no URL."""

    def __init__(self, where: Whereabouts, *, dial: Dial) -> None:
        self._where = where
        self._dial = dial

    async def manifest(self, job: JobId, version: Step) -> ManifestReply:
        """Manifest of the checkpoint of `job` at `version`, wherever its files are.

        Raises:
            RemoteError: there is none, or the coordinator cannot be reached.
        """
        async with reached(self._dial, self._where.at, Lane.STATE, patience_s=_PATIENCE_S) as channel:
            request = MANIFEST_REQUEST.encode(ManifestRequest(job=job, version=version))
            stub = checkpoint_pb2_grpc.CheckpointStub(channel)
            return MANIFEST_REPLY.decode(await stub.Manifest(request, timeout=_PATIENCE_S))

    async def put(self, job: JobId, version: Step, name: str, path: Path) -> None:
        """Upload the file at `path` under `name`.

        Raises:
            FullError: the coordinator has no room.
            RemoteError: the coordinator cannot be reached, or stored something else.
        """
        digest = hashlib.sha256()
        target = self._where.at
        try:
            async with (
                dialled(self._dial, target, Lane.STATE) as channel,
                asyncio.timeout(_PATIENCE_S) as patience,
            ):
                parts = _patient(_put_parts(job, version, name, path, digest), patience)
                reply = PUT_REPLY.decode(await checkpoint_pb2_grpc.CheckpointStub(channel).Put(parts))
        except aio.AioRpcError as error:
            kind = FullError if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED else RemoteError
            raise kind(describe_rpc_error(error, target)) from error
        except TimeoutError as error:
            raise RemoteError(f"{target}: took no more of {name}") from error
        if reply.sha256 != digest.hexdigest():
            raise RemoteError(f"{target}: {name} arrived with other bytes")

    async def get(self, job: JobId, version: Step, file: CheckpointFile, path: Path) -> None:
        """Download a file to `path`; its hash is left to the caller.

        Raises:
            RemoteError: it is not there, or the coordinator cannot be reached.
        """
        async with reached(self._dial, self._where.at, Lane.STATE, patience_s=_PATIENCE_S) as channel:
            request = GetRequest(job=job, version=version, name=file.name, offset=0)
            call = checkpoint_pb2_grpc.CheckpointStub(channel).Get(GET_REQUEST.encode(request))
            with path.open("wb") as out:
                async for message in patiently(aiter(call), _PATIENCE_S):
                    part = GET_PART.decode(message)
                    match part:
                        case GetStart() if part.num_bytes != file.num_bytes:
                            raise RemoteError(f"{file.name} has {part.num_bytes} bytes, not {file.num_bytes}")
                        case FileData():
                            out.write(part.data)
                        case _:
                            pass


def _put_parts(
    job: JobId, version: Step, name: str, path: Path, digest: "hashlib._Hash"
) -> Iterator[PutPart]:
    yield PutStart(job=job, version=version, name=name, num_bytes=path.stat().st_size)
    with path.open("rb") as file:
        while data := file.read(PART_BYTES):
            digest.update(data)
            yield FileData(data=data)
    yield FileEnd(sha256=digest.hexdigest())


def _patient(parts: Iterator[PutPart], patience: asyncio.Timeout) -> Iterator[checkpoint_pb2.PutPart]:
    """The parts, each of which gives the coordinator more time; the last one as much as its disk may want for all."""
    loop = asyncio.get_running_loop()
    num_bytes = 0
    for part in parts:
        num_bytes += len(part.data) if isinstance(part, FileData) else 0
        yield PUT_PART.encode(part)
        patience.reschedule(loop.time() + _PATIENCE_S + num_bytes / _DISK_BYTES_PER_S)
