"""Callers, looked at before any call is: nobody without a name, nobody who is revoked, nobody beyond a role."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import grpc

from skein.wire.context import Context
from skein.wire.identity.names import LOCAL, Caller, CallerRole, caller_of
from skein.wire.identity.roles import why_barred
from skein.wire.serving.reading import Around, Behaving, Behaviour, answer

NAMELESS = "no certificate: join with a line from skein token create"


class NamedCallers(Around):
    """Ends calls of whom no certificate names, and of whom `is_revoked` says so, with UNAUTHENTICATED.

    What the table of roles leaves out ends with PERMISSION_DENIED.
    """

    def __init__(self, is_revoked: Callable[[Caller], bool] = lambda _: False) -> None:
        self._is_revoked = is_revoked
        self._calls: dict[tuple[CallerRole, str], set[asyncio.Task[object]]] = defaultdict(set)

    def end(self, caller: Caller) -> None:
        """End all calls that go on of somebody who has been revoked."""
        for call in self._calls.get((caller.role, caller.name), ()):
            call.cancel()

    def around(self, path: str, behaviour: Behaviour) -> Behaving:
        return partial(self._answer, path, behaviour)

    async def _answer(self, method: str, behaviour: Behaviour, request: object, context: Context) -> object:
        caller = caller_of(context)
        if caller is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, NAMELESS)
        if caller != LOCAL and self._is_revoked(caller):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, revoked_text(caller))
        if (reason := why_barred(caller, method)) is not None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
        call, key = asyncio.current_task(), (caller.role, caller.name)
        assert call is not None
        self._calls[key].add(call)
        try:
            return await answer(behaviour(request, context), context)
        except asyncio.CancelledError:
            if caller == LOCAL or not self._is_revoked(caller):
                raise
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, revoked_text(caller))
        finally:
            self._calls[key].discard(call)
            if not self._calls[key]:
                del self._calls[key]


def revoked_text(caller: Caller) -> str:
    """Refusal of a caller who has been revoked."""
    return (
        f"{caller.role} {caller.name} was revoked: "
        "join anew, by another name, with a line from skein token create"
    )
