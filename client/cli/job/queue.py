"""`skein queue`: jobs that have not ended, in the order of their turn, and what those wait for that have no workers."""

import time

import click

from client.cli.options import connect_client, remote_command
from client.cli.show import quotas_text
from client.cli.tables import duration, print_listed
from skein.wire.views import JobStatus

QUEUE_COLUMNS = ("JOB", "PRIORITY", "STATE", "WORKERS", "WAITING", "WHY")


@remote_command
def queue(*, is_json: bool) -> None:
    """List jobs that have not ended: higher priorities first, then older ones."""
    with connect_client() as client:
        found = sorted(
            client.jobs(is_going=True), key=lambda status: (-status.priority, status.submitted_wall_s)
        )
    print_listed(found, QUEUE_COLUMNS, queue_row, nothing="no job waits or works", is_json=is_json)
    if not is_json:
        for line in sorted({quotas_text(status) for status in found if status.quotas}):
            click.echo(f"quotas of {line}")


def queue_row(status: JobStatus) -> tuple[str, ...]:
    """A job in the queue; see `QUEUE_COLUMNS`."""
    since = status.waiting_since_wall_s
    return (
        status.job,
        str(status.priority),
        status.state,
        str(status.num_workers),
        "-" if since is None else duration(max(0.0, time.time() - since)),
        status.reason,
    )
