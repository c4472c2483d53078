"""`skein demo`: everything once, on this machine, in a folder of its own."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from contextlib import closing
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import click
import yaml
from rich.console import Console

from client.api import Client, Job
from client.cli import DONE, INTERRUPTED
from client.cli.job.files import outline
from client.cli.job.follow import JobProgress, follow_events, view_for
from client.cli.job.jobs import JobFailed
from client.cli.options import json_option, overrides_option
from client.cli.tables import print_json
from client.exporting.export import require_unused
from client.given import ended_by
from client.jobfile import read_job
from client.local import LocalFleet, NotStarted
from skein.config.job import JobSpec
from skein.config.load import apply_overrides, parse_document
from skein.types import JobState
from skein.wire.views import EvaluationFinished, JobEvent

NUM_WORKERS = 4
PROMPT = "def "
_SAMPLE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOutcome:
    """Results and files of a demo. Losses are in nats per byte, the first before any training."""

    seconds: float
    validation_losses: tuple[float, ...]
    directory: Path
    job_file: Path
    export: Path
    checkpoints: Path
    logs: Path
    sample: str


@click.command()
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    help="A new or empty folder. Default: run/demo-<time>.",
)
@overrides_option
@json_option
def demo(directory: Path | None, *, overrides: tuple[str, ...], is_json: bool) -> int:
    """Train a small language model on the standard library's source, export it, and show what it writes.

    Starts a coordinator and four workers here, each a process of its own, and ends them again.
    """
    began = time.monotonic()
    folder = _folder(directory)
    say = Console(stderr=is_json, highlight=False, soft_wrap=True)
    say.print(f"demo in {folder}")
    job_file = _write_job(folder, overrides)
    spec = read_job(job_file)
    try:
        with (
            ended_by(signal.SIGTERM, signal.SIGHUP),
            LocalFleet(folder, num_workers=NUM_WORKERS, data_roots=_roots(spec)) as fleet,
            Client(fleet.target) as client,
        ):
            say.print(f"starting a coordinator on {fleet.target} and {NUM_WORKERS} workers ...")
            fleet.start(client)
            say.print(f"up after {time.monotonic() - began:.0f} s; metrics at {fleet.metrics_url}")
            say.print(f"to look at it from elsewhere: skein workers --coordinator {fleet.target}")
            say.print(outline(spec))
            job = client.submit(spec)
            losses: list[float] = []
            progress = _watch(job, spec.total_steps, say, losses)
            if progress.end is None or progress.end.state is not JobState.FINISHED:
                reason = "it did not end" if progress.end is None else progress.end.reason
                raise JobFailed(f"job {job.id} failed: {reason}; logs are in {fleet.logs}")
            done = client.export(job.id, folder / "export")
    except KeyboardInterrupt:
        say.print("interrupted; everything is stopped")
        return INTERRUPTED
    written = _sample(done.out)
    outcome = DemoOutcome(
        seconds=round(time.monotonic() - began, 1),
        validation_losses=tuple(losses),
        directory=folder,
        job_file=job_file,
        export=done.out,
        checkpoints=fleet.state / "checkpoints",
        logs=fleet.logs,
        sample=written,
    )
    print_json(outcome) if is_json else _tell(outcome, say)
    return DONE


def _folder(directory: Path | None) -> Path:
    folder = directory or Path("run") / time.strftime("demo-%Y%m%d-%H%M%S")
    require_unused("--dir", folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder.absolute()


def _write_job(folder: Path, overrides: tuple[str, ...]) -> Path:
    """The demo's job file with this machine's paths, so that it can be read, changed and submitted again."""
    text = resources.files("client").joinpath("demo.yaml").read_text(encoding="utf-8")
    library = sysconfig.get_path("stdlib")
    document = apply_overrides(
        parse_document(text, origin="demo.yaml"), [f"data.sources[0].path={json.dumps(library)}", *overrides]
    )
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return path


def _roots(spec: JobSpec) -> list[Path]:
    """The folders that the demo's job reads, and no other."""
    paths = [Path(path) for _, path in spec.paths()]
    return [path if path.is_dir() else path.parent for path in paths]


def _watch(job: Job, total_steps: int, say: Console, losses: list[float]) -> JobProgress:
    """Shows the job until it ends; validation losses are added to `losses`."""

    def note(event: JobEvent) -> None:
        if isinstance(event.body, EvaluationFinished):
            losses.append(event.body.loss)

    with closing(job.events()) as events:
        return follow_events(events, view_for(say), total_steps=total_steps, on_event=note)


def _sample(export: Path) -> str:
    """Text that the exported model writes after `PROMPT`, opened by transformers in a process of its own."""
    command = [sys.executable, "-P", "-m", "client.sample", str(export), PROMPT]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=_SAMPLE_S, env=environment)
    except subprocess.TimeoutExpired as error:
        raise NotStarted(f"transformers took longer than {_SAMPLE_S:.0f} s to open {export}") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise NotStarted(f"transformers cannot open {export}: {lines[-1]}") from error
    text = done.stdout.decode(errors="replace")
    # A young model writes control characters, which a terminal would obey.
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "?" for sign in text)


def _tell(outcome: DemoOutcome, say: Console) -> None:
    say.rule("sample, opened with transformers")
    say.print(outcome.sample, markup=False)
    say.rule()
    for name, path in (
        ("folder", outcome.directory),
        ("job file", outcome.job_file),
        ("export", outcome.export),
        ("checkpoints", outcome.checkpoints),
        ("logs", outcome.logs),
    ):
        say.print(f"{name:<12}{path}")
    if outcome.validation_losses:
        first, last = outcome.validation_losses[0], outcome.validation_losses[-1]
        say.print(f"validation loss {first:.2f} -> {last:.2f} nats per byte in {outcome.seconds:.0f} s")
