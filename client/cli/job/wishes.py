"""`skein cancel`, `pause` and `resume`."""

import time
from collections.abc import Callable

import click

from client.api import Job
from client.cli import DONE, INTERRUPTED
from client.cli.job.jobs import wait_for, wait_for_sweep, wait_option
from client.cli.options import connect_client, remote_command
from client.cli.tables import print_json
from skein.config.job import read_spec
from skein.types import JobState
from skein.wire.views import JobStatus

LOOK_S = 0.25
"""Between two looks at a job that is being saved."""

_patient = click.option(
    "--wait/--no-wait", "is_patient", default=True, show_default=True, help="Wait until it is saved."
)
_reason = click.option("--reason", default="", help="Told to whoever watches.")


@remote_command
@click.argument("job")
@_reason
@click.option(
    "--discard", "discards", is_flag=True, help="End it now, without the steps since its newest checkpoint."
)
@_patient
def cancel(job: str, *, reason: str, discards: bool, is_patient: bool, is_json: bool) -> int:
    """End JOB once its newest step is saved. It can be exported, and go on: skein resume."""
    with connect_client() as client:
        named = client.job(job)
        found = named.cancel(reason, discard=discards)
        return _told(named, found, lambda state: state.is_final, is_patient=is_patient, is_json=is_json)


@remote_command
@click.argument("job")
@_reason
@_patient
def pause(job: str, *, reason: str, is_patient: bool, is_json: bool) -> int:
    """Save JOB's newest step and free its workers, for other jobs or for nothing, until skein resume."""
    with connect_client() as client:
        named = client.job(job)
        found = named.pause(reason)

        def is_at_rest(state: JobState) -> bool:
            return state is JobState.HELD or state.is_final

        return _told(named, found, is_at_rest, is_patient=is_patient, is_json=is_json)


@remote_command
@click.argument("job")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Its budget from here on, counted from its beginning. Default: as before.",
)
@click.option(
    "--new-data",
    "takes_new_data",
    is_flag=True,
    help="Go on with the data that its workers have now, though it was trained on others.",
)
@wait_option
def resume(job: str, *, steps: int | None, takes_new_data: bool, is_waiting: bool, is_json: bool) -> int:
    """Have JOB go on where it was saved, if it was paused, cancelled or has failed; or, with more --steps, finished."""
    with connect_client() as client:
        named = client.job(job)
        told = named.history() if is_waiting else ()
        found = named.resume(steps=steps, new_data=takes_new_data)
        code = _shown(found, is_json=is_json)
        if not is_waiting:
            return code
        if read_spec(found.spec).sweep is not None and not is_json:
            return wait_for_sweep(named)
        return wait_for(named, total_steps=found.total_steps, is_json=is_json, told=told)


def _told(
    job: Job, found: JobStatus, is_done: Callable[[JobState], bool], *, is_patient: bool, is_json: bool
) -> int:
    """Show the job when it is done, or as it is."""
    try:
        if is_patient and not is_done(found.state):
            click.echo(f"{found.job} is saved first; after Ctrl-C it is all the same", err=True)
        while is_patient and not is_done(found.state):
            time.sleep(LOOK_S)
            found = job.status()
    except KeyboardInterrupt:
        return INTERRUPTED
    return _shown(found, is_json=is_json)


def _shown(found: JobStatus, *, is_json: bool) -> int:
    text = f"{found.job} {found.state}" + (f": {found.reason}" if found.reason else "")
    print_json(found) if is_json else click.echo(text)
    return DONE
