"""`skein curve`, and `skein status --watch`: a job's course, drawn or written to files."""

import sys
import time
from pathlib import Path

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from client.api import Job
from client.cli import DONE, INTERRUPTED
from client.cli.options import connect_client, remote_command
from client.cli.show import job_lines
from client.cli.tables import print_json
from client.curves.files import write_csv, write_history, write_tensorboard
from client.curves.plot import plot
from skein.errors import UserError
from skein.wire.shown.points import Course, Point

REFRESH_S = 1.0
"""Between two looks at a job that is watched."""
LINES_S = 10.0
"""The same where there is no terminal."""
_HEIGHT = 12
_WIDTH = 100


@remote_command
@click.argument("job")
@click.option("--csv", "csv_file", metavar="FILE", help="Write a row for each step, - to standard output.")
@click.option(
    "--tensorboard",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write an event file for TensorBoard.",
)
@click.option(
    "--wandb",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write what wandb's Run.log takes, as JSON lines; docs/operations.md says how to replay it.",
)
def curve(
    job: str, *, csv_file: str | None, tensorboard: Path | None, wandb: Path | None, is_json: bool
) -> None:
    """Draw the losses of JOB, or write its curves to files: losses, gradient norm, learning rate, tokens. Steps that it
    went back from are left out.
    """
    with connect_client() as client:
        found = client.job(job)
        points, status = Course(found.history()).points(), found.status()
    if status.trials:
        arrays = ", ".join(sorted({trial.array for trial in status.trials if trial.array})) or "none yet"
        raise UserError("job", job, f"is a sweep, whose arrays have curves: give one of {arrays}")
    if csv_file == "-":
        write_csv(points, sys.stdout)
    elif csv_file is not None:
        try:
            with Path(csv_file).open("w", encoding="utf-8", newline="") as file:
                write_csv(points, file)
        except OSError as error:
            raise UserError("--csv", csv_file, f"cannot be written: {error.strerror}") from error
    if tensorboard is not None:
        write_tensorboard(points, tensorboard, name=job)
    if wandb is not None:
        write_history(points, wandb, name=job, config=status.spec)
    if is_json:
        for point in points:
            print_json(point)
    elif csv_file is None and tensorboard is None and wandb is None:
        click.echo("\n".join(drawn(points, Console())))


def drawn(points: tuple[Point, ...], console: Console) -> list[str]:
    """The curve, as wide as the console, and what its signs mean."""
    lines = plot(points, width=min(console.width, _WIDTH), height=_HEIGHT)
    return [*lines, "dots: loss, o: validation loss (nats per token)"] if len(lines) > 1 else lines


def wait_for_look(seconds: float) -> None:
    """Waits for the next look."""
    time.sleep(seconds)


def watch(job: Job, console: Console) -> int:
    """Shows status and curve until the job ends; Ctrl-C leaves the job alone."""
    course, seen = Course(), (0, 0)
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                status = job.status()
                for event in job.history(since=seen):
                    course.take(event)
                    seen = event.key
                text = "\n".join([*job_lines(status), "", *drawn(course.points(), console)])
                if console.is_terminal:
                    live.update(Group(Text(text)), refresh=True)
                else:
                    console.print(Text(text), soft_wrap=True)
                if status.state.is_final:
                    return DONE
                wait_for_look(REFRESH_S if console.is_terminal else LINES_S)
    except KeyboardInterrupt:
        return INTERRUPTED
