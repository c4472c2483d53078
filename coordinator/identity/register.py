"""Memory of an authority: tokens, whom it made certificates out for, and who is revoked. Durable, or not said.

Rules of this file
- A token's use is on disk before the certificate leaves; its secret is kept as a digest.
- Coordinators that share a state directory share the register: SQLite lets one of them write at a time.
- While a certificate counts, its name belongs to its key; a name that was revoked is free again when that has ended.
- Who calls is looked up on the loop, by a connection of its own: nobody waits for what another writes.
"""

import hashlib
import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from hmac import compare_digest
from pathlib import Path
from threading import Lock

from coordinator.records.logfile import journal_mode
from skein.errors import LocalError, UserError
from skein.wire.identity.authority import LIFE_S
from skein.wire.identity.names import Caller, CallerRole, check_name
from skein.wire.identity.passport import utc_text

FILE = "register.sqlite3"
RENEWABLE_S = 30 * 86400.0
"""Seconds after its end within which a certificate is renewed: a laptop may be closed for so long."""
_BUSY_S = 10.0
_TABLES = """
CREATE TABLE IF NOT EXISTS tokens (
    id TEXT PRIMARY KEY, digest TEXT NOT NULL, role TEXT NOT NULL, namespace TEXT NOT NULL,
    ends_s REAL NOT NULL, uses INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS identities (
    role TEXT NOT NULL, name TEXT NOT NULL, namespace TEXT NOT NULL, key TEXT NOT NULL, token TEXT NOT NULL,
    since_s REAL NOT NULL, ends_s REAL NOT NULL, revoked_s REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (role, name)
);
"""

_COLUMNS = "role, name, namespace, key, token, since_s, ends_s, revoked_s"
_ALL = f"SELECT {_COLUMNS} FROM identities ORDER BY since_s, name"  # noqa: S608 - of ours alone
_ONE = f"SELECT {_COLUMNS} FROM identities WHERE role = ? AND name = ?"  # noqa: S608 - of ours alone


