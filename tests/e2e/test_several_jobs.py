"""Three jobs on eight worker processes; two of these die, and the coordinator: curves are as if each were alone."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from client.api import Client
from skein.config.job import JobSpec
from skein.config.resources import ResourcesSpec
from skein.errors import SkeinError
from skein.types import JobState
from skein.wire.views import StepFinished, WentBack, WorkerState
from tests.e2e.jobs import NUM_STEPS, losses_of, text_job, wait_for_step
from tests.e2e.shared import SharedCluster

NUM_WORKERS = 8
MOST_IDLE_S = 10.0
_POLL_S = 0.2


class Idle:
    """Longest time for which some worker had nothing to do while a job waited that nothing was wrong with."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._since: dict[str, float] = {}

    def look(self, client: Client) -> None:
        """Look once."""
        now = time.monotonic()
        waits = any(job.waiting_since_wall_s is not None for job in client.jobs())
        idle = (
            {worker.worker for worker in client.workers() if worker.state is WorkerState.IDLE}
            if waits
            else set()
        )
        self._since = {name: self._since.get(name, now) for name in idle}
        self.longest_s = max([self.longest_s, *(now - since for since in self._since.values())])


@contextmanager
def watched(cluster: SharedCluster) -> Iterator[Idle]:
    """What workers do is looked at meanwhile, wherever a coordinator answers."""
    idle, is_over = Idle(), threading.Event()

    def watch() -> None:
        with cluster.client() as client:
            while not is_over.wait(_POLL_S):
                with suppress(SkeinError):
                    idle.look(client)

    watcher = threading.Thread(target=watch, name="watcher", daemon=True)
    watcher.start()
    yield idle
    is_over.set()
    watcher.join()


def job_of(stages: int, text: Path) -> JobSpec:
    """A job that keeps two holders of each stage, so that no death takes the last one."""
    job = text_job(f"with-{stages}", text, steps=NUM_STEPS, stages=stages)
    return job.model_copy(update={"resources": ResourcesSpec(min_workers=2 * stages)})


@pytest.mark.long
def test_three_jobs_come_to_what_each_comes_to_alone(
    shared: SharedCluster, text: Path, undisturbed: dict[int, float]
) -> None:
    shared.gather(NUM_WORKERS)
    with shared.client() as client, watched(shared) as idle:
        jobs = [client.submit(job_of(stages, text)) for stages in (2, 1, 1)]
        for job in jobs[:2]:
            wait_for_step(job, 2)
            shared.restart(next(worker.worker for worker in client.workers() if worker.job == job.id))
        wait_for_step(jobs[2], 4)
        shared.kill_actor()
        for job in jobs:
            status, events = job.wait(), job.history()
            assert status.state is JobState.FINISHED, status.reason
            assert status.num_steps_lost == 0
            assert not [event for event in events if isinstance(event.body, WentBack)]
            steps = [event.body.record.step for event in events if isinstance(event.body, StepFinished)]
            assert steps == list(range(NUM_STEPS))
            # Another plan sums in another order: float32 rounding, grown over the steps.
            assert losses_of(events) == pytest.approx(undisturbed, rel=1e-5)
    assert idle.longest_s < MOST_IDLE_S
