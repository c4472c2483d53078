"""What a join costs those who train meanwhile, and how soon the newcomer contributes."""

import re
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from bench.chaosing.job import make_job
from bench.recovering.cluster import (
    PATIENCE_S,
    POLL_S,
    RecoveryCluster,
    commits_of,
    holders,
    num_steps_lost,
    wait_for_steps,
    wait_until_placed,
)
from bench.recovering.fate import Orders
from bench.recovering.worker import CONTRIBUTED, FETCHED, WELCOMED
from bench.report import Row, spread
from client.api import Client
from skein.config.job import BackupSpec, JobSpec

NUM_WORKERS, NUM_STAGES = 6, 2
STEP_GOAL, STEPS_GOAL = 1.25, 1
NUM_BEFORE = 12
"""Steps of those who are left, to compare with."""
_HERE = re.compile(r"stage=\d+ version=(\d+) copy=followed here")


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """One newcomer: steps before and while it came, and steps from when its state was current until it counted."""

    before_s: float
    during_s: tuple[float, ...]
    num_steps: int
    num_lost: int

    @property
    def ratio(self) -> float:
        """Of the mean step while it came, to the median before."""
        return sum(self.during_s) / len(self.during_s) / self.before_s


def join(cluster: RecoveryCluster, client: Client, *, run: int, donor_dies: bool) -> Join:
    """A holder dies, those who are left find their pace, and it comes back; perhaps a donor dies in the transfer."""
    name = f"join-{run}{'-without-a-donor' if donor_dies else ''}"
    job = client.submit(_spec(name, seed=run))
    wait_for_steps(job, 4)
    placed = {stage: holders(client, stage) for stage in range(NUM_STAGES)}
    # One of three holders, so that the transfer has two donors.
    newcomer, *donors = placed[max(placed, key=lambda stage: len(placed[stage]))]
    cluster.kill_worker(newcomer)
    wait_for_steps(job, NUM_BEFORE + 2)
    if donor_dies:
        cluster.order(donors[0], Orders(at=("before Give state",)))
    began_s = time.time()
    cluster.start_worker(newcomer)
    wait_until_placed(cluster, client, [newcomer])
    moments = _moments_of(cluster, newcomer, since_s=began_s)
    wait_for_steps(job, 2)
    events = job.history()
    fetched = int(_HERE.findall(cluster.log_of(newcomer))[-1])
    lost = num_steps_lost(events)
    found = judged(moments, commits_of(events), fetched=fetched, began_s=began_s, num_lost=lost)
    job.cancel(discard=True)
    if donor_dies:
        cluster.workers[donors[0]].wait(PATIENCE_S)
        cluster.kill_worker(donors[0])
        cluster.start_worker(donors[0])
    cluster.wait_for_workers(NUM_WORKERS)
    return found


def _spec(name: str, *, seed: int) -> JobSpec:
    spec = make_job(name, num_workers=2 * NUM_STAGES, steps=100_000, seed=seed)
    parallel = spec.parallel.model_copy(update={"replicas": NUM_WORKERS // NUM_STAGES})
    # No transfers but the one that is looked at.
    return spec.model_copy(update={"parallel": parallel, "backup": BackupSpec(every_steps=0)})


def _moments_of(cluster: RecoveryCluster, name: str, *, since_s: float) -> list[tuple[float, str]]:
    """Up to its first contribution, at least."""
    until_s = time.time() + PATIENCE_S
    while True:
        found = [(at_s, moment) for at_s, moment in cluster.moments_of(name) if at_s > since_s]
        if any(moment in CONTRIBUTED for _, moment in found):
            return found
        assert time.time() < until_s, f"{name} contributed nothing"
        time.sleep(POLL_S)


def judged(
    moments: Sequence[tuple[float, str]],
    commits: Sequence[float],
    *,
    fetched: int,
    began_s: float,
    num_lost: int,
) -> Join:
    """The figures of one join.

    Args:
        moments: of the newcomer, since it was started.
        commits: when versions 1, 2, ... came to be.
        fetched: the version that it fetched whole; each time it is told of another, that is one further.
        began_s: when it was started: whoever was left had their pace by then.
        num_lost: committed steps that were lost.
    """
    hello_s = next(at_s for at_s, moment in moments if moment == WELCOMED)
    contributed_s = next(at_s for at_s, moment in moments if moment in CONTRIBUTED)
    here_s = [at_s for at_s, moment in moments if moment == FETCHED]
    # Current: nothing is committed that it lacks.
    current_s = next(
        (at_s for at, at_s in enumerate(here_s, start=fetched) if at >= bisect_right(commits, at_s)),
        here_s[-1],
    )
    before = [after - ago for ago, after in pairwise(commits) if after < began_s]
    during = [after - ago for ago, after in pairwise(commits) if after > hello_s and ago < contributed_s]
    return Join(
        before_s=median(before[-NUM_BEFORE:]),
        during_s=tuple(during),
        num_steps=bisect_right(commits, contributed_s) - bisect_right(commits, current_s),
        num_lost=num_lost,
    )


def rows_of(joins: list[Join], *, what: str) -> list[Row]:
    """How much longer steps were, and how soon the newcomer contributed."""
    ratios = [one.ratio for one in joins]
    longest = max(s / one.before_s for one in joins for s in one.during_s)
    num_steps = [one.num_steps for one in joins]
    return [
        Row(
            what=f"step while {what}, from its hello to its first contribution",
            value=median(sum(one.during_s) / len(one.during_s) for one in joins),
            unit="s",
            against=f"median before: {median(one.before_s for one in joins):.3f} s; {len(joins)} joins, "
            f"the longest step {longest:.2f} times that",
            ratio=median(ratios),
            goal=f"<= {STEP_GOAL}",
            holds=median(ratios) <= STEP_GOAL,
            spread=spread(ratios),
        ),
        Row(
            what=f"steps from its state being current to its first contribution, {what}",
            value=max(num_steps),
            unit="steps",
            against=f"{sum(one.num_lost for one in joins)} committed steps lost in {len(joins)} joins",
            ratio=max(num_steps) / STEPS_GOAL,
            goal=f"<= {STEPS_GOAL}, none lost",
            holds=max(num_steps) <= STEPS_GOAL and not any(one.num_lost for one in joins),
            spread=0.0,
        ),
    ]
