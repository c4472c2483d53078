"""`skein workers`, `links`, `measure` and `drain`."""

import time
from collections.abc import Iterable

import click

from client.api import Client
from client.cli.options import connect_client, remote_command
from client.cli.show import WORKER_COLUMNS, worker_row
from client.cli.tables import print_json, print_listed
from skein.errors import SkeinError
from skein.topology.fleet import Link
from skein.units import format_bytes
from skein.wire.views import WorkerState, WorkerStatus


@remote_command
def workers(*, is_json: bool) -> None:
    """List workers, those lost lately included."""
    with connect_client() as client:
        found = client.workers()
        num_known = 0 if found else client.num_known_workers()
    _print_workers(found, num_known=num_known, is_json=is_json)


def _print_workers(found: Iterable[WorkerStatus], *, num_known: int = 0, is_json: bool) -> None:
    nothing = "no workers yet: skein worker up --join HOST:PORT"
    if num_known:
        nothing = (
            f"none connected, {num_known} known from before: a worker comes back by itself if it knows this "
            "coordinator's address; start the others again with --join and the addresses of all coordinators"
        )
    print_listed(found, WORKER_COLUMNS, worker_row, nothing=nothing, is_json=is_json)


@remote_command
def links(*, is_json: bool) -> None:
    """List what workers measured between each other; a direction is a line."""
    with connect_client() as client:
        found = client.links()
    columns = ("FROM", "TO", "LATENCY", "BANDWIDTH", "VIA")
    print_listed(found, columns, _link_row, nothing="no links measured yet", is_json=is_json)


def _link_row(link: Link) -> tuple[str, ...]:
    return (
        link.sender,
        link.receiver,
        f"{link.latency_s * 1e3:.2f} ms",
        f"{format_bytes(link.bytes_per_s)}/s",
        via_text(link),
    )


def via_text(link: Link) -> str:
    """Way of a link, in words."""
    if link.via is None:
        return "-"
    # Whoever can be dialled, only not by that peer, is its own relay.
    return "called back" if link.via == link.sender else link.via or "the coordinator"


@remote_command
@click.argument("worker", default="")
def measure(worker: str, *, is_json: bool) -> None:
    """Have WORKER, or every worker, measure its device again, half a second each; shows what they found."""
    with connect_client() as client:
        _print_workers(_measured(client, worker), is_json=is_json)


def _measured(client: Client, worker: str) -> list[WorkerStatus]:
    """Workers that were asked to measure, once all have answered or are gone.

    Raises:
        SkeinError: some have not answered for long.
    """
    asked_s = time.monotonic()
    asked = {status.worker for status in client.measure(worker)}
    while True:
        found = [x for x in client.workers() if x.worker in asked and x.state is not WorkerState.LOST]
        waited_s = time.monotonic() - asked_s
        late = [x.worker for x in found if x.measured_age_s > waited_s]
        if not late:
            return found
        if waited_s > _MEASURE_S:
            raise SkeinError(f"no answer from {', '.join(late)} within {_MEASURE_S:.0f} s: see skein workers")
        time.sleep(_LOOK_S)


_MEASURE_S, _LOOK_S = 30.0, 0.2


@remote_command
@click.argument("worker")
def drain(worker: str, *, is_json: bool) -> None:
    """Take work away from WORKER, step by step, and let it exit."""
    with connect_client() as client:
        found = client.drain(worker)
    print_json(found) if is_json else click.echo(f"{found.worker} {found.state}")
