"""Board that people read by HTTP: a page, its data as JSON, and news while somebody listens.

Rules of this file
- Figures are those of `skein status --json` and its like, made by the same code (`Looks`).
- Whoever has no session sees one line. Where a coordinator asks nobody for a certificate and listens on this machine
  alone, everybody on it may look.
- A name that is no address of ours is refused, for else a stranger's page could be read as this one (DNS rebinding);
  so is what another site's page asks for.
- The browser is told to run nothing but the page's own script, and to ask nobody else.
"""

import asyncio
import json
import socket
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from importlib.resources import files
from ipaddress import ip_address
from urllib.parse import unquote

from coordinator.page.looks import Looks
from skein.errors import UserError
from skein.wire.identity.names import LOCAL, Caller
from skein.wire.serving.pages import JSON, Answer, Fields, LivePage, Page, PageRequest
from skein.wire.serving.sessions import LINK_S, SESSION_S, Sessions
from skein.wire.shown.plain import plain
from skein.wire.views import PageLink

HTML = "text/html; charset=utf-8"
EVENTS = "text/event-stream; charset=utf-8"
QUIET_S = 15.0
"""Without news a listener is told at least so often that somebody is there."""
_AGAIN_MS = 3000
_PLAIN: Fields = (
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
_TEXT = "text/plain; charset=utf-8"
_METRICS = ("/metrics", "/sd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Audience:
    """Readers who may look: `is_open` lets everybody in; `names` are those of this machine beside its addresses.

    `is_encrypted`: over HTTPS only.
    """

    is_open: bool
    names: frozenset[str] = frozenset()
    is_encrypted: bool = False

    def knows(self, host: str) -> bool:
        """Whether a `Host` is an address, or a name of ours.

        >>> seen = Audience(is_open=True, names=frozenset({"lab"}))
        >>> [seen.knows(x) for x in ("127.0.0.1:7412", "[::1]:7412", "localhost", "lab:1", "evil.example", "")]
        [True, True, True, True, False, False]
        """
        name = host.rpartition("]")[0].strip("[") if host.startswith("[") else host.partition(":")[0]
        with suppress(ValueError):
            return bool(ip_address(name))
        return name.lower().rstrip(".") in {"localhost", socket.gethostname().lower(), *self.names}


class Board:
    """Answers at the metrics port, and knows who may look.

    Args:
        metrics: answers for those paths, to anybody.
        audience: who may look.
        now: Unix seconds, never stepping back.
        is_revoked: whether somebody's sessions are over before their time.
    """

    def __init__(
        self,
        metrics: Answer,
        audience: Audience,
        now: Callable[[], float],
        is_revoked: Callable[[Caller], bool] = lambda _: False,
    ) -> None:
        self._metrics = metrics
        self._audience = audience
        self._now = now
        self._is_revoked = is_revoked
        self.sessions = Sessions()
        self.address = ""
        self._looks: Looks | None = None
        self._news: dict[str | None, bytes] = {}
        """Overviews as the first who listens has found them since they were told, by `Caller.scope`."""
        self._making = asyncio.Lock()
        self._has_news = asyncio.Event()
        self._num_listening = 0

    def lead(self, looks: Looks) -> None:
        """Show what this coordinator knows from now on."""
        self._looks = looks

    def link(self, reader: Caller) -> PageLink:
        """Link that lets one reader in, once.

        Raises:
            UserError: there is no page.
        """
        if not self.address:
            raise UserError("page", "none", "start the coordinator with a --metrics-port, which serves it")
        link = "" if self._audience.is_open else self.sessions.link(reader, now=self._now())
        return PageLink(
            address=self.address, link=link, link_s=LINK_S, is_encrypted=self._audience.is_encrypted
        )

    def tell(self) -> None:
        """Have those who listen told how things are; wanted every second or so. Costs nothing while nobody does."""
        self._news.clear()
        told, self._has_news = self._has_news, asyncio.Event()
        told.set()

    async def answer(self, request: PageRequest) -> Page | LivePage:
        """The page, or the pieces, for a request."""
        if request.path in _METRICS or request.path.startswith("/metrics/"):
            return await self._metrics(request)
        if not self._audience.knows(request.host):
            line = (
                f"This page is not known as {request.host[:80]!r}: use an address, or --advertise that name."
            )
            return _line(HTTPStatus.MISDIRECTED_REQUEST, line)
        if self._audience.is_encrypted and not request.is_encrypted:
            where = ("Location", f"https://{request.host}/")
            return _line(HTTPStatus.PERMANENT_REDIRECT, "This page is served by HTTPS.", where)
        if request.path == "/login":
            return self._login(request)
        if request.path != "/" and not request.path.startswith("/api/"):
            return _nothing()
        if request.fields.get("sec-fetch-site") in ("cross-site", "same-site") and request.path != "/":
            return _line(HTTPStatus.FORBIDDEN, "Only this page's own script may ask for that.")
        if (reader := self._reader(request)) is None:
            return _line(HTTPStatus.UNAUTHORIZED, "To look at this page, run: skein page")
        if request.path == "/":
            return Page(HTTPStatus.OK, HTML, *_page())
        if self._looks is None:
            return _line(
                HTTPStatus.SERVICE_UNAVAILABLE, "This coordinator stands by: look at the one that leads."
            )
        if request.path == "/api/live":
            return LivePage(kind=EVENTS, pieces=self._pieces(request), fields=_PLAIN)
        return await self._data(self._looks, reader, request.path)

    async def _data(self, looks: Looks, reader: Caller, path: str) -> Page:
        match [unquote(part) for part in path.strip("/").split("/")]:
            case ["api", "overview"]:
                found: object = looks.overview(reader)
            case ["api", "jobs", job] if looks.knows(job, reader):
                found = looks.job(job)
            case ["api", "jobs", job, "curve"] if looks.knows(job, reader):
                found = await looks.curve(job)
            case ["api", "jobs", job, "incidents"] if looks.knows(job, reader):
                found = looks.incidents(job)
            case ["api", "jobs", job, "experts"] if looks.knows(job, reader):
                found = looks.experts(job)
            case ["api", "jobs", job, "step"] if looks.knows(job, reader):
                found = await asyncio.to_thread(looks.step(job))
            case _:
                return _nothing()
        return Page(HTTPStatus.OK, JSON, await asyncio.to_thread(_json, found), _PLAIN)

    async def _pieces(self, request: PageRequest) -> AsyncGenerator[bytes, None]:
        """Server-sent events: how things are now, and again whenever they are told. A slow reader skips some."""
        self._num_listening += 1
        try:
            yield f"retry: {_AGAIN_MS}\n\n".encode()
            news = b"" if (reader := self._reader(request)) is None else await self._overview(reader)
            while (reader := self._reader(request)) is not None:
                yield b"data: " + news + b"\n\n" if news else b": \n\n"
                news = await self._next(reader)
        finally:
            self._num_listening -= 1

    async def _next(self, reader: Caller) -> bytes:
        """The next news; b"" where there have been none for long."""
        has_news = self._has_news
        with suppress(TimeoutError):
            async with asyncio.timeout(QUIET_S):
                await has_news.wait()
            return await self._overview(reader)
        return b""

    async def _overview(self, reader: Caller) -> bytes:
        """The overview, made once for all who listen and see the same."""
        async with self._making:
            news = self._news.get(reader.scope)
            if news is None:
                assert self._looks is not None
                news = await asyncio.to_thread(_json, self._looks.overview(reader))
                self._news[reader.scope] = news
            return news

    # --- who may look ---

    def _login(self, request: PageRequest) -> Page:
        link = request.query.get("link", "")
        # What looks ahead of people uses nothing up.
        session = None if request.is_head else self.sessions.redeem(link, now=self._now())
        if session is None:
            line = "This link was used, or is over. For another one, run: skein page"
            return _line(HTTPStatus.UNAUTHORIZED, line)
        how = "; Secure" if request.is_encrypted else ""
        cookie = f"{self._cookie}={session}; Max-Age={SESSION_S:.0f}; Path=/; HttpOnly; SameSite=Strict{how}"
        # A redirection would go on with what led here, perhaps from another site, and so without the cookie.
        body = b'<!doctype html><meta http-equiv="refresh" content="0;url=/"><a href="/">Skein</a>\n'
        return Page(HTTPStatus.OK, HTML, body, (*_PLAIN, ("Set-Cookie", cookie)))

    def _reader(self, request: PageRequest) -> Caller | None:
        """Reader that a request comes from; None for whoever may not look."""
        if self._audience.is_open:
            return LOCAL
        readers = (self.sessions.reader(text, now=self._now()) for text in self._shown(request))
        return next((x for x in readers if x is not None and not self._is_revoked(x)), None)

    def _shown(self, request: PageRequest) -> list[str]:
        with suppress(CookieError):
            found = SimpleCookie(request.fields.get("cookie", "")).get(self._cookie)
            return [] if found is None else [found.value]
        return []

    @property
    def _cookie(self) -> str:
        """Cookies are kept by host alone, so the name tells coordinators on one machine apart."""
        return f"skein-{self.address.rpartition(':')[2]}"


def _line(status: HTTPStatus, text: str, *fields: tuple[str, str]) -> Page:
    return Page(status, _TEXT, text.encode() + b"\n", (*_PLAIN, *fields))


def _nothing() -> Page:
    return _line(HTTPStatus.NOT_FOUND, "There is no such page: try / or /metrics.")


def _json(value: object) -> bytes:
    return json.dumps(plain(value), separators=(",", ":")).encode()


@cache
def _page() -> tuple[bytes, Fields]:
    """The page in one file, and its header, which names the hashes of all that may run."""
    inside = files("coordinator.page")
    style, script = ((inside / name).read_text("utf-8") for name in ("page.css", "page.js"))
    html = (inside / "page.html").read_text("utf-8").replace("/*style*/", style).replace("/*script*/", script)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html.encode(), (*_PLAIN, ("Content-Security-Policy", policy))


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
