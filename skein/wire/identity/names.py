"""Names that certificates carry, and who a caller is by them: the one answer to who is asking."""

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum

from skein.errors import UserError
from skein.types import DEFAULT_NAMESPACE, WORKER_NAME_PATTERN, WorkerId
from skein.wire.context import Context

_SCHEME = "skein://"


class CallerRole(StrEnum):
    """Part that a caller has in a cluster; what each may do is a table's business."""

    COORDINATOR = "coordinator"
    WORKER = "worker"
    SUBMITTER = "submitter"
    VIEWER = "viewer"
    ADMIN = "admin"


_OF_ALL = frozenset({CallerRole.COORDINATOR, CallerRole.WORKER, CallerRole.ADMIN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A party, as a certificate names it; `namespace` is where the jobs are that it has to do with."""

    name: str
    role: CallerRole
    namespace: str = DEFAULT_NAMESPACE

    @property
    def uri(self) -> str:
        """The caller as a certificate's name.

        >>> Caller(name="a", role=CallerRole.WORKER).uri
        'skein://worker/a?namespace=default'
        """
        return f"{_SCHEME}{self.role}/{self.name}?namespace={self.namespace}"

    @property
    def host(self) -> str:
        """Host name that stands for who this is, whatever the address: what a connection to it asks for."""
        # A digest, for host names do not tell upper from lower case, and know no underscores.
        return f"{hashlib.sha256(f'{self.role}/{self.name}'.encode()).hexdigest()[:40]}.skein"

    @property
    def scope(self) -> str | None:
        """Namespace whose jobs are there for this caller; None: those of all, for who runs or works for the whole."""
        return None if self.role in _OF_ALL else self.namespace

    def sees(self, namespace: str) -> bool:
        """Whether jobs of a namespace are there for this caller.

        >>> roles = CallerRole.VIEWER, CallerRole.ADMIN
        >>> [Caller(name="ada", role=role, namespace="lab").sees("mill") for role in roles]
        [False, True]
        """
        return self.scope in (None, namespace)

    @classmethod
    def parse(cls, uri: str) -> "Caller | None":
        """The caller of a certificate's name; None where it is none of ours.

        >>> Caller.parse("skein://viewer/me?namespace=lab")
        Caller(name='me', role=<CallerRole.VIEWER: 'viewer'>, namespace='lab')
        """
        found = re.fullmatch(rf"{_SCHEME}([a-z]+)/([^/?]+)\?namespace=([^/?]+)", uri)
        if found is None or found[1] not in set(CallerRole):
            return None
        return cls(name=found[2], role=CallerRole(found[1]), namespace=found[3])


COORDINATOR = Caller(name="coordinator", role=CallerRole.COORDINATOR)
"""The coordinator that leads, and those that stand by: they share a state directory, and so an authority."""
# No certificate can be had under this name: whoever had one could not be revoked, nor be held to a name.
LOCAL = Caller(name="(local)", role=CallerRole.ADMIN)
"""The caller where no certificates are asked for: on loopback, or where the operator said that it is well so."""


def worker_caller(worker: WorkerId | str) -> Caller:
    """The worker of that name, as one dials it; its namespace does not matter there."""
    return Caller(name=worker, role=CallerRole.WORKER)


def is_worker(caller: Caller | None, worker: WorkerId) -> bool:
    """Whether a caller may speak for a worker: nobody but itself, where there are certificates.

    >>> [is_worker(x, WorkerId("a")) for x in (worker_caller("a"), worker_caller("b"), LOCAL, None)]
    [True, False, True, False]
    """
    return caller == LOCAL or (caller is not None and caller.host == worker_caller(worker).host)


def check_name(field: str, name: str) -> str:
    """`name`, if it can be somebody's.

    Raises:
        UserError: it cannot; the error names `field`.
    """
    if re.fullmatch(WORKER_NAME_PATTERN, name) is None:
        raise UserError(field, name[:64], "use up to 64 letters, digits, dots, dashes and underscores")
    return name


def caller_of(context: Context) -> Caller | None:
    """The caller of a call; `LOCAL` on a connection without certificates, None where the certificate names nobody."""
    shown = context.auth_context()
    if b"ssl" not in shown.get("transport_security_type", ()):
        return LOCAL
    names = (value.decode(errors="replace") for value in shown.get("x509_subject_alternative_name", ()))
    return next((caller for caller in map(Caller.parse, names) if caller is not None), None)
