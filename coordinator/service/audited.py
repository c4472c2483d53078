"""Calls that the audit log has: all that change something, and all that failed for want of a right."""

import asyncio
from functools import partial
from typing import Final

import grpc
from grpc import aio

from coordinator.records.audit import AuditLog
from skein.errors import LocalError, SkeinError
from skein.wire.context import Context
from skein.wire.failures import aborted_with
from skein.wire.identity.names import caller_of
from skein.wire.serving.hosts import host_of
from skein.wire.serving.reading import Around, Behaving, Behaviour, answer

QUIET: Final = frozenset(
    {
        "Control/Session",
        "Jobs/List",
        "Jobs/Get",
        "Jobs/Watch",
        "Jobs/Workers",
        "Jobs/Version",
        "Jobs/Links",
        "Jobs/ListIncidents",
        "Checkpoint/Put",
        "Checkpoint/Get",
        "Checkpoint/Manifest",
        "Checkpoint/List",
        "Identities/ListIdentities",
        "Identities/ListRevoked",
    }
)
"""Methods that only look, that carry data for what was noted before, or of whose callers the machine tells."""
_NO_RIGHT = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_ABOUT = ("job", "from_job", "worker", "role", "name", "namespace", "token", "key")
"""Fields of requests and replies that say what a call is about; none of them is secret."""


class Audited(Around):
    """Inside of what makes a status of errors, outside of what looks who calls. A method that is new is noted."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit

    def around(self, path: str, behaviour: Behaviour) -> Behaving:
        return partial(self._answer, path.rpartition(".")[2], behaviour)

    async def _answer(self, method: str, behaviour: Behaviour, request: object, context: Context) -> object:
        try:
            reply = await answer(behaviour(request, context), context)
        except asyncio.CancelledError:
            if method not in QUIET and self._audit.has_room(host_of(context.peer())):
                # Not waited for, because this call is over. To break one off costs nothing, with or without a right.
                _ = self._note(method, context, _about(request), "broken off: it may have been done")
            raise
        except aio.AbortError:
            if method not in QUIET or aborted_with(context) in _NO_RIGHT:
                await self._note_refusal(method, context, request, str(context.details()))
            raise
        except SkeinError as error:
            if method not in QUIET:
                await self._note_refusal(method, context, request, str(error))
            raise
        if method not in QUIET:
            try:
                await self._note(method, context, _about(request, reply), "done")
            except OSError as error:
                raise LocalError(f"done, but the audit log cannot be written: {error.strerror}") from error
        return reply

    async def _note_refusal(self, method: str, context: Context, request: object, reason: str) -> None:
        if self._audit.has_room(host_of(context.peer())):
            # A failure is told by whoever writes; the caller is refused in any case.
            noting = self._note(method, context, _about(request), f"refused: {reason}")
            await asyncio.wait({noting})

    def _note(self, method: str, context: Context, what: str, outcome: str) -> asyncio.Future[None]:
        caller = caller_of(context)
        return self._audit.note(
            "nobody" if caller is None else f"{caller.role} {caller.name}",
            method.partition("/")[2],
            what,
            outcome,
            namespace="" if caller is None else caller.namespace,
            host=host_of(context.peer()),
        )


def _about(*messages: object) -> str:
    """Fields that say what a call is about, each once."""
    found = ((name, getattr(message, name, "")) for message in messages for name in _ABOUT)
    return " ".join(
        dict.fromkeys(f"{name}={value}" for name, value in found if isinstance(value, str) and value)
    )
