"""`skein top`: everything at a glance, in this terminal."""

import sys
from collections.abc import Iterable, Sequence

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from client.api import Client
from client.cli import DONE, INTERRUPTED
from client.cli.job.curve import LINES_S, REFRESH_S, wait_for_look
from client.cli.options import connect_client, remote_command
from client.cli.show import WORKER_COLUMNS, worker_row
from client.cli.tables import JOB_COLUMNS, job_row, print_json
from skein.types import JobState
from skein.units import counted
from skein.wire.views import JobStatus, WorkerState, WorkerStatus

NUM_ENDED = 5
"""Jobs that have ended, shown beside all others."""


@remote_command
@click.option("--once", is_flag=True, help="Show everything once, as it is now, and end.")
def top(*, once: bool, is_json: bool) -> int:
    """Show jobs, queue and workers, again and again, until Ctrl-C. With --json a look is a line."""
    # Where nobody looks at a screen there is room for all but a long story.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    try:
        with connect_client() as client:
            if once or is_json or not console.is_terminal:
                _tell(client, console, once=once, is_json=is_json)
            else:
                _show(client, console)
    except KeyboardInterrupt:
        return INTERRUPTED
    return DONE


def _tell(client: Client, console: Console, *, once: bool, is_json: bool) -> None:
    while True:
        jobs, workers = _jobs(client), client.workers()
        if is_json:
            print_json({"jobs": jobs, "workers": workers})
        else:
            console.print(overview(jobs, workers))
        if once:
            return
        wait_for_look(LINES_S)


def _show(client: Client, console: Console) -> None:
    with Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
        while True:
            live.update(overview(_jobs(client), client.workers()), refresh=True)
            wait_for_look(REFRESH_S)


def _jobs(client: Client) -> Sequence[JobStatus]:
    """Jobs that have not ended, and the newest others."""
    going = client.jobs(is_going=True)
    # Asked for afterwards: a job that ends between the two calls is in both, and not in neither.
    ended = client.job_page(limit=NUM_ENDED, has_ended=True).jobs
    return list({job.job: job for job in (*going, *ended)}.values())


def overview(jobs: Sequence[JobStatus], workers: Sequence[WorkerStatus]) -> Group:
    """Jobs, newest first, and workers: a line of totals, and a table of each."""
    going = [job for job in jobs if not job.state.is_final]
    shown = [*going, *[job for job in jobs if job.state.is_final][-NUM_ENDED:]][::-1]
    waiting = sum(job.state is JobState.PENDING for job in going)
    held = sum(job.state is JobState.HELD for job in going)
    here = [worker for worker in workers if worker.state is not WorkerState.LOST]
    idle = sum(worker.state is WorkerState.IDLE for worker in here)
    line = (
        f"{counted(len(going) - waiting - held, 'job')} at work, {waiting} waiting, {held} held; "
        f"{counted(len(here), 'worker')}, {idle} idle, {len(workers) - len(here)} lost"
    )
    return Group(
        Text(line),
        _table((*JOB_COLUMNS, "WHY"), ((*job_row(job), job.reason or "-") for job in shown)),
        _table(WORKER_COLUMNS, map(worker_row, workers)),
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        # Where a line is too long it is the last cell that is cut: why a job waits may be a long story.
        table.add_column(column, no_wrap=column != columns[-1])
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(text: str) -> Text:
    """A cell of one line. Names are the submitter's choice: text, and no markup or codes that a terminal obeys."""
    shown = "".join(sign if sign.isprintable() else "?" for sign in text)
    return Text(shown, no_wrap=True, overflow="ellipsis")
