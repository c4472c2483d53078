"""How long a failure goes unnoticed: real processes on loopback that train, and are struck one at a time.

    python -m bench.detect [--runs 10] [--kinds kill,freeze,...] [--seed 1] [--json]

Each run is a job of its own. Counted is from the blow until the coordinator opens a generation because of it, both by
the wall clock of this machine: no user-set timeout is involved. Ends with one JSON line; exit code 1
if a goal is missed.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median, quantiles

from bench.chaosing.blows import COORDINATOR
from bench.chaosing.cluster import ChaosCluster
from bench.chaosing.job import make_job
from bench.detect_worker import stuck_file
from bench.report import Row, finish, spread
from client.api import Client, Job
from skein.rng import stream
from skein.wire.views import GenerationBegun, StepFinished, WorkerStatus

NUM_WORKERS = 4
NUM_STEPS_BEFORE = 6
"""Of each job, before it is struck: ops are measured by then."""
_LASTS_S = 90.0
"""Far beyond every goal; what is not noticed by then is not noticed."""
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way to fail. `goal_s`: by when it must be noticed at the latest."""

    name: str
    what: str
    goal_s: float


KINDS = (
    Kind(name="kill", what="a worker's process dies (SIGKILL)", goal_s=0.5),
    Kind(name="freeze", what="a worker's process stands still (SIGSTOP)", goal_s=3.0),
    Kind(name="cut", what="a black hole between two workers", goal_s=3.0),
    Kind(name="silence", what="a black hole between a worker and the coordinator", goal_s=3.0),
    Kind(name="stuck", what="an op never ends; ops take milliseconds", goal_s=5.0),
)


class DetectCluster(ChaosCluster):
    """Workers behind wires, whose ops can be made to never end."""

    module = "bench.detect_worker"

    def stick(self, name: str) -> None:
        """The next op of this worker never ends."""
        stuck_file(self.directory / f"{name}.json").touch()

    def replace_worker(self, name: str) -> None:
        """Whatever became of it: a new process under the name."""
        self.kill_worker(name)
        stuck_file(self.directory / f"{name}.json").unlink(missing_ok=True)
        self.start_worker(name)


@contextmanager
def training(folder: Path) -> Iterator[tuple[DetectCluster, Client]]:
    """A cluster whose workers all have joined, and a client; ended on the way out."""
    cluster = DetectCluster(folder, NUM_WORKERS)
    with cluster.wires, cluster:
        cluster.start_all(cluster.names)
        with cluster.client() as client:
            yield cluster, client


def draw_target(workers: tuple[WorkerStatus, ...], kind: Kind, *, run: int, seed: int) -> tuple[str, str]:
    """Whom to strike; of a link both ends, which hold the same stage: those talk in every step."""
    luck = stream(seed, "detect", kind.name, str(run))
    if kind.name == "cut":
        pairs = [
            (a.worker, b.worker) for a, b in combinations(workers, 2) if a.stages and a.stages == b.stages
        ]
        return pairs[int(luck.integers(len(pairs)))]
    busy = [worker.worker for worker in workers if worker.stages]
    return busy[int(luck.integers(len(busy)))], COORDINATOR


@contextmanager
def struck(cluster: DetectCluster, kind: Kind, one: str, other: str) -> Iterator[float]:
    """Strike; gives when that was, in Unix seconds. All is well again afterwards."""
    act: dict[str, Callable[[], None]] = {
        "kill": lambda: cluster.workers[one].send_signal(signal.SIGKILL),
        "freeze": lambda: cluster.freeze_worker(one),
        "stuck": lambda: cluster.stick(one),
    }
    struck_s = time.time()
    act.get(kind.name, lambda: cluster.wires.cut(one, other))()
    try:
        yield struck_s
    finally:
        if kind.name in act:
            cluster.replace_worker(one)
        else:
            cluster.wires.heal(one, other)


def noticed_s(job: Job, since_s: float, names: tuple[str, str]) -> float:
    """When a generation was opened that blames one of these, in Unix seconds.

    Raises:
        AssertionError: none was, for much longer than any goal.
    """
    until_s = time.time() + _LASTS_S
    while time.time() < until_s:
        for event in job.history():
            body = event.body
            is_new = isinstance(body, GenerationBegun) and event.wall_s >= since_s
            if is_new and isinstance(body, GenerationBegun) and any(name in body.reason for name in names):
                return event.wall_s
        time.sleep(_POLL_S)
    raise AssertionError(f"nobody noticed {names} within {_LASTS_S:.0f} s")


def measure(cluster: DetectCluster, client: Client, kind: Kind, *, run: int, seed: int) -> float:
    """Seconds until one blow was noticed."""
    spec = make_job(f"detect-{kind.name}-{run}", num_workers=NUM_WORKERS, steps=100_000, seed=seed)
    job = client.submit(spec)
    try:
        num_steps = 0
        for event in job.events():
            num_steps += isinstance(event.body, StepFinished)
            if num_steps >= NUM_STEPS_BEFORE:
                break
        one, other = draw_target(client.workers(), kind, run=run, seed=seed)
        names = (one, one) if other == COORDINATOR else (one, other)
        with struck(cluster, kind, one, other) as struck_s:
            return noticed_s(job, struck_s, names) - struck_s
    finally:
        job.cancel(discard=True)
        cluster.wait_for_workers(NUM_WORKERS)


def p99(found: list[float]) -> float:
    """
    >>> p99([1.0]), round(p99([1.0, 2.0]), 6)
    (1.0, 1.99)
    """
    return found[0] if len(found) == 1 else quantiles(found, n=100, method="inclusive")[98]


def row_of(kind: Kind, found: list[float]) -> Row:
    """Its figures; the largest must be within the goal."""
    return Row(
        what=f"noticed: {kind.what}",
        value=max(found),
        unit="s",
        against=f"p50 {median(found):.2f} s, p99 {p99(found):.2f} s of {len(found)}",
        ratio=max(found) / kind.goal_s,
        goal=f"<= {kind.goal_s:g} s",
        holds=max(found) <= kind.goal_s,
        spread=spread(found),
    )


def main() -> int:
    """Take turns over the kinds, print each time, and the line."""
    names = [kind.name for kind in KINDS]
    parser = argparse.ArgumentParser(prog="skein bench detect", description=main.__doc__)
    parser.add_argument("--runs", type=int, default=10, help="of each kind")
    parser.add_argument("--kinds", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    args = parser.parse_args()
    kinds = [kind for kind in KINDS if kind.name in args.kinds.split(",")]
    found: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder, training(Path(folder)) as (cluster, client):
        for run in range(args.runs):
            for kind in kinds:
                seconds = measure(cluster, client, kind, run=run, seed=args.seed)
                found[kind.name].append(seconds)
                if not args.json:
                    load = os.getloadavg()[0]
                    print(f"run {run} {kind.name}: {seconds:.2f} s, load {load:.1f}", flush=True)
    figures = {"workers": float(NUM_WORKERS), "load": os.getloadavg()[0]}
    return finish("detect", [row_of(kind, found[kind.name]) for kind in kinds], figures=figures)


if __name__ == "__main__":
    sys.exit(main())
