"""A cluster whose workers and whose coordinator can be killed and brought back, and what its jobs tell of time."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

from bench.cluster import START_S, Cluster
from bench.emulated.fleet import write_whole
from bench.recovering.fate import Orders
from bench.recovering.worker import MODE_FILE, Mode
from client.api import Client, Job
from skein.errors import SkeinError
from skein.protocol.log.records import Incident
from skein.wire.views import IncidentEnded, JobEvent, StepFinished, WentBack

POLL_S = 0.1
PATIENCE_S = 180.0
"""For anything that should take seconds; this only turns a hang into a failure."""


class RecoveryCluster(Cluster):
    """Workers w0, w1, ... of one thread each."""

    def __init__(self, directory: Path, num_workers: int) -> None:
        super().__init__(directory)
        self.names = tuple(f"w{index}" for index in range(num_workers))

    def start_worker(self, name: str) -> None:
        """Start it, for the first time or again."""
        arguments = [self.target, name, str(self.directory)]
        self.run(name, "bench.recovering.worker", arguments)

    def order(self, name: str, orders: Orders) -> None:
        """Tell a worker where to end."""
        write_whole(self.directory / f"{name}.orders", orders.model_dump_json())

    def turn(self, mode: Mode) -> None:
        """Tell all workers what their boundary logs keep, from the next step or the one after it."""
        write_whole(self.directory / MODE_FILE, mode)

    def moments_of(self, name: str) -> list[tuple[float, str]]:
        """When, in Unix seconds, a worker came to where."""
        path = self.directory / f"{name}.moments"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        split = [line.partition(" ") for line in lines]
        return [(float(at), name) for at, _, name in split]


@contextmanager
def recovering(folder: Path, num_workers: int) -> Iterator[tuple[RecoveryCluster, Client]]:
    """A cluster whose workers all have joined, and a client; ended on the way out."""
    with RecoveryCluster(folder, num_workers) as cluster:
        cluster.start_all(cluster.names)
        with cluster.client() as client:
            yield cluster, client


def holders(client: Client, stage: int) -> list[str]:
    """Who holds a stage."""
    return [worker.worker for worker in client.workers() if stage in worker.stages]


def wait_until_placed(cluster: Cluster, client: Client, names: Sequence[str]) -> None:
    """Until all of these have work.

    Raises:
        AssertionError: one of them has ended, or they wait for too long.
    """
    until_s = time.monotonic() + PATIENCE_S
    while True:
        working = {worker.worker for worker in client.workers() if worker.stages}
        if working.issuperset(names):
            return
        ended = [name for name in names if cluster.workers[name].poll() is not None]
        assert not ended, [cluster.log_of(name)[-2000:] for name in ended]
        assert time.monotonic() < until_s, f"{sorted(set(names) - working)} got no work"
        time.sleep(POLL_S)


def wait_for_steps(job: Job, count: int) -> None:
    """Until so many more are committed than now, or the job is over; also if the coordinator is away meanwhile."""
    wanted = None
    until_s = time.monotonic() + START_S + PATIENCE_S
    while True:
        with suppress(SkeinError):
            status = job.status()
            wanted = status.step + count if wanted is None else wanted
            if status.step >= wanted or status.state.is_final:
                return
        assert time.monotonic() < until_s, f"{count} steps took too long"
        time.sleep(POLL_S)


# --- what happened ---


def commits_of(events: Sequence[JobEvent]) -> list[float]:
    """When steps were committed, in Unix seconds."""
    return [event.wall_s for event in events if isinstance(event.body, StepFinished)]


def durations(commits: Sequence[float]) -> list[float]:
    """Seconds of each step but the first."""
    return [after - before for before, after in pairwise(commits)]


def incidents_of(events: Sequence[JobEvent]) -> list[Incident]:
    """Failures that are over."""
    return [event.body.incident for event in events if isinstance(event.body, IncidentEnded)]


def num_steps_lost(events: Sequence[JobEvent]) -> int:
    """Committed steps that had to be made again."""
    backs = [event.body for event in events if isinstance(event.body, WentBack)]
    return sum(back.from_version - back.to_version for back in backs)


def num_doubled(events: Sequence[JobEvent]) -> int:
    """Steps that were committed twice."""
    steps = [event.body.record.step for event in events if isinstance(event.body, StepFinished)]
    return len(steps) - len(set(steps))


def percentile(found: Sequence[float], percent: int) -> float:
    """So many percent are no larger.

    >>> percentile([3.0, 1.0, 2.0, 4.0], 50), percentile([3.0, 1.0, 2.0, 4.0], 95)
    (2.0, 4.0)
    """
    return sorted(found)[-(-percent * len(found) // 100) - 1]
