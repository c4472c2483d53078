"""`skein checkpoints`: which ones a job has, whether they are what was written, and how they go."""

import time

import click

from client.cli import DONE, FAILED
from client.cli.options import connect_client, remote_command
from client.cli.tables import print_listed
from skein.types import Condition
from skein.units import format_bytes
from skein.wire.views import CheckpointView

COLUMNS = ("VERSION", "WRITTEN", "FILES", "SIZE", "CONDITION", "WHERE", "REASON")
_NONE = "-"


@remote_command
@click.argument("job")
def listed(job: str, *, is_json: bool) -> None:
    """List the checkpoints of JOB that are kept, oldest first. Nothing is read: damage shows once it was found."""
    with connect_client() as client:
        found = client.checkpoints(job)
    print_listed(found, COLUMNS, _row, nothing=f"{job} has no checkpoint yet", is_json=is_json)


@remote_command
@click.argument("job")
@click.option("--version", type=click.IntRange(min=1), help="Read this one only. Default: all that are kept.")
def verify(job: str, *, version: int | None, is_json: bool) -> int:
    """Have the coordinator read the checkpoints of JOB and compare hashes; exit 1 unless all are whole.

    What is damaged is set aside: the job goes back to the next older one when it needs to. One that somebody has put
    back is taken up again.
    """
    with connect_client() as client:
        wanted = [view.version for view in client.checkpoints(job)] if version is None else [version]
        found = [client.verify(job, each) for each in wanted]
    print_listed(found, COLUMNS, _row, nothing=f"{job} has no checkpoint yet", is_json=is_json)
    return DONE if all(view.condition is Condition.WHOLE for view in found) else FAILED


@remote_command
@click.argument("job")
@click.option("--version", type=click.IntRange(min=1), help="Delete this one only. Default: all.")
def delete(job: str, *, version: int | None, is_json: bool) -> None:
    """Delete checkpoints of JOB, which has ended, and list those that are left. There is no way back."""
    with connect_client() as client:
        found = client.checkpoints(job)
        for each in [view.version for view in found] if version is None else [version]:
            found = client.delete(job, each)
    print_listed(found, COLUMNS, _row, nothing=f"{job} has no checkpoint any more", is_json=is_json)


def _row(view: CheckpointView) -> tuple[str, ...]:
    return (
        str(view.version),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(view.wall_s)),
        str(view.num_files),
        format_bytes(view.num_bytes),
        view.condition,
        view.url or "coordinator",
        view.reason or _NONE,
    )
