"""`skein submit` and `status`."""

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import click
from rich.console import Console

from client.api import Client, Job
from client.cli import DONE, FAILED, INTERRUPTED
from client.cli.job.curve import watch
from client.cli.job.files import outline
from client.cli.job.follow import follow_events, view_for
from client.cli.job.sweeping import follow_sweep, sweep_view_for
from client.cli.options import connect_client, overrides_option, remote_command
from client.cli.show import (
    COLLECTIVE_COLUMNS,
    FORM_COLUMNS,
    TIME_COLUMNS,
    USE_COLUMNS,
    collective_rows,
    form_rows,
    job_lines,
    time_rows,
    use_rows,
)
from client.cli.tables import print_json, print_table
from client.estimating import Expected, expected
from client.jobfile import read_job
from client.planning.estimates import estimate_of_job
from skein.config.job import JobSpec
from skein.errors import SkeinError, UserError
from skein.types import JobState
from skein.wire.views import JobEvent


class JobFailed(SkeinError):
    """A job that was waited for has failed."""


wait_option = click.option(
    "--wait", "is_waiting", is_flag=True, help="Show progress until the job ends; exit 1 if it fails."
)


@remote_command
@click.argument("file", type=click.Path(path_type=Path))
@wait_option
@overrides_option
@click.option("--name", help="Replace the job's name.")
@click.option("--key", help="Names this wish: submitting it again gives the same job. Default: a new one.")
@click.option(
    "--from",
    "origin",
    metavar="JOB[@VERSION]",
    help="Begin with the parameters of that job's newest good checkpoint, or of that version's.",
)
@click.option("--dry-run", "is_dry", is_flag=True, help="Check the file and stop.")
def submit(
    file: Path,
    *,
    is_waiting: bool,
    overrides: tuple[str, ...],
    name: str | None,
    key: str | None,
    origin: str | None,
    is_dry: bool,
    is_json: bool,
) -> int:
    """Hand in the job that FILE describes, - for standard input. Prints its id, and nothing else; what aggregation will
    cost goes to standard error, as do warnings: a stage with fewer holders than asked, or no plan at all.
    """
    named = () if name is None else (f"name={name}",)
    spec = read_job(file, overrides=(*overrides, *named))
    if is_dry:
        print_json(spec.model_dump(mode="json")) if is_json else click.echo(outline(spec))
        return DONE
    from_job, from_version = _beginning(origin)
    with connect_client() as client:
        job = client.submit(spec, key=key, from_job=from_job, from_version=from_version)
        print_json({"job": job.id, "is_new": job.is_new}) if is_json else click.echo(job.id)
        sys.stdout.flush()
        found = _expected(client, spec)
        for warning in found.warnings:
            click.echo(f"warning: {warning}", err=True)
        if not is_json and spec.parallel.replicas > 1:
            click.echo(found.estimate.words, err=True)
        if not is_waiting:
            return DONE
        if spec.sweep is not None and not is_json:
            return wait_for_sweep(job)
        return wait_for(job, total_steps=spec.total_steps, is_json=is_json)


def _expected(client: Client, spec: JobSpec) -> Expected:
    """Cost of the job's aggregation and the holders it will lack, on the workers that are there now."""
    try:
        return expected(spec, client.workers(), client.links())
    except SkeinError:
        # The job is in; whoever may submit and not look round is told less.
        return Expected(estimate=estimate_of_job(spec))


def _beginning(text: str | None) -> tuple[str | None, int | None]:
    """The job and the version in `JOB[@VERSION]`.

    >>> _beginning("demo-1@30"), _beginning("demo-1")
    (('demo-1', 30), ('demo-1', None))
    """
    if text is None:
        return None, None
    job, at, version = text.partition("@")
    if at and not version.isdecimal():
        raise UserError("--from", text, "give JOB or JOB@VERSION, such as demo-1@30")
    return job, int(version) if at else None


def wait_for(job: Job, *, total_steps: int, is_json: bool, told: Sequence[JobEvent] = ()) -> int:
    """Shows a job's progress until it ends; the exit code. Ctrl-C leaves the job alone.

    Args:
        told: the job's events so far, which count but are not shown.

    Raises:
        JobFailed: with the reason.
    """
    console = Console(stderr=True)
    try:
        with closing(job.events(since=told[-1].key if told else 0)) as events:
            progress = follow_events(
                events,
                None if is_json else view_for(console),
                total_steps=total_steps,
                told=told,
                on_event=print_json if is_json else None,
            )
    except KeyboardInterrupt:
        click.echo(f"detached; the job goes on: skein logs -f {job.id}", err=True)
        return INTERRUPTED
    end = progress.end
    if end is not None and end.state is JobState.FAILED:
        raise JobFailed(f"job {job.id} failed: {end.reason}")
    return DONE if end is not None and end.state is JobState.FINISHED else FAILED


def wait_for_sweep(job: Job) -> int:
    """Shows the progress of a job's trials until it ends; the exit code. Ctrl-C leaves the job alone.

    Raises:
        JobFailed: with the reason.
    """
    try:
        status = follow_sweep(job.status, sweep_view_for(Console(stderr=True)))
    except KeyboardInterrupt:
        click.echo(f"detached; the job goes on: skein sweep {job.id}", err=True)
        return INTERRUPTED
    if status.state is JobState.FAILED:
        raise JobFailed(f"job {job.id} failed: {status.reason}")
    return DONE if status.state is JobState.FINISHED else FAILED


@remote_command
@click.argument("job")
@click.option(
    "--watch", "is_watching", is_flag=True, help="Show it anew, with its curve, until the job ends."
)
def status(job: str, *, is_watching: bool, is_json: bool) -> int:
    """Show how far JOB is, and times and memory as its plan has them, beside those that were measured."""
    if is_watching and is_json:
        raise click.UsageError(
            "--watch shows a screen, --json prints once: skein logs -f --json tells events"
        )
    with connect_client() as client:
        if is_watching:
            return watch(client.job(job), Console())
        found = client.job(job).status()
    if is_json:
        print_json(found)
    else:
        click.echo("\n".join(job_lines(found)))
        if found.chunk_times:
            click.echo()
            print_table(TIME_COLUMNS, time_rows(found), nothing="")
        if found.uses:
            click.echo()
            print_table(USE_COLUMNS, use_rows(found), nothing="")
        for columns, rows in (
            (FORM_COLUMNS, form_rows(found)),
            (COLLECTIVE_COLUMNS, collective_rows(found)),
        ):
            if rows:
                click.echo()
                print_table(columns, rows, nothing="")
    return DONE
