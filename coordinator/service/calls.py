"""Rules that hold for every call: errors become a status by one table, and each refusal is counted by its reason."""

import asyncio
from collections.abc import Callable

import grpc
from grpc import aio

from skein.errors import SkeinError, UserError
from skein.protocol.coordinator.quotas import OverQuotaError
from skein.storage.outside import NoRoomError
from skein.wire.context import Context
from skein.wire.failures import aborted_with, refuse, status_of
from skein.wire.serving.reading import Around, Behaving, Behaviour, answer


class NotFoundError(UserError):
    """A job, worker or file that nobody has heard of."""


class BusyError(UserError):
    """A limit is reached; later it may work."""


MAX_CALLS = 8192
"""Calls at once, control streams included; one more is told RESOURCE_EXHAUSTED."""

_CODES: tuple[tuple[type[SkeinError], grpc.StatusCode], ...] = (
    (NotFoundError, grpc.StatusCode.NOT_FOUND),
    (BusyError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (OverQuotaError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NoRoomError, grpc.StatusCode.RESOURCE_EXHAUSTED),
)
"""Rows that the services add to the table of `skein.wire.failures`."""

CountRefusal = Callable[[str, str], None]
"""Told (method, reason) of a call that failed; the method is one of ours, or "unknown"."""


class Calls(Around):
    """Outermost of the interceptors. Methods that nobody registered stay unimplemented: deny by default."""

    def __init__(self, count: CountRefusal) -> None:
        self._count = count
        self._num_calls = 0

    def missed(self) -> None:
        self._count("unknown", "unimplemented")

    def around(self, path: str, behaviour: Behaviour) -> Behaving:
        name = path.rpartition("/")[2]

        async def guarded(request: object, context: Context) -> object:
            reason: str | None = "internal"
            if self._num_calls >= MAX_CALLS:
                self._count(name, "resource_exhausted")
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_CALLS} calls are running already"
                )
            self._num_calls += 1
            try:
                reply = await answer(behaviour(request, context), context)
                reason = None
                return reply
            except asyncio.CancelledError:
                reason = None
                raise
            except aio.AbortError:
                code = aborted_with(context)
                reason = "unknown" if code is None else code.name.lower()
                raise
            except SkeinError as error:
                status = next((code for kind, code in _CODES if isinstance(error, kind)), status_of(error))
                # Before the caller hears of it: who was refused may ask for the count.
                self._count(name, status.name.lower())
                reason = None
                await refuse(context, error, status)
            finally:
                self._num_calls -= 1
                if reason is not None:
                    self._count(name, reason)

        return guarded
