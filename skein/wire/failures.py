"""Errors that cross a process border: the status that they become, and what a status says to a person."""

from collections.abc import Iterable
from typing import NoReturn, cast

import grpc
from grpc import aio

import skein
from skein.errors import LocalError, RemoteError, SkeinError, UserError

_STATUS_BY_ERROR: tuple[tuple[type[SkeinError], grpc.StatusCode], ...] = (
    (UserError, grpc.StatusCode.INVALID_ARGUMENT),
    (RemoteError, grpc.StatusCode.FAILED_PRECONDITION),
    (LocalError, grpc.StatusCode.INTERNAL),
)
_FIELD, _VALUE, _HINT = "skein-field-bin", "skein-value-bin", "skein-hint-bin"
_MAX_VALUE_CHARACTERS = 200

_CAUSES: tuple[tuple[grpc.StatusCode, str, str], ...] = (
    (
        grpc.StatusCode.UNAUTHENTICATED,
        "",
        "the token is missing or wrong: give the token file of that coordinator",
    ),
    (
        grpc.StatusCode.UNIMPLEMENTED,
        "",
        f"another release runs there, here runs {skein.__version__}: upgrade the older",
    ),
    (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "",
        "no answer in time: check that it is up and that no firewall is between",
    ),
    (grpc.StatusCode.UNAVAILABLE, "refused", "nothing listens there: start it, or check host and port"),
    (grpc.StatusCode.UNAVAILABLE, "resolving", "no such host: check the name"),
    (grpc.StatusCode.UNAVAILABLE, "DNS", "no such host: check the name"),
    (grpc.StatusCode.UNAVAILABLE, "lookup", "no such host: check the name"),
    (grpc.StatusCode.UNAVAILABLE, "HTTP/2", "what listens there does not speak gRPC: check the port"),
    (grpc.StatusCode.UNAVAILABLE, "http1", "what listens there does not speak gRPC: check the port"),
    (
        grpc.StatusCode.UNAVAILABLE,
        "unreachable",
        "no route to that host: check the address and this machine's network",
    ),
    (grpc.StatusCode.UNAVAILABLE, "timed out", "no connection in time: check the address and firewalls"),
    (
        grpc.StatusCode.UNAVAILABLE,
        "ping",
        "the connection fell silent: check that it is up and the link between",
    ),
    (
        grpc.StatusCode.UNAVAILABLE,
        "keepalive",
        "the connection fell silent: check that it is up and the link between",
    ),
    (grpc.StatusCode.UNAVAILABLE, "", "the connection broke: check that it is still up"),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "", "a limit there was reached"),
)


def status_of(error: SkeinError) -> grpc.StatusCode:
    """The gRPC status that `error` becomes."""
    return next((code for kind, code in _STATUS_BY_ERROR if isinstance(error, kind)), grpc.StatusCode.UNKNOWN)


async def refuse(
    context: aio.ServicerContext[object, object], error: SkeinError, code: grpc.StatusCode | None = None
) -> NoReturn:
    """Ends the call with `error`; the other side gets it back from `error_of`."""
    trailer: tuple[tuple[str, bytes], ...] = ()
    if isinstance(error, UserError):
        shown = str(error.value)[:_MAX_VALUE_CHARACTERS]
        trailer = ((_FIELD, error.field.encode()), (_VALUE, shown.encode()), (_HINT, error.hint.encode()))
    await context.abort(code or status_of(error), str(error), trailer)


def error_of(error: aio.AioRpcError, target: str) -> SkeinError:
    """Error that a failed call to `target` is here: the `UserError` raised there, or a `RemoteError` in words."""
    entries = cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ())
    trailer = {key: value for key, value in entries if isinstance(value, bytes)}
    if trailer.keys() >= {_FIELD, _VALUE, _HINT}:
        return UserError(*(trailer[key].decode(errors="replace") for key in (_FIELD, _VALUE, _HINT)))
    return RemoteError(describe_rpc_error(error, target))


def describe_rpc_error(error: aio.AioRpcError, target: str) -> str:
    """Description of a failure in one line: which target, what happened, what to do."""
    details = " ".join((error.details() or "").split())
    code = error.code()
    for known, part, cure in _CAUSES:
        if code is known and part.lower() in details.lower():
            return f"{target}: {cure}" + (f" ({details})" if not part and details not in cure else "")
    return f"{target}: {code.name.lower().replace('_', ' ')}: {details or 'no details given'}"
