"""How long the coordinator's sudden death holds training up, and what it costs."""

import time
from bisect import bisect_right
from dataclasses import dataclass
from statistics import median

from bench.chaosing.job import make_job
from bench.recovering.cluster import (
    RecoveryCluster,
    commits_of,
    num_doubled,
    num_steps_lost,
    percentile,
    wait_for_steps,
    wait_until_placed,
)
from bench.report import Row, spread
from client.api import Client
from skein.rng import stream

NUM_WORKERS = 4
GOAL_S = 10.0
_WITHIN_S = 1.5
"""Deaths are drawn from so long a time after a step's end: longer than a step takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """Seconds from each death until a step was committed, and what went wrong."""

    seconds: tuple[float, ...]
    num_lost: int
    num_doubled: int
    num_commits: int


def restarts(cluster: RecoveryCluster, client: Client, *, num_kills: int, seed: int) -> Restarts:
    """SIGKILL the coordinator at random moments, and start it again at once on its state directory."""
    luck = stream(seed, "coordinator")
    job = client.submit(make_job("leader", num_workers=NUM_WORKERS, steps=100_000, seed=seed))
    wait_until_placed(cluster, client, cluster.names[:NUM_WORKERS])
    wait_for_steps(job, 3)
    struck: list[float] = []
    for _ in range(num_kills):
        time.sleep(float(luck.random()) * _WITHIN_S)
        struck.append(time.time())
        cluster.kill_host()
        cluster.start_coordinator()
        wait_for_steps(job, 3)
    events = job.history()
    job.cancel()
    commits = commits_of(events)
    return Restarts(
        seconds=tuple(commits[bisect_right(commits, at_s)] - at_s for at_s in struck),
        num_lost=num_steps_lost(events),
        num_doubled=num_doubled(events),
        num_commits=len(commits),
    )


def rows_of(found: Restarts) -> list[Row]:
    """The longest wait, and steps lost."""
    longest, num_wrong = max(found.seconds), found.num_lost + found.num_doubled
    p50, p99 = median(found.seconds), percentile(found.seconds, 99)
    return [
        Row(
            what=f"coordinator kill -9 to the next committed step, longest of {len(found.seconds)}",
            value=longest,
            unit="s",
            against=f"p50 {p50:.2f} s, p99 {p99:.2f} s",
            ratio=longest / GOAL_S,
            goal=f"<= {GOAL_S:g} s",
            holds=longest <= GOAL_S,
            spread=spread(found.seconds),
        ),
        Row(
            what="committed steps lost or doubled by the coordinator's deaths",
            value=num_wrong,
            unit="steps",
            against=f"{found.num_commits} committed",
            ratio=float(num_wrong),
            goal="0",
            holds=num_wrong == 0,
            spread=0.0,
        ),
    ]
