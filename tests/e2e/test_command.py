"""The real command on real services: wishes are carried out, mistakes are one line with cause and cure."""

import subprocess
import sys
import time
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from math import ceil
from pathlib import Path

import pytest
import yaml

from bench.cluster import Cluster
from client.cli import run
from client.local import free_port
from skein.config.job import JobSpec
from skein.config.load import apply_overrides, job_from_document
from skein.types import JobState
from skein.wire.views import StepFinished, WorkerState
from tests.e2e.jobs import text_job
from tests.e2e.shared import SharedCluster, left_running, marked
from tests.support.extent import part

DONE, FAILED, USAGE = 0, 1, 2
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a command."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def job(text: Path) -> JobSpec:
    return text_job("mistaken", text, steps=2, stages=1, replicas=1)


def skein(*arguments: str) -> Ran:
    """The command within this process."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as errors:
        code = run(arguments)
    return Ran(code, out.getvalue(), errors.getvalue())


def program(*arguments: str, folder: Path | None = None) -> Ran:
    """As a process of its own, which may become a service; perhaps `marked` by a folder."""
    ran = subprocess.run(
        [sys.executable, "-m", "client.cli", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=600,
        check=False,
        env=marked(folder) if folder else None,
    )
    return Ran(ran.returncode, ran.stdout, ran.stderr)


def submit(cluster: Cluster, job: JobSpec, folder: Path, *overrides: str, more: tuple[str, ...] = ()) -> Ran:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job.model_dump(mode="json", exclude_none=True)))
    settings = [part for override in overrides for part in ("--set", override)]
    return skein("submit", str(path), "--wait", "--coordinator", cluster.target, *settings, *more)


def only_error(ran: Ran, code: int) -> str:
    """The one line that says what was wrong."""
    assert ran.returncode == code, ran.stderr
    assert "Traceback" not in ran.stderr + ran.stdout
    errors = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ran.stderr
    return errors[0]


# --- wishes ---


def curve(cluster: Cluster, job: str) -> list[float]:
    """Losses by step; every step is there once."""
    with cluster.client() as client:
        steps = client.job(job).metrics().steps
    assert [step.record.step for step in steps] == list(range(len(steps)))
    return [step.record.loss for step in steps]


@pytest.fixture(scope="module")
def undisturbed(shared: SharedCluster, job: JobSpec, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A job of thirty steps that nobody minds."""
    shared.gather(4)
    ran = submit(shared, job, tmp_path_factory.mktemp("undisturbed"), "name=undisturbed", "budget.steps=30")
    assert ran.returncode == DONE, ran.stderr
    return ran.stdout.strip()


def test_a_paused_job_goes_on_as_if_nothing_had_been(
    cluster: Cluster, job: JobSpec, undisturbed: str
) -> None:
    document = apply_overrides(job.model_dump(mode="json"), ["name=paused", "budget.steps=30"])
    with cluster.client() as client:
        paused = client.submit(job_from_document(document))
        with closing(paused.events()) as events:
            _ = next(event for event in events if isinstance(event.body, StepFinished))
        _ = paused.pause("lunch")
        ran = skein("pause", paused.id, "--coordinator", cluster.target)
        assert (ran.returncode, ran.stdout) == (DONE, f"{paused.id} held: lunch\n")
        held = paused.status()
        assert 0 < held.step < 30
        assert held.checkpoint_version == held.step
        assert {worker.state for worker in client.workers()} == {WorkerState.IDLE}
    ran = skein("resume", paused.id, "--wait", "--coordinator", cluster.target)
    assert ran.returncode == DONE, ran.stderr
    assert curve(cluster, paused.id) == curve(cluster, undisturbed)


def test_a_job_begins_with_the_parameters_of_another_for_a_tenth_of_an_epoch(
    cluster: Cluster, job: JobSpec, undisturbed: str, tmp_path: Path
) -> None:
    budget = "budget={epochs: 0.1}"
    ran = submit(cluster, job, tmp_path, "name=begun", budget, more=("--from", undisturbed))
    assert ran.returncode == DONE, ran.stderr
    with cluster.client() as client:
        status = client.job(ran.stdout.strip()).status()
    assert status.step == status.total_steps == ceil(0.1 * status.num_train_samples / job.batch.samples)
    before = curve(cluster, undisturbed)
    # The same samples as the first step of the other job had, after thirty steps of learning.
    assert curve(cluster, ran.stdout.strip())[0] < before[0] - 0.5


