"""The office of a coordinator that makes certificates out: authority and register together, and its own identity."""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import NoReturn

from coordinator.identity.register import Register, Registered
from coordinator.lead.addresses import SharedAddresses
from skein.errors import SkeinError
from skein.types import DEFAULT_NAMESPACE
from skein.wire.credentials import Credentials, Wallet
from skein.wire.identity.authority import Authority, key_name, requested_key
from skein.wire.identity.callers import NamedCallers
from skein.wire.identity.joining import JoinLine
from skein.wire.identity.names import COORDINATOR, Caller, CallerRole
from skein.wire.identity.passport import Passport, load_key

FOLDER = "authority"
ADMIN_FILE = "admin.json"
ADMIN = Caller(name="admin", role=CallerRole.ADMIN)
"""The identity that whoever can read the state directory has; once that was revoked it is admin-2, and so on."""
_LOOK_S = 60.0
_log = logging.getLogger("coordinator")


class IdentityOffice:
    """Makes certificates out for those who have tokens, and keeps the coordinator's own fresh.

    Args:
        folder: of the authority, below the state directory; it is made where there is none.
        shared: addresses of all coordinators with this state directory.
        clock: gives Unix time.
    """

    def __init__(
        self, folder: Path, shared: SharedAddresses, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self.authority = Authority.kept_in(folder, now_s=clock())
        self.register = Register(folder)
        self.wallet = Wallet(self.authority.make_out(COORDINATOR, now_s=clock()))
        self.named = NamedCallers(self.register.is_revoked)
        self._admin_file = folder / ADMIN_FILE
        self._shared = shared
        self._is_leading = False
        self._ends_s: dict[str, float] = {}

    def lead(self) -> None:
        """Make lines out from now on, and the identity of whoever can read the folder."""
        self._is_leading = True
        self._make_admin()

    def addresses(self) -> tuple[str, str]:
        """Addresses of all coordinators and of where they enrol, with commas between: this one's first; "" unknown."""
        known = self._shared.known()
        return ",".join(one.address for one in known), ",".join(one.enrol_address for one in known)

    @property
    def credentials(self) -> Credentials:
        """Credentials of the coordinator itself."""
        return Credentials(wallet=self.wallet)

    def close(self) -> None:
        """Close the register."""
        self.register.close()

    def enrol(self, token: str, secret: str, name: str, request: bytes) -> str:
        """A first certificate.

        Raises:
            UserError: the token or the name is not good for it.
        """
        key, now_s = key_name(requested_key(request)), self._clock()
        caller = self.register.admit(token, secret, name, key, now_s=now_s)
        return self.authority.certify(request, caller, now_s=now_s)

    def renew(self, certificate: str, request: bytes) -> str:
        """The next certificate of somebody.

        Raises:
            UserError: the last one is none of this authority's, or the identity has ended.
        """
        caller, key = self.authority.caller_of(certificate)
        asked, now_s = key_name(requested_key(request)), self._clock()
        known = self.register.renew(caller, asked if key_name(key) == asked else "", now_s=now_s)
        return self.authority.certify(request, known, now_s=now_s)

    def new_line(
        self, role: CallerRole, namespace: str, *, life_s: float, uses: int
    ) -> tuple[JoinLine, float]:
        """A line to paste, and the Unix time at which it ends.

        Raises:
            UserError: such a token makes no sense.
        """
        addresses, enrol_addresses = self.addresses()
        token = self.register.new_token(
            role, namespace or DEFAULT_NAMESPACE, life_s=life_s, uses=uses, now_s=self._clock()
        )
        line = JoinLine(
            addresses=addresses,
            enrol_addresses=enrol_addresses,
            authority=self.authority.pem,
            token=token.id,
            secret=token.secret,
            role=role.value,
        )
        return line, token.ends_s

    def revoke(self, role: CallerRole, name: str) -> Registered:
        """The identity, revoked; where it was that of the folder, another one lies there.

        Raises:
            UserError: there is none.
        """
        revoked = self.register.revoke(role, name, now_s=self._clock())
        if role is CallerRole.ADMIN and self._is_leading:
            self._try(self._make_admin)
        return revoked

    def revoked(self) -> tuple[Registered, ...]:
        """Identities that are revoked, and have a certificate that would still count."""
        now_s = self._clock()
        return tuple(one for one in self.register.identities() if one.revoked_s and one.ends_s > now_s)

    def left_s(self, workers: Collection[str]) -> dict[tuple[str, str], float]:
        """Seconds for which certificates count, by role and name: of these workers, and what they depend on."""
        now_s = self._clock()
        ends_s = {("worker", name): self._ends_s[name] for name in sorted(self._ends_s.keys() & workers)}
        ends_s["authority", "skein"] = self.authority.certificate.not_valid_after_utc.timestamp()
        ends_s["coordinator", COORDINATOR.name] = self.wallet.passport.ends_s
        return {about: end_s - now_s for about, end_s in ends_s.items()}

    async def keep(self) -> NoReturn:
        """Renew the coordinator's own certificate, and the admin's beside it, when a third of its life is left."""
        while True:
            await asyncio.sleep(_LOOK_S)
            # On a thread: a disk that takes its time must not cost the lease.
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Renew them if that is due, and read for how long those of others count."""
        try:
            self._read_ends()
        except (SkeinError, sqlite3.Error) as error:
            _log.error("register: %s", error)
        if self._clock() >= self.wallet.passport.renewal_s():
            self._try(self.refresh)

    def _try(self, make: Callable[[], None]) -> None:
        try:
            make()
        except (SkeinError, sqlite3.Error) as error:
            # On a full disk, for instance, which is no reason never to renew again.
            _log.error("identity of the admin not renewed: %s", error)

    def _read_ends(self) -> None:
        found = self.register.identities()
        counts = [one for one in found if one.caller.role is CallerRole.WORKER and not one.revoked_s]
        self._ends_s = {one.caller.name: one.ends_s for one in counts}

    def refresh(self) -> None:
        """Renew them now."""
        request = self.wallet.passport.request()
        self.wallet.renew(self.authority.certify(request, COORDINATOR, now_s=self._clock()))
        if self._is_leading:
            self._make_admin()
        _log.info("identity renewed: coordinator")

    def _make_admin(self) -> None:
        make_admin(self.authority, self.register, self._admin_file, self.addresses(), now_s=self._clock())


def make_admin(
    authority: Authority, register: Register, file: Path, addresses: tuple[str, str], *, now_s: float
) -> Passport:
    """The admin's identity in a file, with a certificate that counts from now.

    Its key is the one that is there already, unless somebody has revoked that identity: then all of it is another's.
    """
    names = chain((ADMIN.name,), (f"{ADMIN.name}-{number}" for number in count(2)))
    admin = next(who for name in names if register.may_enter(who := replace(ADMIN, name=name)))
    before = Passport.load_if_whole(file)
    if before is not None and before.authority == authority.pem and before.caller == admin:
        made = replace(before, certificate=authority.certify(before.request(), admin, now_s=now_s))
    else:
        made = authority.make_out(admin, now_s=now_s)
    made = replace(made, addresses=addresses[0], enrol_addresses=addresses[1])
    register.enter(admin, key_digest(made), now_s=now_s)
    made.save(file)
    return made


def key_digest(passport: Passport) -> str:
    """Digest of a passport's key."""
    return key_name(load_key(passport.key).public_key())
