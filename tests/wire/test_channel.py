"""Addresses and errors between processes, over real connections on loopback."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc
import pytest
from grpc import aio

from skein.errors import LocalError, RemoteError, UserError
from skein.wire.channel import Lane, bind, open_channel, open_server, require_safe_bind, split_address
from skein.wire.credentials import NO_CREDENTIALS, Credentials, Wallet
from skein.wire.failures import describe_rpc_error, error_of, refuse, status_of
from skein.wire.identity.authority import Authority
from skein.wire.identity.names import COORDINATOR
from skein.wire.v1 import (
    jobs_pb2,
    jobs_pb2_grpc,
)

WALLET = Wallet(Authority.new(now_s=0.0).make_out(COORDINATOR, now_s=0.0))
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


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """The target of a running server."""
    server = open_server(credentials=NO_CREDENTIALS)
    # What it leaves out is never asked.
    jobs_pb2_grpc.add_JobsServicer_to_server(Jobs(), server)  # type: ignore[abstract]
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_users_error_comes_back_as_it_was_raised() -> None:
    async with (
        serving() as target,
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
        serving() as target,
        open_channel(target, Lane.CONTROL, credentials=NO_CREDENTIALS) as channel,
    ):
        with pytest.raises(aio.AioRpcError) as caught:
            await jobs_pb2_grpc.JobsStub(channel).Drain(jobs_pb2.DrainRequest(), timeout=DEADLINE_S)
    assert isinstance(error_of(caught.value, target), RemoteError)
    assert describe_rpc_error(caught.value, target) == f"{target}: internal: state is odd"


async def described(target: str) -> str:
    """What a user reads when asking `target` for its version fails."""
    async with open_channel(target, Lane.CONTROL, credentials=NO_CREDENTIALS) as channel:
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


async def test_another_release_is_said_in_words() -> None:
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
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", "no certificate here is in force there"),
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
def test_listening_to_strangers_needs_an_identity(host: str) -> None:
    with pytest.raises(UserError, match="join with a line from skein token create"):
        require_safe_bind(host, NO_CREDENTIALS, allow_insecure=False)
    require_safe_bind(host, Credentials(wallet=WALLET), allow_insecure=False)
    require_safe_bind(host, NO_CREDENTIALS, allow_insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_listening_to_this_machine_needs_none(host: str) -> None:
    require_safe_bind(host, NO_CREDENTIALS, allow_insecure=False)
