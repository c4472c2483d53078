"""A browser without a window, driven by its own protocol over a pair of pipes: one page at a time."""

import fcntl
import json
import os
import select
import shutil
import signal
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 60.0
"""Far above what anything here takes; reached only when something hangs."""
_FROM_US, _TO_US = 3, 4
"""Descriptors by which it is driven, as it wants them."""


class Browser:
    """Page of a browser. Answers are what JSON has; `said` is what its console and its log have said."""

    def __init__(self, to_it: int, from_it: int) -> None:
        self._to_it, self._from_it = to_it, from_it
        self._number = 0
        self._rest = b""
        self._page: str | None = None
        self._has_loaded = False
        self.said: list[str] = []

    def begin(self) -> None:
        """Attach to an empty page."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._page = str(self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict[str, object]:
        """The result of a method of the protocol."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._page is not None:
            message["sessionId"] = self._page
        os.write(self._to_it, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._listen(answer)
        assert "error" not in answer, answer
        result = answer["result"]
        assert isinstance(result, dict)
        return result

    def open(self, url: str) -> None:
        """Go there, until all that the page names has come; what its script asks for comes later."""
        self._has_loaded = False
        self.call("Page.navigate", url=url)
        while not self._has_loaded:
            self._listen(self._next())

    def value(self, expression: str) -> object:
        """Value of a JavaScript expression in the page; promises are waited for."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        result = found["result"]
        assert isinstance(result, dict)
        return result.get("value")

    def until(self, expression: str) -> object:
        """Value of an expression as soon as it is true."""
        until_s = time.monotonic() + PATIENCE_S
        while not (found := self.value(expression)):
            assert time.monotonic() < until_s, (expression, self.said, self.value("document.body.innerText"))
            self.value("new Promise((done) => setTimeout(done, 50))")
        return found

    def look(self, *, width: int, height: int, scheme: str) -> None:
        """Have a window of that size, `light` or `dark`."""
        is_phone = width < 500
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=is_phone,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self) -> bytes:
        """PNG of what is in the window."""
        return b64decode(str(self.call("Page.captureScreenshot", format="png")["data"]))

    def _listen(self, event: dict[str, object]) -> None:
        self._has_loaded |= event.get("method") == "Page.loadEventFired"
        if event.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.said.append(json.dumps(event["params"]))

    def _next(self) -> dict[str, object]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from_it], [], [], PATIENCE_S)
            assert ready, "the browser does not answer"
            piece = os.read(self._from_it, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        found = json.loads(line)
        assert isinstance(found, dict)
        return found


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own in `folder`; all its processes end with the block."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    assert program is not None, f"none of {', '.join(NAMES)} is installed: apt-get install chromium"
    arguments = [
        program,
        "--headless=new",
        # As root, in a container, it has no other way; what it opens is ours.
        "--no-sandbox",
        "--no-first-run",
        "--no-proxy-server",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        "--remote-debugging-pipe",
        "about:blank",
    ]
    (theirs_in, ours_out), (ours_in, theirs_out) = _pipe(), _pipe()
    log = os.open(folder / "browser.log", os.O_WRONLY | os.O_CREAT, 0o600)
    actions = [
        (os.POSIX_SPAWN_DUP2, theirs_in, _FROM_US),
        (os.POSIX_SPAWN_DUP2, theirs_out, _TO_US),
        (os.POSIX_SPAWN_DUP2, log, 1),
        (os.POSIX_SPAWN_DUP2, log, 2),
    ]
    environment = os.environ | {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder / "config")}
    pid = os.posix_spawn(program, arguments, environment, file_actions=actions, setpgroup=0)
    for descriptor in (theirs_in, theirs_out, log):
        os.close(descriptor)
    try:
        driven = Browser(ours_out, ours_in)
        driven.begin()
        yield driven
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ours_out)
        os.close(ours_in)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are no descriptors that the browser gets others under."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
