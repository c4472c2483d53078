"""What a coordinator takes of a sweep, beside its workers: real processes, 32 trials of steps of some milliseconds.

Much of what a coordinator does goes by the clock (beats, looks at the queue, samples of metrics), so where other
programs have the cores it takes as much of the time, and more beside what workers then get done.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from bench.cluster import Cluster, running
from bench.report import Row
from client.api import Client
from coordinator.records.store import LOCK_FILE
from skein.config.data.sources import DigitsSource
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec, BudgetSpec, EvaluationSpec, JobSpec, ParallelSpec
from skein.config.sweep.spec import SweepSpec, ValuesSpec
from skein.model.families.mlp import MlpModel
from skein.types import JobState

NUM_TRIALS, NUM_WORKERS, NUM_STEPS = 32, 2, 1_000
GOAL = 0.03
REST_S = 15.0
"""Seconds of a coordinator with workers and without a job, which a process on Ray does not pass without any work."""
LOOK_S = 0.5
"""Seconds between two questions of a client, as somebody asks who looks at the page."""


def job(num_trials: int) -> JobSpec:
    """Trials that differ in their learning rate, in as many arrays as make each worker begin twice."""
    return JobSpec(
        name="share",
        model=MlpModel(family="mlp", widths=(384, 384)),
        data=DataSpec(sources=(DigitsSource(format="digits"),)),
        batch=BatchSpec(samples=192, microbatch_samples=192),
        parallel=ParallelSpec(stages=1),
        budget=BudgetSpec(steps=NUM_STEPS),
        evaluation=EvaluationSpec(every_steps=0, samples=64),
        sweep=SweepSpec(
            search="random",
            num_trials=num_trials,
            per_array=NUM_TRIALS // (2 * NUM_WORKERS),
            space={"optimizer.learning_rate": ValuesSpec(log_uniform=(1e-4, 1e-2))},
        ),
    )


def share_rows() -> Iterator[Row]:
    """Seconds of the coordinator's process while a sweep is trained, beside the clock and beside its workers'."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder), NUM_WORKERS) as cluster,
        cluster.client() as client,
    ):
        _train(client, num_trials=NUM_WORKERS)  # What is loaded for a first sweep is no part of the second.
        pids = [process.pid for process in cluster.workers.values()]
        at_rest = _cpu_s([_host(cluster)])
        time.sleep(REST_S)
        at_rest = (_cpu_s([_host(cluster)]) - at_rest) / REST_S
        before, began = (_cpu_s([_host(cluster)]), _cpu_s(pids)), time.monotonic()
        _train(client, num_trials=NUM_TRIALS)
        wall_s = time.monotonic() - began
        own_s, workers_s = _cpu_s([_host(cluster)]) - before[0], _cpu_s(pids) - before[1]
    step_ms = 1e3 * workers_s / (NUM_TRIALS * NUM_STEPS)
    what = f"a sweep of {NUM_TRIALS} trials of {NUM_STEPS} steps of {step_ms:.2g} ms, {NUM_WORKERS} workers"
    own = f"{what}: the coordinator's CPU time, {at_rest:.1%} of the clock at rest"
    yield _row(f"{own}: beyond that, beside the clock", own_s - at_rest * wall_s, wall_s, GOAL)
    yield _row(f"{own}: all of it, beside the clock", own_s, wall_s, None)
    yield _row(f"{own}: all of it, beside that of all workers", own_s, workers_s, None)


def _row(what: str, own_s: float, beside_s: float, most: float | None) -> Row:
    return Row(
        what=what,
        value=own_s,
        unit="s",
        against=f"{beside_s:.3g} s",
        ratio=own_s / beside_s,
        goal="none" if most is None else f"≤ {most:g}",
        holds=most is None or own_s / beside_s <= most,
        spread=0.0,
    )


def _train(client: Client, *, num_trials: int) -> None:
    submitted = client.submit(job(num_trials))
    while not (status := submitted.status()).state.is_final:
        time.sleep(LOOK_S)
    assert status.state is JobState.FINISHED, status.reason


def _host(cluster: Cluster) -> int:
    """Process that owns the state directory, which Ray has started."""
    return int((cluster.state / LOCK_FILE).read_text())


def _cpu_s(pids: list[int]) -> float:
    """CPU seconds of these processes so far."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(x.user + x.system for x in times)
