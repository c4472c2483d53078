"""The metrics port: `/metrics` for Prometheus, `/sd` for its HTTP service discovery, `/metrics/worker/<id>` for `up`.

Each request has a thread, so a slow reader holds up nobody; what it reads was put there by the event loop.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from skein.errors import UserError
from skein.types import WorkerId
from skein.wire.channel import join_address
from skein.wire.views import WorkerState, WorkerStatus

_HOST = re.compile(r"[A-Za-z0-9.\-\[\]:]{1,255}")
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_JSON = "application/json"
READ_S = 10.0


class Exposition:
    """Answers scrapes at host:port until `close`.

    Args:
        render: what `/metrics` says.

    Raises:
        UserError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, render: Callable[[], bytes]) -> None:
        self._render = render
        self._workers: Mapping[WorkerId, WorkerStatus] = {}
        exposition = self

        class Scrape(BaseHTTPRequestHandler):
            timeout = READ_S

            def do_GET(self) -> None:
                status, kind, body = exposition.answer(self.path, self.headers.get("Host", ""))
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are no news."""

        try:
            self._server = ThreadingHTTPServer((host, port), Scrape)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            hint = f"{reason}; give another port, or end what listens there"
            raise UserError("metrics_port", join_address(host, port), hint) from error
        self._server.daemon_threads = True
        self.address = join_address(host, self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def show(self, workers: Mapping[WorkerId, WorkerStatus]) -> None:
        """Who is here, for `/sd`; replaced whole."""
        self._workers = workers

    def answer(self, path: str, host: str) -> tuple[HTTPStatus, str, bytes]:
        """Status, content type and body for a path; `host` is how the reader reached this port."""
        if path == "/metrics":
            return HTTPStatus.OK, _TEXT, self._render()
        if path == "/sd":
            target = host if _HOST.fullmatch(host) else self.address
            return HTTPStatus.OK, _JSON, json.dumps(targets(target, self._workers)).encode()
        worker = self._workers.get(WorkerId(path.removeprefix("/metrics/worker/")))
        if worker is None:
            return HTTPStatus.NOT_FOUND, _TEXT, b"try /metrics or /sd\n"
        if worker.state is WorkerState.LOST:
            return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, b"lost\n"
        line = f'skein_beat_age_seconds{{worker="{worker.worker}"}} {worker.beat_age_s}\n'
        return HTTPStatus.OK, _TEXT, line.encode()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def targets(target: str, workers: Mapping[WorkerId, WorkerStatus]) -> list[dict[str, object]]:
    """Prometheus' HTTP service discovery: the coordinator, and each worker by way of the coordinator.

    Workers' statistics are on the coordinator's own page; their pages here only say whether they are up.
    """
    found: list[dict[str, object]] = [{"targets": [target], "labels": {"service": "coordinator"}}]
    for worker, status in sorted(workers.items()):
        labels = {
            "service": "worker",
            "instance": worker,
            "site": status.site,
            "__metrics_path__": f"/metrics/worker/{worker}",
        }
        found.append({"targets": [target], "labels": labels})
    return found
