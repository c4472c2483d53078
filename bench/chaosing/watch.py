"""Waits for jobs whose workers may end, whether they were struck or not."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from bench.chaosing.cluster import ChaosCluster
from client.api import Job
from skein.errors import SkeinError
from skein.types import JobState
from skein.wire.views import StepFinished

_POLL_S = 0.5
_LAST_WORDS = 2000
"""Characters."""


def ended_by_themselves(cluster: ChaosCluster) -> tuple[str, ...]:
    """Workers whose processes are gone although nobody killed them."""
    return tuple(name for name, process in cluster.workers.items() if process.poll() is not None)


def wait_for_step(job: Job, step: int) -> None:
    """Until it is committed, or the job is over."""
    for event in job.events():
        if isinstance(event.body, StepFinished) and event.body.record.step >= step:
            return


def finish_in_peace(cluster: ChaosCluster, job: Job) -> None:
    """Until the job has finished.

    Raises:
        AssertionError: it ended otherwise, or a worker ended.
    """
    with watched(job) as is_over:
        while not is_over.wait(_POLL_S):
            for name in ended_by_themselves(cluster):
                raise AssertionError(f"{name} ended: {cluster.log_of(name)[-_LAST_WORDS:]}")
    status = job.status()
    assert status.state is JobState.FINISHED, status.reason


@contextmanager
def watched(job: Job) -> Iterator[threading.Event]:
    """An event that is set when the job is over, well or not, or its coordinator does not come back."""
    is_over = threading.Event()

    def watch() -> None:
        with suppress(SkeinError):
            job.wait()
        is_over.set()

    threading.Thread(target=watch, name="watcher", daemon=True).start()
    yield is_over


def give_up_at(seconds: float) -> float:
    """When a job that blows are meant to last so long for is not waited for any more: Unix seconds."""
    return time.time() + 4 * seconds + 600
