"""`skein job check`, `job schema` and `export`: job files in, weights out."""

import json
from pathlib import Path
from typing import Literal

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from client.choices import choices_outline
from client.cli.job.sweep import settings_text
from client.cli.options import connect_client, json_option, overrides_option, remote_command, size
from client.cli.tables import count, print_json
from client.documents import end_of_documents
from client.exporting.export import Dtype, require_unused
from client.jobfile import read_job
from client.planning.estimates import estimate_of_job
from skein.config.job import JobSpec
from skein.config.load import job_schema
from skein.config.sweep.trials import trials_of
from skein.errors import UserError
from skein.model.parameters import num_parameters
from skein.plan.sweeping.packing import brackets_of_sweep, sweep_arrays
from skein.units import counted


def outline(job: JobSpec) -> str:
    """A job in one line: what will be trained, how, and the name of its content; in others what aggregation costs,
    which arrays a sweep makes, and what is chosen of the rows.
    """
    parallel, batch = job.parallel, job.batch
    cost = f"\n{estimate_of_job(job).words}" if parallel.replicas > 1 else ""
    chunks = f" in {parallel.chunks} chunks each" if parallel.chunks != 1 else ""
    end = end_of_documents(job.data)
    ends = "" if end is None else f", documents end with {end}"
    return (
        f"{job.name}: {job.model.family} with {count(num_parameters(job.model))} parameters, "
        f"{counted(parallel.stages, 'stage')} x {counted(parallel.replicas, 'replica')}{chunks} ({parallel.layout}), "
        f"{_length(job)} of {batch.samples} samples, {job.precision}{ends}; "
        f"hash {job.content_hash()[:12]}{cost}{_arrays(job)}"
        + "".join(f"\n{line}" for line in choices_outline(job))
    )


def _arrays(job: JobSpec) -> str:
    """Arrays of a sweep that one worker would have, and a line for each of their trials."""
    arrays = sweep_arrays(job, num_workers=1)
    if not arrays:
        return ""
    lines = [
        f"\narray {place}:"
        + "".join(f"\n  trial {x.number}: {settings_text(json.dumps(x.settings))}" for x in array)
        for place, array in enumerate(arrays, 1)
    ]
    rungs = [
        "\nbracket: " + ", then ".join(f"{rung.num_trials} to step {rung.num_steps}" for rung in bracket)
        for bracket in brackets_of_sweep(job)
    ]
    num_trials, num_arrays = counted(len(trials_of(job)), "trial"), counted(len(arrays), "array")
    count_words = f"\n{num_trials} in {num_arrays} on one worker, and in more on several:"
    return "".join((*rungs, count_words, *lines))


def _length(job: JobSpec) -> str:
    steps = f"{job.total_steps} steps"
    if job.budget.epochs is None:
        return steps
    epochs = f"{job.budget.epochs:g} epochs"
    return f"{epochs}, in steps" if job.budget.is_open else f"{steps}, or {epochs} if they are fewer,"


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@overrides_option
@json_option
def check(file: Path, *, overrides: tuple[str, ...], is_json: bool) -> None:
    """Say what is wrong with the job in FILE, or what it would do."""
    job = read_job(file, overrides=overrides)
    print_json(job.model_dump(mode="json")) if is_json else click.echo(outline(job))


@click.command()
def schema() -> None:
    """Print the JSON Schema of job files, with every field's meaning, default and limits."""
    click.echo(json.dumps(job_schema(), indent=2))


@remote_command
@click.argument("job")
@click.option("--to", "out", type=click.Path(path_type=Path), required=True, help="A new or empty folder.")
@click.option(
    "--version", type=click.IntRange(min=0), help="After how many steps. Default: the newest checkpoint."
)
@click.option("--trial", metavar="N|best", help="Of a sweep: which trial.")
@click.option(
    "--dtype",
    type=click.Choice([dtype.value for dtype in Dtype]),
    default=Dtype.FP32.value,
    show_default=True,
    help="Of the weights; bf16 takes half the room.",
)
@click.option("--max-shard-bytes", default="5 GB", show_default=True, help="Size of the weight files.")
def export(
    job: str,
    *,
    out: Path,
    version: int | None,
    trial: str | None,
    dtype: str,
    max_shard_bytes: str,
    is_json: bool,
) -> None:
    """Write the weights of JOB's newest checkpoint as a Hugging Face directory, which transformers opens, with the
    tokenizer's files and a model card.
    """
    limit = size("--max-shard-bytes", max_shard_bytes)
    require_unused("--to", out)
    console = Console(stderr=True)
    columns = (TextColumn("download"), BarColumn(bar_width=24), DownloadColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    download = bar.add_task("download", total=None)
    with connect_client() as client, bar:
        done = client.export(
            job,
            out,
            version=version,
            trial=_trial(trial),
            max_shard_bytes=limit,
            dtype=Dtype(dtype),
            on_bytes=lambda num_bytes, total: bar.update(download, completed=num_bytes, total=total),
        )
    if is_json:
        return print_json(done)
    click.echo(str(done.out))
    which = f"{done.job} after {done.version} steps"
    if trial is not None:
        which = f"trial {done.trial} of {job}, by version {done.version} of {done.job}"
    click.echo(f"{which}, {len(done.files)} files", err=True)
    for line in done.lacking:
        click.echo(f"warning: {line}", err=True)


def _trial(text: str | None) -> int | Literal["best"] | None:
    """Trial that the option names.

    >>> _trial("3"), _trial("best"), _trial(None)
    (3, 'best', None)
    """
    if text is None:
        return None
    if text == "best":
        return "best"
    if not text.isdecimal():
        raise UserError("--trial", text, "give the number of a trial, as skein sweep lists them, or best")
    return int(text)
