"""A sweep with real processes: trials train as rows on two workers, one is killed, and the best trial is exported."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from client.api import Client, Job
from skein.config.load import parse_job
from skein.types import JobState, WorkerId
from skein.wire.views import StateChanged, StepFinished
from tests.e2e.shared import SharedCluster

JOB = """
name: rates
model: {family: mlp, widths: [32]}
data: {sources: [{format: digits}]}
batch: {samples: 32, microbatch_samples: 32}
parallel: {stages: 1}
budget: {steps: 60}
evaluation: {samples: 160}
sweep:
  search: hyperband
  num_trials: 9
  least_steps: 10
  metric: evaluation_loss
  fuse: always
  round_steps: 5
  space:
    optimizer.learning_rate: {log_uniform: [1.0e-4, 1.0]}
"""

CHOSEN = """
name: parts
model: {family: mlp, widths: [32]}
data:
  sources: [{format: digits}]
  coreset: {method: craig, fraction: 0.1, refresh_epochs: 4, max_overhead: 1000}
batch: {samples: 32, microbatch_samples: 32}
parallel: {stages: 1}
precision: fp64
budget: {steps: 66}
evaluation: {samples: 160}
sweep:
  search: grid
  fuse: always
  per_array: 2
  round_steps: 4
  space:
    optimizer.learning_rate: [0.001, 0.003, 0.01, 0.03]
"""
"""Each trial chooses rows before its first step, and after 22 and 44."""


def wait_until_running(job: Job) -> None:
    """Until an array of a sweep is at work."""
    for event in job.events():
        if isinstance(event.body, StateChanged) and event.body.state is JobState.RUNNING:
            return
    raise AssertionError(f"{job.id} never ran: {job.status()}")


def wait_until_stepped(array: Job) -> None:
    """Until an array has made some rounds, or is packed anew."""
    for event in array.events():
        if isinstance(event.body, StepFinished) and event.body.record.step >= 2:
            return


def at_work(client: Client, job: Job) -> WorkerId:
    """A worker that has an array of a sweep, as soon as one does."""
    while not job.status().state.is_final:
        for worker in client.workers():
            if worker.job is not None and worker.job.startswith(f"{job.id}-a"):
                return worker.worker
    raise AssertionError(f"{job.id} ended before a worker was killed")


def test_the_best_of_many_trials_is_found_and_exported_though_a_worker_is_killed(
    shared: SharedCluster, tmp_path: Path
) -> None:
    shared.gather(2)
    with shared.client() as client:
        job = client.submit(parse_job(JOB, origin="job"))
        wait_until_running(job)
        wait_until_stepped(client.job(f"{job.id}-a1"))
        shared.restart(at_work(client, job))
        done = job.wait()
        assert done.state is JobState.FINISHED, done.reason
        assert [found.name for found in client.jobs() if found.job == job.id] == ["rates"]
        assert sorted(trial.num_steps for trial in done.trials) == [20] * 6 + [60] * 3
        best = client.export(job.id, tmp_path / "best", trial="best")
        chosen = next(trial for trial in done.trials if trial.is_best)
        assert (best.trial, chosen.num_steps) == (chosen.trial, 60)
        assert load_file(tmp_path / "best" / "model.safetensors").keys()


def wait_until_chosen(job: Job, step: int) -> None:
    """Until a trial draws by a choice that was made at a step, or after it."""
    while not (status := job.status()).state.is_final:
        if any(trial.choice is not None and trial.choice.version >= step for trial in status.trials):
            return
    raise AssertionError(f"{job.id} ended before it chose at {step}: {status}")


def weights(client: Client, sweep: str, folder: Path) -> list[dict[str, NDArray[np.float32]]]:
    """Weights of all trials: losses are of a round in an array, and of a step in a trial alone."""
    folder.mkdir()
    trials = [x.trial for x in client.job(sweep).status().trials]
    for trial in trials:
        client.export(sweep, folder / str(trial), trial=trial)
    return [load_file(folder / str(trial) / "model.safetensors") for trial in trials]


@pytest.mark.long
def test_trials_choose_and_learn_as_undisturbed_though_workers_and_the_coordinator_are_killed(
    shared: SharedCluster, tmp_path: Path
) -> None:
    shared.gather(2)
    with shared.client() as client:
        undisturbed = client.submit(parse_job(CHOSEN, origin="job"))
        calm = undisturbed.wait()
        job = client.submit(parse_job(CHOSEN, origin="job"))
        wait_until_chosen(job, 0)
        shared.restart(at_work(client, job))
        wait_until_chosen(job, 22)
        shared.kill_coordinator()
        shared.start_coordinator()
    with shared.client() as client:
        job = client.job(job.id)
        wait_until_chosen(job, 44)
        shared.restart(at_work(client, job))
        done = job.wait()
        saved = [weights(client, each, tmp_path / each) for each in (job.id, undisturbed.id)]
    assert (calm.state, done.state) == (JobState.FINISHED, JobState.FINISHED), (calm.reason, done.reason)
    for here, there in zip(done.trials, calm.trials, strict=True):
        assert (here.num_steps, there.num_steps) == (66, 66)
        assert here.choice is not None
        assert there.choice is not None
        assert here.choice.version == there.choice.version == 44
        assert here.choice.largest_weight == there.choice.largest_weight
        assert here.evaluation_loss == pytest.approx(there.evaluation_loss, rel=1e-9)
    for row, other in zip(*saved, strict=True):
        for name, values in row.items():
            # Exports are in fp32.
            np.testing.assert_allclose(values, other[name], rtol=1e-6, atol=1e-8)
