"""The ends of a relayed connection: a local socket on one side, a stream to the relay on the other."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from grpc import aio

from skein.errors import RemoteError
from skein.protocol.messages.ways import RelayPlace
from skein.wire.calling import dialled
from skein.wire.channel import Lane
from skein.wire.codec import CARRY_PART
from skein.wire.extra import AnswerCall, CallPeer, CarriedBytes

CHUNK_BYTES = 128 << 10
"""Size of the parts that a connection travels in."""
_LINGER_S = 5.0
"""In which the other end takes what was written before this one ended."""
_CARRY = "/skein.wire.v1.Relay/Carry"

DialRelay = Callable[[RelayPlace, Lane], aio.Channel]
"""Opens a channel to a relay, on a connection of its own."""
CarryCall = aio.StreamStreamCall[bytes, bytes]


async def carry(
    dial: DialRelay,
    relay: RelayPlace,
    first: CallPeer | AnswerCall,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    on_open: Callable[[], None] = lambda: None,
) -> str:
    """Carry what a local connection says and hears, until it ends; why it did, "" where that is nobody's fault.

    `on_open` is called once the other end has sent something.
    """
    reason = ""
    try:
        # A channel of its own: small messages of one connection shall not wait behind bulk of another.
        async with dialled(lambda _, lane: dial(relay, lane), "", Lane.STATE) as channel:
            join: aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(_CARRY, None, None)
            call = join(None)
            await call.write(CARRY_PART.to_bytes(first))
            sending = asyncio.create_task(_send(reader, call))
            try:
                await _receive(call, writer, on_open)
            finally:
                sending.cancel()
                with suppress(asyncio.CancelledError, aio.AioRpcError, asyncio.InvalidStateError, OSError):
                    await sending
    except aio.AioRpcError as error:
        reason = error.details() or error.code().name
    except (RemoteError, OSError) as error:
        reason = str(error)
    finally:
        writer.close()
    return reason


async def _send(reader: asyncio.StreamReader, call: CarryCall) -> None:
    while data := await reader.read(CHUNK_BYTES):
        await call.write(CARRY_PART.to_bytes(CarriedBytes(data=data)))
    await call.done_writing()
    await asyncio.sleep(_LINGER_S)
    call.cancel()


async def _receive(call: CarryCall, writer: asyncio.StreamWriter, on_open: Callable[[], None]) -> None:
    is_open = False
    async for message in call:
        if not is_open:
            is_open = True
            on_open()
        part = CARRY_PART.from_bytes(message)
        if not isinstance(part, CarriedBytes):
            raise RemoteError(f"{type(part).__name__} amid a connection")
        writer.write(part.data)
        await writer.drain()