def test_a_job_that_diverges_fails_and_says_what_is_still_good(
    cluster: Cluster, job: JobSpec, tmp_path: Path
) -> None:
    wild = "optimizer={name: sgd, learning_rate: 10, warmup_steps: 0, clip_norm: null}"
    error = only_error(submit(cluster, job, tmp_path, "name=wild", wild, "budget.steps=100"), FAILED)
    assert "diverged at step" in error
    assert "last good version" in error


# --- mistakes ---


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.sources=[{format: text, path: /etc/hostname}]", ("samples",)),
        ("data.tokenizer=/etc/hostname", ("/etc/hostname", "tokenizer")),
        (
            "data.sources=[{format: tokens, path: /etc/hostname, dtype: uint32}]",
            ("data.sources[0].dtype", "uint32"),
        ),
        ("checkpoint.url=file:///proc/nowhere", ("/proc/nowhere",)),
    ],
)
def test_a_job_that_no_worker_can_run_fails_with_the_reason(
    cluster: Cluster, job: JobSpec, tmp_path: Path, override: str, said: tuple[str, ...]
) -> None:
    error = only_error(submit(cluster, job, tmp_path, override), FAILED)
    assert all(word in error for word in said), error


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.sources=[{format: text, path: /nowhere/at/all}]", "/nowhere/at/all"),
        ("data.tokenizer=/nowhere/tokenizer.json", "/nowhere/tokenizer.json"),
    ],
)
def test_a_job_whose_files_no_worker_has_waits_with_the_reason(
    cluster: Cluster, job: JobSpec, override: str, said: str
) -> None:
    document = apply_overrides(job.model_dump(mode="json"), [override])
    with cluster.client() as client:
        waits = client.submit(job_from_document(document))
        until_s = time.monotonic() + PATIENCE_S
        # One worker after the other says so.
        while "nobody can use" not in (reason := waits.status().reason):
            assert time.monotonic() < until_s, waits.status()
            time.sleep(0.1)
        assert said in reason
        waits.cancel()
        assert waits.wait().state is JobState.CANCELLED


def test_the_service_goes_on_after_all_those(cluster: Cluster, job: JobSpec, tmp_path: Path) -> None:
    assert submit(cluster, job, tmp_path).returncode == DONE
    ran = program("submit", str(tmp_path / "job.yaml"), "--wait", "--coordinator", cluster.target)
    assert ran.returncode == DONE, ran.stderr


def test_absent_initial_weights_are_refused_before_anything_is_submitted(
    cluster: Cluster, job: JobSpec, tmp_path: Path
) -> None:
    error = only_error(submit(cluster, job, tmp_path, "model={family: llama, init_from: /nowhere}"), USAGE)
    assert "init_from" in error
    assert "/nowhere" in error


def test_a_job_without_a_checkpoint_cannot_be_exported(
    cluster: Cluster, job: JobSpec, tmp_path: Path
) -> None:
    with cluster.client() as client:
        unsaved = client.submit(job)
        _ = unsaved.cancel(discard=True)
        _ = unsaved.wait()
    ran = skein("export", unsaved.id, "--to", str(tmp_path / "out"), "--coordinator", cluster.target)
    assert "checkpoint" in only_error(ran, FAILED)
    assert not (tmp_path / "out").exists()


def test_a_port_in_use_ends_a_coordinator_with_one_line(cluster: Cluster, tmp_path: Path) -> None:
    ports = ["--port", str(cluster.port), "--metrics-port", "0"]
    error = only_error(
        program("coordinator", "up", *ports, "--state-dir", str(tmp_path / "state"), folder=tmp_path), FAILED
    )
    assert str(cluster.port) in error
    assert left_running(tmp_path) == []


def test_a_state_directory_in_use_ends_a_second_coordinator(cluster: Cluster) -> None:
    state = str(cluster.directory / "state")
    error = only_error(
        program("coordinator", "up", "--port", str(free_port()), "--metrics-port", "0", "--state-dir", state),
        FAILED,
    )
    assert state in error
    assert "is using it; stop that one first" in error


@pytest.mark.parametrize("listen", part(["0.0.0.0", "::"], every=2))
def test_a_worker_listens_to_the_world_with_an_identity_only(listen: str) -> None:
    ran = program("worker", "up", "--join", "127.0.0.1:9", "--listen", listen)
    assert "join with a line" in only_error(ran, USAGE)
