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
    """Seconds from each death until a step was committed, and what went wrong.

    Attributes:
        actor_s: of the coordinator's process alone, which Ray starts again.
        host_s: of all of Ray too, with a new launcher at once.
    """

    actor_s: tuple[float, ...]
    host_s: tuple[float, ...]
    num_lost: int
    num_doubled: int
    num_commits: int


def restarts(cluster: RecoveryCluster, client: Client, *, num_kills: int, seed: int) -> Restarts:
    """SIGKILL the coordinator at random moments, in turn without its launcher and with it."""
    luck = stream(seed, "coordinator")
    job = client.submit(make_job("leader", num_workers=NUM_WORKERS, steps=100_000, seed=seed))
    wait_until_placed(cluster, client, cluster.names[:NUM_WORKERS])
    wait_for_steps(job, 3)
    struck: list[float] = []
    for turn in range(num_kills):
        time.sleep(float(luck.random()) * _WITHIN_S)
        struck.append(time.time())
        if turn % 2:
            cluster.kill_host()
            cluster.start_coordinator()
        else:
            cluster.kill_actor()
        wait_for_steps(job, 3)
    events = job.history()
    job.cancel(discard=True)
    commits = commits_of(events)
    seconds = [commits[bisect_right(commits, at_s)] - at_s for at_s in struck]
    return Restarts(
        actor_s=tuple(seconds[::2]),
        host_s=tuple(seconds[1::2]),
        num_lost=num_steps_lost(events),
        num_doubled=num_doubled(events),
        num_commits=len(commits),
    )


def rows_of(found: Restarts) -> list[Row]:
    """The longest waits, and steps lost."""
    num_wrong = found.num_lost + found.num_doubled
    return [
        _row("coordinator kill -9", found.actor_s),
        _row("coordinator, launcher and Ray kill -9", found.host_s),
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


def _row(what: str, found: tuple[float, ...]) -> Row:
    longest = max(found)
    return Row(
        what=f"{what} to the next committed step, longest of {len(found)}",
        value=longest,
        unit="s",
        against=f"p50 {median(found):.2f} s, p99 {percentile(found, 99):.2f} s",
        ratio=longest / GOAL_S,
        goal=f"<= {GOAL_S:g} s",
        holds=longest <= GOAL_S,
        spread=spread(found),
    )
