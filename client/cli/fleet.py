"""`skein workers`, `links` and `drain`."""

import click

from client.cli import DONE
from client.cli.options import connect, connection_options, json_option
from client.cli.show import WORKER_COLUMNS, print_json, print_table, worker_row
from skein.units import format_bytes


@click.command()
@json_option
@connection_options
def workers(*, is_json: bool) -> int:
    """List workers, those lost lately included."""
    with connect() as client:
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
    with connect() as client:
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
@click.argument("worker")
@json_option
@connection_options
def drain(worker: str, *, is_json: bool) -> int:
    """Take work away from WORKER, step by step, and let it exit."""
    with connect() as client:
        found = client.drain(worker)
    if is_json:
        print_json(found)
    else:
        click.echo(f"{found.worker} {found.state}")
    return DONE
