"""`skein jobs`: a list of jobs. It imports no job model, plan or view, as imports are most of the time it takes."""

from dataclasses import dataclass

import click

from client.cli.options import connect_client, remote_command
from client.cli.tables import JOB_COLUMNS, job_row, print_listed, print_table
from skein.types import JobId, JobState
from skein.units import counted
from skein.wire.v1 import ids_pb2, jobs_pb2

MOST_ENDED = 100
"""Ended jobs in a list, unless all are asked for."""
_NOTHING = "no jobs yet: skein submit FILE"
_STATES = {ids_pb2.JobState.Value(f"JOB_STATE_{state.name}"): state for state in JobState}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedJob:
    """The figures of a job that a list shows; see `skein.wire.views.JobStatus`, which has all others."""

    job: JobId
    name: str
    state: JobState
    step: int
    total_steps: int
    loss: float | None
    evaluation_loss: float | None
    tokens_per_s: float
    step_s: float
    num_workers: int
    submitted_wall_s: float


def listed_job(row: jobs_pb2.JobStatus) -> ListedJob:
    """The figures in a row of a page."""
    return ListedJob(
        job=JobId(row.job),
        name=row.name,
        state=_STATES.get(row.state, JobState.PENDING),
        step=row.step,
        total_steps=row.total_steps,
        loss=row.loss if row.HasField("loss") else None,
        evaluation_loss=row.evaluation_loss if row.HasField("evaluation_loss") else None,
        tokens_per_s=row.tokens_per_s,
        step_s=row.step_s,
        num_workers=row.num_workers,
        submitted_wall_s=row.submitted_wall_s,
    )


@remote_command
@click.option("--all", "has_all", is_flag=True, help="List every job that has ended, too.")
def jobs(*, has_all: bool, is_json: bool) -> None:
    """List jobs, oldest first: all that have not ended, and the newest 100 others."""
    with connect_client() as client:
        going = client.job_rows(is_going=True)
        # Asked for afterwards: a job that ends between the two calls is in both, and not in neither.
        ended = client.job_rows(has_ended=True, limit=None if has_all else MOST_ENDED)
    rows = {row.job: row for row in (*going.jobs, *ended.jobs)}
    in_order = sorted(rows.values(), key=lambda row: row.submitted_wall_s)
    if is_json:
        _print_json(in_order)
    else:
        print_table(JOB_COLUMNS, map(job_row, map(listed_job, in_order)), nothing=_NOTHING)
    if (num_more := ended.num_jobs - len(rows)) > 0:
        click.echo(f"{counted(num_more, 'older job')} not shown: skein jobs --all", err=True)


def _print_json(rows: list[jobs_pb2.JobStatus]) -> None:
    from skein.wire import codec

    statuses = map(codec.JOB_STATUS.decode, rows)
    print_listed(statuses, JOB_COLUMNS, job_row, nothing=_NOTHING, is_json=True)
