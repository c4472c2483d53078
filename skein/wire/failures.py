"""Errors that cross a process border: the status that they become, and what a status says to a person."""

from collections.abc import Iterable, Sequence
from typing import NoReturn, TypeAlias, cast

import grpc
from grpc import aio

import skein
from skein.errors import LocalError, RemoteError, SkeinError, UserError
from skein.wire.context import Context

_Code: TypeAlias = grpc.StatusCode
_STATUS_BY_ERROR: tuple[tuple[type[SkeinError], grpc.StatusCode], ...] = (
    (UserError, _Code.INVALID_ARGUMENT),
    (RemoteError, _Code.FAILED_PRECONDITION),
    (LocalError, _Code.INTERNAL),
)
_FIELD, _VALUE, _HINT = "skein-field-bin", "skein-value-bin", "skein-hint-bin"
_MAX_VALUE_CHARACTERS = 200

_CAUSES: tuple[tuple[grpc.StatusCode, Sequence[str], str], ...] = (
    (_Code.UNAUTHENTICATED, (), "who calls is not let in"),
    (
        _Code.UNIMPLEMENTED,
        (),
        f"another release runs there, here runs {skein.__version__}: upgrade the older",
    ),
    (_Code.DEADLINE_EXCEEDED, (), "no answer in time: check that it is up and that no firewall is between"),
    (_Code.UNAVAILABLE, ("refused",), "nothing listens there: start it, or check host and port"),
    (_Code.UNAVAILABLE, ("resolving", "dns", "lookup"), "no such host: check the name"),
    (_Code.UNAVAILABLE, ("http/2", "http1"), "what listens there does not speak gRPC: check the port"),
    (
        _Code.UNAVAILABLE,
        ("unreachable",),
        "no route to that host: check the address and this machine's network",
    ),
    (_Code.UNAVAILABLE, ("timed out",), "no connection in time: check the address and firewalls"),
    (
        _Code.UNAVAILABLE,
        ("ping", "keepalive"),
        "the connection fell silent: check that it is up and the link between",
    ),
    (
        _Code.UNAVAILABLE,
        ("socket closed", "handshake", "certificate"),
        "it hung up: no certificate here is in force there. Join by a line from skein token create; if this machine "
        "has joined before, one of the two clocks may be off: skein doctor compares them",
    ),
    (_Code.UNAVAILABLE, (), "the connection broke: check that it is still up"),
    (_Code.RESOURCE_EXHAUSTED, (), "a limit there was reached"),
)
"""Status, words of which its details have one (none: any details), and what a person can do about it."""


def status_of(error: SkeinError) -> grpc.StatusCode:
    """The gRPC status that `error` becomes."""
    return next((code for kind, code in _STATUS_BY_ERROR if isinstance(error, kind)), grpc.StatusCode.UNKNOWN)


def aborted_with(context: Context) -> grpc.StatusCode | None:
    """The status that a call was aborted with, which gRPC has as itself or as its number."""
    code = cast("grpc.StatusCode | int | None", context.code())
    return next((known for known in grpc.StatusCode if code in (known, known.value[0])), None)


async def refuse(context: Context, error: SkeinError, code: grpc.StatusCode | None = None) -> NoReturn:
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
    for known, words, cure in _CAUSES:
        if code is known and (not words or any(word in details.lower() for word in words)):
            return f"{target}: {cure}" + (f" ({details})" if not words and details not in cure else "")
    return f"{target}: {code.name.lower().replace('_', ' ')}: {details or 'no details given'}"
