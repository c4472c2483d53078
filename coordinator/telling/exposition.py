"""The metrics port: `/metrics` for Prometheus, `/sd` for its service discovery, `/metrics/worker/<id>` for `up`."""

import json
import re
from collections.abc import Callable, Mapping
from http import HTTPStatus

from skein.types import WorkerId
from skein.wire.serving.pages import JSON, TEXT, Page, PageRequest
from skein.wire.views import WorkerState, WorkerStatus

_HOST = re.compile(r"[A-Za-z0-9.\-\[\]:]{1,255}")


class Exposition:
    """Pages that a coordinator shows by HTTP, at `address` once they are served.

    Args:
        render: gives what `/metrics` says; called on a thread.
    """

    def __init__(self, render: Callable[[], bytes]) -> None:
        self._render = render
        self._workers: Mapping[WorkerId, WorkerStatus] = {}
        self.address = ""

    def show(self, workers: Mapping[WorkerId, WorkerStatus]) -> None:
        """Replace all workers that `/sd` shows."""
        self._workers = workers

    def answer(self, request: PageRequest) -> Page:
        """The page at a path."""
        path, host = request.path, request.host
        if path == "/metrics":
            return Page(HTTPStatus.OK, TEXT, self._render())
        if path == "/sd":
            target = host if _HOST.fullmatch(host) else self.address
            return Page(HTTPStatus.OK, JSON, json.dumps(targets(target, self._workers)).encode())
        worker = self._workers.get(WorkerId(path.removeprefix("/metrics/worker/")))
        if worker is None:
            return Page(HTTPStatus.NOT_FOUND, TEXT, b"try /, /metrics or /sd\n")
        if worker.state is WorkerState.LOST:
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, TEXT, b"lost\n")
        line = f'skein_beat_age_seconds{{worker="{worker.worker}"}} {worker.beat_age_s}\n'
        return Page(HTTPStatus.OK, TEXT, line.encode())


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
