"""Both holders of a stage stand still together, or are cut off from the coordinator, for seconds; nobody dies."""

import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bench.chaosing.blows import COORDINATOR
from bench.chaosing.cluster import ChaosCluster
from bench.chaosing.job import make_job
from bench.recovering.cluster import (
    commits_of,
    holders,
    num_doubled,
    num_steps_lost,
    wait_for_steps,
    wait_until_placed,
)
from bench.report import Row, spread
from client.api import Client

NUM_WORKERS, NUM_STAGES = 4, 2
SILENCES_S = (2.0, 4.0, 8.0)
_NUM_STEPS_BETWEEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Silences:
    """Committed steps that all of them cost, and for each the seconds from waking up to the next commit."""

    num_lost: int
    num_doubled: int
    seconds: tuple[float, ...]


def together(cluster: ChaosCluster, client: Client, *, count: int, seed: int) -> Silences:
    """Silence both holders of a stage, in turn of each and for 2, 4 or 8 seconds, so many times in one job.

    Every other time they are frozen; else they reach each other, and nothing of them reaches the coordinator.
    """
    spec = make_job("silence", num_workers=NUM_WORKERS, steps=100_000, seed=seed)
    job = client.submit(spec)
    woken_s = []
    for turn in range(count):
        wait_until_placed(cluster, client, cluster.names)
        wait_for_steps(job, _NUM_STEPS_BETWEEN)
        names = holders(client, turn // 2 % NUM_STAGES)
        with _frozen(cluster, names) if turn % 2 else _cut_off(cluster, names):
            time.sleep(SILENCES_S[turn % len(SILENCES_S)])
        woken_s.append(time.time())
    wait_for_steps(job, 2)
    events = job.history()
    job.cancel(discard=True)
    commits, lost = commits_of(events), num_steps_lost(events)
    took = tuple(commits[bisect_right(commits, at)] - at for at in woken_s)
    return Silences(num_lost=lost, num_doubled=num_doubled(events) - lost, seconds=took)


@contextmanager
def _frozen(cluster: ChaosCluster, names: Sequence[str]) -> Iterator[None]:
    for name in names:
        cluster.freeze_worker(name)
    yield
    for name in names:
        cluster.thaw_worker(name)


@contextmanager
def _cut_off(cluster: ChaosCluster, names: Sequence[str]) -> Iterator[None]:
    for name in names:
        cluster.wires.cut(name, COORDINATOR)
    yield
    for name in names:
        cluster.wires.heal(name, COORDINATOR)


def rows_of(found: Silences) -> list[Row]:
    """Nobody died, so nothing may be lost."""
    took = found.seconds
    return [
        Row(
            what="committed steps lost: both holders of a stage frozen or cut off for 2, 4, 8 s",
            value=found.num_lost,
            unit="steps",
            against=f"{len(took)} times; next commit at most {max(took):.1f} s after they are back",
            ratio=float(found.num_lost),
            goal="<= 0",
            holds=found.num_lost == 0 and found.num_doubled <= 0,
            spread=spread(took),
        )
    ]
