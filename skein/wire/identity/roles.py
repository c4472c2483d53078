"""Table of roles and methods: who may call what. A method that is not in it is refused to everybody."""

from collections.abc import Mapping
from typing import Final

from skein.wire.identity.names import Caller, CallerRole

_PACKAGE: Final = "/skein.wire.v1."

_ADMINS = frozenset({CallerRole.ADMIN})
_WORKERS = frozenset({CallerRole.WORKER})
_SUBMITTERS = _ADMINS | {CallerRole.SUBMITTER}
_VIEWERS = _SUBMITTERS | {CallerRole.VIEWER}

ROLES: Final[Mapping[str, frozenset[CallerRole]]] = {
    "Control/Session": _WORKERS,
    "Jobs/Submit": _SUBMITTERS,
    "Jobs/List": _VIEWERS,
    "Jobs/Get": _VIEWERS,
    "Jobs/Watch": _VIEWERS,
    "Jobs/Cancel": _SUBMITTERS,
    "Jobs/Pause": _SUBMITTERS,
    "Jobs/Resume": _SUBMITTERS,
    "Jobs/Workers": _VIEWERS,
    "Jobs/Drain": _ADMINS,
    "Jobs/Measure": _ADMINS,
    "Jobs/Version": frozenset(CallerRole),
    "Jobs/Links": _VIEWERS,
    "Jobs/ListIncidents": _VIEWERS,
    "Jobs/OpenPage": _VIEWERS,
    "Checkpoint/Put": _WORKERS,
    "Checkpoint/Get": _WORKERS | _SUBMITTERS,
    "Checkpoint/Manifest": _WORKERS | _SUBMITTERS,
    "Checkpoint/List": _VIEWERS,
    "Checkpoint/Verify": _SUBMITTERS,
    "Checkpoint/Delete": _SUBMITTERS,
    "Enrol/Enrol": frozenset(CallerRole),
    "Enrol/Renew": frozenset(CallerRole),
    "Identities/CreateToken": _ADMINS,
    "Identities/ListIdentities": _ADMINS,
    "Identities/Revoke": _ADMINS,
    "Identities/ListRevoked": _WORKERS,
    "Peer/Deliver": _WORKERS,
    "Peer/FetchState": _WORKERS,
    "Peer/Probe": _WORKERS,
    "Relay/Listen": _WORKERS,
    "Relay/Carry": _WORKERS,
}
"""Roles that may call a method, by Service/Method."""


def why_barred(caller: Caller, method: str) -> str | None:
    """Reason why somebody may not call `method`, as gRPC spells it (/package.Service/Method); None if they may.

    >>> why_barred(Caller(name="ada", role=CallerRole.VIEWER), "/skein.wire.v1.Jobs/Drain")
    'viewer ada may not call Drain, which is for: admin'
    >>> why_barred(Caller(name="ada", role=CallerRole.ADMIN), "/skein.wire.v1.Jobs/Drain")
    """
    allowed = ROLES.get(method.removeprefix(_PACKAGE), frozenset())
    if caller.role in allowed:
        return None
    wanted = ", ".join(sorted(allowed)) or "nobody"
    return f"{caller.role} {caller.name} may not call {method.rpartition('/')[2]}, which is for: {wanted}"
