"""Credentials of processes: an identity for TLS on both sides, or a token sent with every call, or nothing."""

import hmac
import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self, TypeAlias, TypeVar, cast

import grpc
from grpc import aio

from skein.errors import UserError
from skein.wire.context import Parse
from skein.wire.identity.passport import Passport

MIN_LENGTH = 16

_KEY = "authorization"
_HEALTH = "/grpc.health.v1.Health/"

Serialize = Callable[[object], bytes]


def read_token(path: Path) -> str:
    """The token in the file at `path`.

    Raises:
        UserError: unreadable, empty, too short, not printable ASCII, or readable by other users of this machine.
    """
    refused = partial(UserError, "token_file", str(path))
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise refused(f"{error.strerror}; give a file that you can read") from error
    except UnicodeDecodeError as error:
        raise refused("is not plain text; write letters and digits only") from error
    if mode & 0o077:
        raise refused(f"other users can read it; run: chmod 600 {path}")
    if len(token) < MIN_LENGTH:
        needed = f"{MIN_LENGTH} are needed; make one with: openssl rand -hex 32"
        raise refused(f"holds {len(token)} characters, {needed}")
    if not token.isprintable() or " " in token:
        raise refused("holds more than one word; write one line of letters and digits")
    return token


class Wallet:
    """Passport of a process, renewed while that runs; `path`: the file that keeps it."""

    def __init__(self, passport: Passport, path: Path | None = None) -> None:
        self.passport = passport
        self._path = path

    def renew(self, certificate: str) -> None:
        """Open connections with this certificate of the same key from now on."""
        self.take(replace(self.passport, certificate=certificate))

    def take(self, passport: Passport) -> None:
        """Open connections by this passport, with the next certificate of the same key, from now on."""
        self.passport = passport
        if self._path is not None:
            self.passport.save(self._path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Proof that a process shows to whom it calls, and wants to see of its callers.

    With a `wallet` every connection is encrypted, and both ends prove who they are; otherwise a `token`, if any, is
    sent in the clear.
    """

    token: str | None = field(default=None, repr=False)
    wallet: Wallet | None = None

    @classmethod
    def read(cls, token_file: Path | None) -> "Credentials":
        """Credentials from the token file of an operator; None: there is none.

        Raises:
            UserError: see `read_token`.
        """
        return cls(token=None if token_file is None else read_token(token_file))

    def shown_on(self, channel: aio.Channel) -> aio.Channel:
        """`channel`, on which every call carries them."""
        return channel if self.token is None else TokenChannel(channel, self.token)

    def checks(self) -> "list[aio.ServerInterceptor[object, object]]":
        """Interceptors with which a server looks at each call."""
        return [] if self.token is None else [TokenCheck(self.token)]


NO_CREDENTIALS = Credentials()
"""Credentials of processes that show no token and ask for none."""


Shape = TypeVar("Shape", bound=Callable[..., object])


def _carrying(shape: Shape) -> Shape:
    """The calls of one shape on a `TokenChannel`."""

    def call(
        self: "TokenChannel",
        method: str,
        request_serializer: Serialize | None = None,
        response_deserializer: Parse | None = None,
        _registered_method: bool | None = False,
    ) -> object:
        plain = getattr(self.channel, shape.__name__)(method, request_serializer, response_deserializer)
        return partial(plain, metadata=self.metadata)

    return cast("Shape", call)


class TokenChannel(aio.Channel):
    """A channel whose calls carry the token. A call with metadata of its own has to bring the token itself.

    Not a client interceptor: those put a queue and a task of their own into each stream, and change its errors.
    """

    def __init__(self, channel: aio.Channel, token: str) -> None:
        self.channel = channel
        self.metadata = ((_KEY, f"Bearer {token}"),)

    async def __aenter__(self) -> Self:
        await self.channel.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self.channel.__aexit__(kind, error, trace)

    async def close(self, grace: float | None = None) -> None:
        await self.channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.channel.channel_ready()

    unary_unary = _carrying(aio.Channel.unary_unary)
    unary_stream = _carrying(aio.Channel.unary_stream)
    stream_unary = _carrying(aio.Channel.stream_unary)
    stream_stream = _carrying(aio.Channel.stream_stream)


Handler: TypeAlias = "grpc.RpcMethodHandler[object, object]"


class TokenCheck(aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without the token with UNAUTHENTICATED. Health checks need none."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler_call_details.method.startswith(_HEALTH) or self._is_known(handler_call_details):
            return handler
        # Whatever its shape, nothing that is sent is waited for.
        return cast("Handler", grpc.stream_stream_rpc_method_handler(_refuse))

    def _is_known(self, details: grpc.HandlerCallDetails) -> bool:
        given = [value for key, value in details.invocation_metadata if key == _KEY]
        return len(given) == 1 and hmac.compare_digest(str(given[0]).encode(), self._expected)


async def _refuse(_request: object, context: aio.ServicerContext[object, object]) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")