class NotAdmittedError(UserError):
    """A token or certificate that does not let anybody in, or not any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """An identity as the register has it; `revoked_s` 0: it is not revoked."""

    caller: Caller
    key: str
    token: str
    since_s: float
    ends_s: float
    revoked_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """A token as it leaves: its id, and the secret that nobody keeps."""

    id: str
    secret: str = field(repr=False)
    ends_s: float


class Register:
    """The register in a folder; made where there is none."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / FILE
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        self._lock = Lock()
        self._database = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        mode = journal_mode(folder, Path("/proc/self/mounts").read_text())
        self._database.execute(f"PRAGMA journal_mode = {mode}")
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.executescript(_TABLES)
        self._looking = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        self._looking_lock = Lock()

    def close(self) -> None:
        """Let go of the file, once whoever is at it is done."""
        with self._lock:
            self._database.close()
        with self._looking_lock:
            self._looking.close()

    def new_token(
        self, role: CallerRole, namespace: str, *, life_s: float, uses: int, now_s: float
    ) -> NewToken:
        """Another token for so many identities.

        Raises:
            UserError: such a token makes no sense.
        """
        if role is CallerRole.COORDINATOR:
            raise UserError("role", role.value, "give worker, submitter, viewer or admin")
        check_name("namespace", namespace)
        if not 1 <= life_s <= 366 * 86400:
            raise UserError("ttl", life_s, "give a duration from a second to a year, such as 1 h")
        if not 1 <= uses <= 10_000:
            raise UserError("uses", uses, "give a whole number from 1 to 10000")
        token = NewToken(id=secrets.token_hex(8), secret=secrets.token_urlsafe(32), ends_s=now_s + life_s)
        with self._change() as database:
            row = (token.id, _digest(token.secret), role.value, namespace, token.ends_s, uses)
            database.execute("INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?)", row)
        return token

    def admit(self, token: str, secret: str, name: str, key: str, *, now_s: float) -> Caller:
        """The caller that a token makes of whoever has `key`; the use counts from now on.

        Raises:
            UserError: the token is none, has ended or is used up, or the name is another's.
        """
        check_name("name", name)
        with self._change() as database:
            found = database.execute(
                "SELECT digest, role, namespace, ends_s, uses FROM tokens WHERE id = ?", (token,)
            ).fetchone()
            if found is None or not compare_digest(found[0], _digest(secret)):
                raise NotAdmittedError("token", token[:64], f"is not known here; {_anew('...')}")
            _, role, namespace, ends_s, uses = found
            caller = Caller(name=name, role=CallerRole(role), namespace=namespace)
            if now_s >= ends_s:
                raise NotAdmittedError("token", token, f"ended at {utc_text(ends_s)}; {_anew(role)}")
            before = self._find(database, caller.role, name)
            if before is not None and before.key == key and before.token == token and not before.revoked_s:
                # It counts anew from now on, and so does the name.
                self._renew(database, caller, now_s=now_s)
                return caller
            if uses < 1:
                raise NotAdmittedError("token", token, f"is used up; {_anew(role)}")
            if before is not None and now_s < before.ends_s:
                why = "was revoked" if before.revoked_s else "belongs to another key"
                hint = f"{why} until {utc_text(before.ends_s)}; give another name, or come back then"
                raise NotAdmittedError("name", name, hint)
            database.execute("UPDATE tokens SET uses = uses - 1 WHERE id = ?", (token,))
            self._enter(database, caller, key, token, now_s=now_s)
        return caller

    def enter(self, caller: Caller, key: str, *, now_s: float) -> None:
        """Note an identity that the coordinator's own machine made out, in the place of an older one."""
        with self._change() as database:
            self._enter(database, caller, key, "", now_s=now_s)

    def may_enter(self, caller: Caller) -> bool:
        """Whether the coordinator's own machine may make an identity out: nobody else has it, nor had until revoked."""
        with self._lock:
            found = self._find(self._database, caller.role, caller.name)
        return found is None or not (found.revoked_s or found.token)

    def renew(self, caller: Caller, key: str, *, now_s: float) -> Caller:
        """The caller as it is registered, whose next certificate counts from now on.

        Raises:
            UserError: the identity is not known, another's by now, revoked, or has ended long ago.
        """
        with self._change() as database:
            found = self._find(database, caller.role, caller.name)
            if found is None or found.key != key:
                raise NotAdmittedError("identity", caller.name, f"is not known here; {_anew(caller.role)}")
            if found.revoked_s:
                hint = f"was revoked at {utc_text(found.revoked_s)}; {_anew(caller.role)}"
                raise NotAdmittedError("identity", caller.name, hint)
            if now_s > found.ends_s + RENEWABLE_S:
                hint = f"ended at {utc_text(found.ends_s)}; {_anew(caller.role)}"
                raise NotAdmittedError("identity", caller.name, hint)
            self._renew(database, caller, now_s=now_s)
        return found.caller

    def revoke(self, role: CallerRole, name: str, *, now_s: float) -> Registered:
        """The identity, revoked from now on if it was not before.

        Raises:
            UserError: there is none.
        """
        with self._change() as database:
            found = self._find(database, role, name)
            if found is None:
                raise UserError("identity", f"{role.value} {name}", "is not known; see skein identity list")
            if not found.revoked_s:
                database.execute(
                    "UPDATE identities SET revoked_s = ? WHERE role = ? AND name = ?",
                    (now_s, role.value, name),
                )
            revoked = self._find(database, role, name)
        assert revoked is not None
        return revoked

    def is_revoked(self, caller: Caller) -> bool:
        """Whether a caller with a certificate of this authority is refused all the same."""
        if caller.role is CallerRole.COORDINATOR:
            return False
        with self._looking_lock:
            found = self._find(self._looking, caller.role, caller.name)
        return found is None or bool(found.revoked_s)

    def identities(self) -> tuple[Registered, ...]:
        """All identities, oldest first."""
        with self._lock:
            rows = self._database.execute(_ALL).fetchall()
        return tuple(map(_registered, rows))

    # --- inside ---

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """A transaction; it is on disk when this ends, or has not been.

        Raises:
            LocalError: the disk takes nothing, or another coordinator was at it for too long.
        """
        try:
            with self._lock, self._database as database:
                database.execute("BEGIN IMMEDIATE")
                yield database
        except sqlite3.Error as error:
            raise LocalError(f"the register of identities cannot be written ({error})") from error

    def _find(self, database: sqlite3.Connection, role: CallerRole, name: str) -> Registered | None:
        with closing(database.execute(_ONE, (role.value, name))) as found:
            row = found.fetchone()
        return None if row is None else _registered(row)

    def _renew(self, database: sqlite3.Connection, caller: Caller, *, now_s: float) -> None:
        database.execute(
            "UPDATE identities SET ends_s = ? WHERE role = ? AND name = ?",
            (now_s + LIFE_S, caller.role.value, caller.name),
        )

    def _enter(
        self, database: sqlite3.Connection, caller: Caller, key: str, token: str, *, now_s: float
    ) -> None:
        row = (caller.role.value, caller.name, caller.namespace, key, token, now_s, now_s + LIFE_S, 0)
        database.execute("INSERT OR REPLACE INTO identities VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)


def _registered(row: tuple[str, str, str, str, str, float, float, float]) -> Registered:
    role, name, namespace, key, token, since_s, ends_s, revoked_s = row
    return Registered(
        caller=Caller(name=name, role=CallerRole(role), namespace=namespace),
        key=key,
        token=token,
        since_s=since_s,
        ends_s=ends_s,
        revoked_s=revoked_s,
    )


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _anew(role: str) -> str:
    return f"get another line from an admin: skein token create --role {role}"
