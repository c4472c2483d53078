"""Sessions of those who may read a page: whoever has redeemed a link that was made for them, for some hours.

Rules of this file
- A link is good once, and not for long; what it becomes is a session, which nobody else has seen. Both are random, and
  only their hashes are kept, with who they were made for.
- There are few of both, and fewer of one reader: its oldest goes for a new one, so that nobody puts out the others, and
  else the oldest of all. All are forgotten when the process ends.
"""

import hashlib
import secrets
from collections import OrderedDict

from skein.wire.identity.names import Caller

LINK_S = 300.0
"""To open a link in."""
SESSION_S = 8 * 3600.0
MAX_LINKS, MAX_SESSIONS = 32, 64
MAX_OF_ONE = 4
"""Links, and sessions, of one reader."""
_NUM_BYTES = 32


class Sessions:
    """Links that wait to be opened, and sessions that go on; times are seconds of any one clock."""

    def __init__(self) -> None:
        self._links = _Secrets(MAX_LINKS, LINK_S)
        self._sessions = _Secrets(MAX_SESSIONS, SESSION_S)

    def link(self, reader: Caller, *, now: float) -> str:
        """Text of a new link for somebody, good for `LINK_S`."""
        return self._links.new(reader, now)

    def redeem(self, link: str, *, now: float) -> str | None:
        """A session for whoever has this link; None if it was used, or is over. It is used by that."""
        reader = self._links.take(link, now)
        return None if reader is None else self._sessions.new(reader, now)

    def reader(self, session: str, *, now: float) -> Caller | None:
        """Owner of a session; None where it is none of ours, or over."""
        return self._sessions.of(session, now)


class _Secrets:
    """Random texts that are good for a while, oldest first."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._known: OrderedDict[bytes, tuple[Caller, float]] = OrderedDict()
        """Owner and end of each."""

    def new(self, reader: Caller, now: float) -> str:
        text = secrets.token_urlsafe(_NUM_BYTES)
        own = [known for known, (owner, _) in self._known.items() if owner == reader]
        if len(own) >= MAX_OF_ONE:
            del self._known[own[0]]
        elif len(self._known) >= self._most:
            self._known.popitem(last=False)
        self._known[_hash(text)] = reader, now + self._seconds
        return text

    def of(self, text: str, now: float) -> Caller | None:
        reader, until_s = self._known.get(_hash(text), (None, now))
        return reader if now < until_s else None

    def take(self, text: str, now: float) -> Caller | None:
        reader = self.of(text, now)
        self._known.pop(_hash(text), None)
        return reader


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
