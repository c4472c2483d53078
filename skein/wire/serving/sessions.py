"""Sessions of those who may read a page: whoever has redeemed a link that was made for them, for some hours.

Rules of this file
- A link is good once, and not for long; what it becomes is a session, which nobody else has seen. Both are random, and
  only their hashes are kept.
- There are few of both: the oldest goes for a new one. All are forgotten when the process ends.
"""

import hashlib
import secrets
from collections import OrderedDict

LINK_S = 300.0
"""To open a link in."""
SESSION_S = 8 * 3600.0
MAX_LINKS, MAX_SESSIONS = 32, 64
_NUM_BYTES = 32


class Sessions:
    """Links that wait to be opened, and sessions that go on; times are seconds of any one clock."""

    def __init__(self) -> None:
        self._links = _Secrets(MAX_LINKS, LINK_S)
        self._sessions = _Secrets(MAX_SESSIONS, SESSION_S)

    def link(self, *, now: float) -> str:
        """Text of a new link, good for `LINK_S`."""
        return self._links.new(now)

    def redeem(self, link: str, *, now: float) -> str | None:
        """A session for whoever has this link; None if it was used, or is over. It is used by that."""
        return self._sessions.new(now) if self._links.take(link, now) else None

    def goes_on(self, session: str, *, now: float) -> bool:
        """Whether that is a session of ours which is not over."""
        return self._sessions.has(session, now)


class _Secrets:
    """Random texts that are good for a while, oldest first."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def new(self, now: float) -> str:
        text = secrets.token_urlsafe(_NUM_BYTES)
        while len(self._until_s) >= self._most:
            self._until_s.popitem(last=False)
        self._until_s[_hash(text)] = now + self._seconds
        return text

    def has(self, text: str, now: float) -> bool:
        return now < self._until_s.get(_hash(text), -float("inf"))

    def take(self, text: str, now: float) -> bool:
        is_good = self.has(text, now)
        self._until_s.pop(_hash(text), None)
        return is_good


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
