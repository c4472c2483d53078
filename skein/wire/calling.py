"""Calls on a connection of their own: opened, closed, and what goes wrong on it in words.

Rules of this file
- Whoever is cancelled ends by that, and nobody else does. gRPC waits for calls in tasks of its own: a cancellation that
  meets the end of a call is lost there, and a call whose requests cannot be made looks like a cancellation.
"""

import asyncio
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
    """A channel to `address`, which is closed in the end.

    Raises:
        RemoteError: gRPC has called a call off, and nobody had asked for that.
    """
    caller = asyncio.current_task()
    assert caller is not None, "gRPC's channels belong to a loop"
    num_asked = caller.cancelling()
    channel = dial(address, lane)
    try:
        yield channel
    except asyncio.CancelledError as error:
        if not caller.cancelling():
            raise RemoteError(
                f"{address}: what was to be sent could not be, so the call was given up"
            ) from error
        raise
    finally:
        await channel.close(None)
        if caller.cancelling() > num_asked:
            raise asyncio.CancelledError


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
