"""`skein workers`, `links`, `measure` and `drain`."""

import time

import click

from client.api import Client
from client.cli import DONE
from client.cli.options import connect_client, connection_options, json_option
from client.cli.show import WORKER_COLUMNS, print_json, print_table, worker_row
from skein.errors import SkeinError
from skein.units import format_bytes
from skein.wire.views import WorkerState, WorkerStatus


@click.command()
@json_option
@connection_options
def workers(*, is_json: bool) -> int:
    """List workers, those lost lately included."""
    with connect_client() as client:
        found = client.workers()
    if is_json:
        for worker in found:
            print_json(worker)
        return DONE
    print_table(
        WORKER_COLUMNS, map(worker_row, found), nothing="no workers yet: skein worker up --join HOST:PORT"
    )
    return DONE


@click.command()
@json_option
@connection_options
def links(*, is_json: bool) -> int:
    """List what workers measured between each other; a direction is a line."""
    with connect_client() as client:
        found = client.links()
    if is_json:
        for link in found:
            print_json(link)
        return DONE
    rows = (
        (link.sender, link.receiver, f"{link.latency_s * 1e3:.2f} ms", f"{format_bytes(link.bytes_per_s)}/s")
        for link in found
    )
    print_table(("FROM", "TO", "LATENCY", "BANDWIDTH"), rows, nothing="no links measured yet")
    return DONE


@click.command()
@click.argument("worker", default="")
@json_option
@connection_options
def measure(worker: str, *, is_json: bool) -> int:
    """Have WORKER, or every worker, measure its device again, half a second each; shows what they found."""
    with connect_client() as client:
        found = _measured(client, worker)
    if is_json:
        for status in found:
            print_json(status)
    else:
        print_table(
            WORKER_COLUMNS, map(worker_row, found), nothing="no workers yet: skein worker up --join HOST:PORT"
        )
    return DONE


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


@click.command()
@click.argument("worker")
@json_option
@connection_options
def drain(worker: str, *, is_json: bool) -> int:
    """Take work away from WORKER, step by step, and let it exit."""
    with connect_client() as client:
        found = client.drain(worker)
    if is_json:
        print_json(found)
    else:
        click.echo(f"{found.worker} {found.state}")
    return DONE
