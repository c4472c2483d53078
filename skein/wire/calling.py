"""Calls on a connection of their own: opened, closed, and what goes wrong on it in words."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from grpc import aio

from skein.errors import RemoteError
from skein.types import WorkerId
from skein.wire.channel import Lane
from skein.wire.failures import describe_rpc_error

Dial = Callable[[str, Lane], aio.Channel]
"""Opens a channel to an address, on a connection of its own."""
DialPeer = Callable[[WorkerId], Dial]
"""Opens channels to that worker, and to nobody else whatever the address."""


@asynccontextmanager
async def dialled(dial: Dial, address: str, lane: Lane) -> AsyncIterator[aio.Channel]:
    """A channel to `address`, which is closed in the end."""
    channel = dial(address, lane)
    try:
        yield channel
    finally:
        await channel.close(None)


@asynccontextmanager
async def reached(dial: Dial, address: str, lane: Lane, *, patience_s: float) -> AsyncIterator[aio.Channel]:
    """A channel as of `dialled`, for calls that wait no longer than `patience_s` for anything.

    Raises:
        RemoteError: a call failed, or waited for so long.
    """
    try:
        async with dialled(dial, address, lane) as channel:
            yield channel
    except aio.AioRpcError as error:
        raise RemoteError(describe_rpc_error(error, address)) from error
    except TimeoutError as error:
        raise RemoteError(f"{address}: silent for {patience_s} s") from error
