"""Requests that are no message of their method: refused with a sentence, where gRPC would print a traceback."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from inspect import isasyncgen, isawaitable
from typing import NoReturn, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from skein.wire.context import Context, Parse
from skein.wire.serving.health import HEALTH_SERVICE

Method: TypeAlias = "grpc.RpcMethodHandler[object, object]"
_WRITTEN_S = 1.0
"""A reader that takes nothing is not waited for any longer."""
Behaviour = Callable[[object, Context], object]
Behaving = Callable[[object, Context], Awaitable[object]]


class _Unreadable:
    """In the place of a message that cannot be read."""


_UNREADABLE = _Unreadable()


class Readable(aio.ServerInterceptor):  # type: ignore[type-arg]
    """Innermost of the interceptors. Ends calls whose requests cannot be read with INVALID_ARGUMENT."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Method]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Method:
        method = cast("Method | None", await continuation(handler_call_details))
        if method is None or method.request_deserializer is None:
            return cast("Method", method)
        name = handler_call_details.method
        is_streaming, parse = method.request_streaming, method.request_deserializer

        def guarded(behaviour: Behaviour) -> Behaving:
            async def read(request: object, context: Context) -> object:
                if request is _UNREADABLE:
                    await refuse_unreadable(context, name)
                if is_streaming:
                    request = _Requests(cast("AsyncIterator[object]", request), context, name)
                return await answer(behaviour(request, context), context)

            return read

        return with_behaviour(method, guarded, _forgiving(parse))


class Around(aio.ServerInterceptor):  # type: ignore[type-arg]
    """Interceptor that has something happen around each behaviour; health is left alone, which has bounds of its own.

    Methods that nobody registered stay so: gRPC answers UNIMPLEMENTED when there is nothing to call.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Method]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Method:
        method, path = (
            cast("Method | None", await continuation(handler_call_details)),
            handler_call_details.method,
        )
        if method is None:
            self.missed()
        if method is None or path.rpartition("/")[0] == HEALTH_SERVICE:
            return cast("Method", method)
        return with_behaviour(method, partial(self.around, path), cast(Parse, method.request_deserializer))

    def around(self, path: str, behaviour: Behaviour) -> Behaving:
        """Behaviour of the method at `path`, as gRPC spells it, within whatever happens around it."""
        raise NotImplementedError

    def missed(self) -> None:
        """Note that a method was asked for that there is not."""


def with_behaviour(
    method: Method,
    guarded: Callable[[Behaviour], Behaving],
    parse: Parse,
) -> Method:
    """A method of the same shape, whose behaviour and whose reading of requests are others."""
    way, back = ("stream" if x else "unary" for x in (method.request_streaming, method.response_streaming))
    make = getattr(grpc, f"{way}_{back}_rpc_method_handler")
    behaviour = cast(Behaviour, getattr(method, f"{way}_{back}"))
    return cast("Method", make(guarded(behaviour), parse, method.response_serializer))


async def answer(answered: object, context: Context) -> object:
    """A behaviour's one reply; or its replies, written one by one."""
    if not isasyncgen(answered):
        return await answered if isawaitable(answered) else answered
    async with aclosing(answered):
        async for message in answered:
            await _write(message, context)
    return None


async def _write(message: object, context: Context) -> None:
    """Reply, written. A call that is cancelled waits for it a little: gRPC takes no status beside a message."""
    writing = asyncio.ensure_future(context.write(message))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait((writing,), timeout=_WRITTEN_S)
        raise


class _Requests:
    """The requests of a stream, up to one that cannot be read: that ends the call."""

    def __init__(self, messages: AsyncIterator[object], context: Context, name: str) -> None:
        self._messages = messages
        self._iterator: AsyncIterator[object] | None = None
        self._context = context
        self._name = name

    def __aiter__(self) -> "_Requests":
        return self

    async def __anext__(self) -> object:
        if self._iterator is None:
            # Not before: gRPC makes something of it that wants to be awaited.
            self._iterator = aiter(self._messages)
        message = await anext(self._iterator)
        if message is _UNREADABLE:
            await refuse_unreadable(self._context, self._name)
        return message


def _forgiving(parse: Parse) -> Parse:
    def read(data: bytes) -> object:
        try:
            return parse(data)
        except DecodeError:
            return _UNREADABLE

    return read


async def refuse_unreadable(context: Context, name: str) -> NoReturn:
    """End a call of the method of that name, whose request cannot be read."""
    text = f"what was sent is no request of {name.rpartition('/')[2]}: another release, or no client of ours"
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
