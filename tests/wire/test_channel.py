"""Addresses, tokens and errors between processes, over real connections on loopback."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer

from skein.errors import LocalError, RemoteError, UserError
from skein.wire.channel import Lane, bind, open_channel, open_server, require_safe_bind, split_address
from skein.wire.credentials import NO_CREDENTIALS, Credentials, read_token
from skein.wire.failures import describe_rpc_error, error_of, refuse, status_of
from skein.wire.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    jobs_pb2,
    jobs_pb2_grpc,
    peer_pb2,
    peer_pb2_grpc,
)

TOKEN = "correct-horse-battery"
DEADLINE_S = 10.0
"""Far above what loopback takes; reached only when something hangs."""


Context = aio.ServicerContext[object, object]
R = TypeVar("R")


class Jobs(jobs_pb2_grpc.JobsServicer):
    async def Version(self, request: jobs_pb2.VersionRequest, context: Context) -> jobs_pb2.VersionReply:
        return jobs_pb2.VersionReply(protocol_version=1, release="r", epoch=1)

    async def Get(self, request: jobs_pb2.GetJobRequest, context: Context) -> jobs_pb2.JobStatus:
        await refuse(context, UserError("job", request.job, "no such job"), grpc.StatusCode.NOT_FOUND)

    async def Drain(self, request: jobs_pb2.DrainRequest, context: Context) -> jobs_pb2.WorkerStatus:
        await refuse(context, LocalError("state is odd"))

    async def Watch(
        self, request: jobs_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[jobs_pb2.JobEvent]:
        yield jobs_pb2.JobEvent(sequence=1)


class Peer(peer_pb2_grpc.PeerServicer):
    async def Probe(
        self, request_iterator: AsyncIterator[peer_pb2.ProbePart], context: Context
    ) -> AsyncIterator[peer_pb2.ProbeReply]:
        async for part in request_iterator:
            yield peer_pb2.ProbeReply(sequence=part.sequence)


class Checkpoint(checkpoint_pb2_grpc.CheckpointServicer):
    async def Put(
        self, request_iterator: AsyncIterator[checkpoint_pb2.PutPart], context: Context
    ) -> checkpoint_pb2.PutReply:
        return checkpoint_pb2.PutReply(num_bytes=len([part async for part in request_iterator]))


@asynccontextmanager
async def serving(token: str | None) -> AsyncIterator[str]:
    """The target of a running server."""
    server = open_server(credentials=Credentials(token=token))
    # The three answer one call of each shape; what they leave out is never asked.
    jobs_pb2_grpc.add_JobsServicer_to_server(Jobs(), server)  # type: ignore[abstract]
    peer_pb2_grpc.add_PeerServicer_to_server(Peer(), server)  # type: ignore[abstract]
    checkpoint_pb2_grpc.add_CheckpointServicer_to_server(Checkpoint(), server)  # type: ignore[abstract]
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def never(request: R) -> AsyncIterator[R]:
    """A request that does not come."""
    await asyncio.Event().wait()
    yield request


async def call_all(channel: aio.Channel, *, is_let_in: bool = True) -> list[grpc.StatusCode]:
    """How one call of each shape ends: unary, streamed answer, streamed question, both.

    Whoever is not let in says nothing: gRPC has a write that meets a refusal end the call as INTERNAL.
    """
    jobs, peer = jobs_pb2_grpc.JobsStub(channel), peer_pb2_grpc.PeerStub(channel)
    checkpoint = checkpoint_pb2_grpc.CheckpointStub(channel)
    file, part = checkpoint_pb2.PutPart(), peer_pb2.ProbePart(sequence=7)
    put = checkpoint.Put(iter([file]) if is_let_in else never(file), timeout=DEADLINE_S)
    watch = jobs.Watch(jobs_pb2.WatchRequest(), timeout=DEADLINE_S)
    probe = peer.Probe(iter([part]) if is_let_in else never(part), timeout=DEADLINE_S)
    codes = [await jobs.Version(jobs_pb2.VersionRequest(), timeout=DEADLINE_S).code(), await put.code()]
    for stream in (watch, probe):
        with suppress(aio.AioRpcError):  # the code says it
            assert [reply.sequence async for reply in stream]
        codes.append(await stream.code())
    return codes


async def test_calls_with_the_token_pass() -> None:
    async with (
        serving(TOKEN) as target,
        open_channel(target, Lane.CONTROL, credentials=Credentials(token=TOKEN)) as channel,
    ):
        assert await call_all(channel) == [grpc.StatusCode.OK] * 4


@pytest.mark.parametrize("token", [None, "wrong-" + TOKEN, TOKEN[:-1]])
async def test_calls_without_the_token_are_refused_in_every_shape(token: str | None) -> None:
    async with (
        serving(TOKEN) as target,
        open_channel(target, Lane.FORWARD, credentials=Credentials(token=token)) as channel,
    ):
        assert await call_all(channel, is_let_in=False) == [grpc.StatusCode.UNAUTHENTICATED] * 4


async def test_server_without_a_token_takes_any() -> None:
    async with (
        serving(None) as target,
        open_channel(target, Lane.STATE, credentials=Credentials(token=TOKEN)) as channel,
    ):
        assert await call_all(channel) == [grpc.StatusCode.OK] * 4


async def test_unknown_method_is_refused_like_a_known_one() -> None:
    async with (
        serving(TOKEN) as target,
        open_channel(target, Lane.CONTROL, credentials=NO_CREDENTIALS) as channel,
    ):
        with pytest.raises(aio.AioRpcError) as caught:
            await channel.unary_unary("/skein.wire.v1.Jobs/None", None, None)(b"", timeout=DEADLINE_S)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_needs_no_token() -> None:
    async with (
        serving(TOKEN) as target,
        open_channel(target, Lane.CONTROL, credentials=NO_CREDENTIALS) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_users_error_comes_back_as_it_was_raised() -> None:
    async with (
        serving(None) as target,
        open_channel(target, Lane.CONTROL, credentials=NO_CREDENTIALS) as channel,
    ):
        with pytest.raises(aio.AioRpcError) as caught:
            await jobs_pb2_grpc.JobsStub(channel).Get(jobs_pb2.GetJobRequest(job="j9"), timeout=DEADLINE_S)
    error = error_of(caught.value, target)
    assert isinstance(error, UserError)
    assert (error.field, error.value, error.hint) == ("job", "j9", "no such job")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_their_own_fault_is_a_remote_error_here() -> None:
    async with (
        serving(None) as target,
        open_channel(target, Lane.CONTROL, credentials=NO_CREDENTIALS) as channel,
    ):
        with pytest.raises(aio.AioRpcError) as caught:
            await jobs_pb2_grpc.JobsStub(channel).Drain(jobs_pb2.DrainRequest(), timeout=DEADLINE_S)
    assert isinstance(error_of(caught.value, target), RemoteError)
    assert describe_rpc_error(caught.value, target) == f"{target}: internal: state is odd"


async def described(target: str, token: str | None = None) -> str:
    """What a user reads when asking `target` for its version fails."""
    async with open_channel(target, Lane.CONTROL, credentials=Credentials(token=token)) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await jobs_pb2_grpc.JobsStub(channel).Version(jobs_pb2.VersionRequest(), timeout=DEADLINE_S)
    return describe_rpc_error(caught.value, target)


async def test_nobody_listening_is_said_in_words() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{taken.getsockname()[1]}"
        assert await described(target) == f"{target}: nothing listens there: start it, or check host and port"


async def test_unknown_host_is_said_in_words() -> None:
    assert "no such host" in await described("no-such-host.invalid:7100")


async def test_other_protocol_is_said_in_words() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert "does not speak gRPC" in await described(f"127.0.0.1:{port}")


async def test_wrong_token_and_other_release_are_said_in_words() -> None:
    async with serving(TOKEN) as target:
        assert "give the token file" in await described(target)
    server = open_server(credentials=NO_CREDENTIALS)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    assert "another release runs there" in await described(f"127.0.0.1:{port}")
    await server.stop(None)


@pytest.mark.parametrize(
    ("code", "details", "said"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "no answer in time"),
        (grpc.StatusCode.UNAVAILABLE, "ping timeout", "fell silent"),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", "it may want a certificate"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "message larger than max", "a limit there was reached"),
        (grpc.StatusCode.DATA_LOSS, "two\nlines", "data loss: two lines"),
    ],
)
def test_status_is_one_line(code: grpc.StatusCode, details: str, said: str) -> None:
    error = aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), details, None)
    line = describe_rpc_error(error, "host:1")
    assert line.startswith("host:1: ")
    assert said in line
    assert "\n" not in line


def test_every_kind_of_error_has_a_status() -> None:
    errors = (UserError("f", 1, "h"), RemoteError(), LocalError())
    assert [status_of(error).name for error in errors] == [
        "INVALID_ARGUMENT",
        "FAILED_PRECONDITION",
        "INTERNAL",
    ]


async def test_port_in_use_is_the_users_to_mend() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match=r"Address already in use; give another"):
            bind(open_server(credentials=NO_CREDENTIALS), "127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", 99_999), ("192.0.2.1", 7100), ("no-such-host.invalid", 1)]
)
async def test_address_of_nobody_is_the_users_to_mend(host: str, port: int) -> None:
    with pytest.raises(UserError, match="listen"):
        bind(open_server(credentials=NO_CREDENTIALS), host, port)


@pytest.mark.parametrize(
    "text", ["", "host", ":7100", "host:", "host:x", "host:65536", "::1:7100", "[host]:1", "[::1]"]
)
def test_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="give host:port"):
        split_address("join", text)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "lab.example"])
def test_listening_to_strangers_needs_a_token(host: str) -> None:
    with pytest.raises(UserError, match="set a token file"):
        require_safe_bind(host, NO_CREDENTIALS, allow_insecure=False)
    require_safe_bind(host, Credentials(token=TOKEN), allow_insecure=False)
    require_safe_bind(host, NO_CREDENTIALS, allow_insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_listening_to_this_machine_needs_none(host: str) -> None:
    require_safe_bind(host, NO_CREDENTIALS, allow_insecure=False)


def token_file(directory: Path, content: bytes, mode: int = 0o600) -> Path:
    path = directory / "token"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_token_is_read_without_its_line_break(tmp_path: Path) -> None:
    assert read_token(token_file(tmp_path, TOKEN.encode() + b"\n")) == TOKEN


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"", "holds 0 characters"),
        (b"short", "holds 5 characters"),
        (b"two words of sufficient length", "more than one word"),
        (b"one line of two\nanother-line", "more than one word"),
        ("пароль-пароль-пароль".encode(), "not plain text"),
    ],
)
def test_token_that_protects_nothing_is_refused(tmp_path: Path, content: bytes, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        read_token(token_file(tmp_path, content))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_token_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UserError, match="chmod 600"):
        read_token(token_file(tmp_path, TOKEN.encode(), mode))


def test_absent_token_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{os.strerror(2)}; give a file"):
        read_token(tmp_path / "absent")
    with pytest.raises(UserError, match="give a file"):
        read_token(tmp_path)
