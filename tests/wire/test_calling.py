"""Calls on a connection of their own: who is cancelled ends by that, and nobody else does."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from grpc import aio

from skein.errors import RemoteError
from skein.wire.calling import dialled
from skein.wire.channel import Lane, open_channel
from skein.wire.credentials import NO_CREDENTIALS
from skein.wire.v1 import control_pb2, control_pb2_grpc
from tests.worker.puppet import puppet


def dial(address: str, lane: Lane) -> aio.Channel:
    return open_channel(address, lane, credentials=NO_CREDENTIALS)


@pytest.fixture
def deaf() -> Iterator[str]:
    """An address where nothing listens, and nothing will."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


async def nothing() -> AsyncIterator[control_pb2.Report]:
    """Requests that end only with their call."""
    await asyncio.Event().wait()
    yield control_pb2.Report()


async def broken_stream(channel: aio.Channel, on_end: Callable[[object], None]) -> None:
    call = control_pb2_grpc.ControlStub(channel).Session(nothing())
    call.add_done_callback(on_end)
    async for _ in call:
        pass


async def try_again(address: str, on_end: Callable[[object], None]) -> None:
    for _ in range(3):
        async with dialled(dial, address, Lane.CONTROL) as channel:
            try:
                await broken_stream(channel, on_end)
            except aio.AioRpcError:
                continue


async def test_who_is_cancelled_as_a_call_breaks_does_not_try_again(deaf: str) -> None:
    ended: list[object] = []

    def on_end(call: object) -> None:
        ended.append(call)
        trying.cancel()

    trying = asyncio.create_task(try_again(deaf, on_end))
    await asyncio.wait({trying})
    assert trying.cancelled()
    assert len(ended) == 1


async def test_a_call_whose_requests_cannot_be_made_is_a_failure_and_no_cancellation() -> None:
    async def unspeakable() -> AsyncIterator[control_pb2.Report]:
        yield control_pb2.Report(trouble=control_pb2.Trouble(reason="\udcff"))

    async with puppet() as (_, port):
        with pytest.raises(RemoteError, match=f"127.0.0.1:{port}: what was to be sent"):
            async with dialled(dial, f"127.0.0.1:{port}", Lane.CONTROL) as channel:
                assert [x async for x in control_pb2_grpc.ControlStub(channel).Session(unspeakable())]
