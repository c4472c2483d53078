"""Cost of the loss of a device of a mesh: real processes on this machine, a mesh of two beside single devices.

    python -m bench.devices [--runs 5] [--ways kill,freeze,fill] [--seed 0] [--json]

Each run is a job of its own in float64, two stages with two holders each. Once it trains, the second device of the mesh
is struck in the middle of a backward: killed, frozen, or left without room for another tensor. Ends with one JSON line;
exit code 1 if a goal is missed.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

from bench.chaosing.job import MICROBATCH_SAMPLES, SEQUENCE_TOKENS, make_job
from bench.chaosing.meter import Meter
from bench.cluster import START_S, Cluster
from bench.detect import noticed_s
from bench.emulated.fleet import write_whole
from bench.recovering.cluster import incidents_of, num_doubled, num_steps_lost, wait_for_steps
from bench.reference import run_reference
from bench.report import Row, finish, spread
from client.api import Client
from skein.config.job import JobSpec
from skein.types import Precision
from skein.wire.views import JobEvent, StepFinished, WorkerState

MESH, SINGLES = "m0", ("s0", "s1", "s2")
NUM_WORKERS = 1 + len(SINGLES)
NUM_STEPS_BEFORE, NUM_STEPS_AFTER = 6, 3
"""Of each job, before it is struck, so that ops were timed; and after the worker is back at work."""
NUM_MICROBATCHES = 8
REL_LOSS = 1e-9
BACK_GOAL_S = 15.0
_POLL_S = 0.05
_LOOK_S = 0.005
_FULL = (": out of memory", "lost the other devices")
"""What a device process that has run out says, or another one if it has no memory left to say it with."""
_LITTLE_BYTES = 1 << 14
_WAYS = {
    "kill": ("a device process is killed", 0.5),
    "freeze": ("a device process is frozen", 3.0),
    "fill": ("a device has no room for another tensor", 0.5),
}
"""Fate of the device, and seconds by which it must be noticed; a frozen one may take twice the usual time of an op."""


def device_processes(worker: int | None = None) -> list[psutil.Process]:
    """Device processes of a worker's process, or of this one, in the order of the devices."""
    found = []
    for process in psutil.Process(worker).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            words = process.cmdline()
            if "worker.mesh" in words:
                found.append((int(words[-2]), process))
    return [process for _, process in sorted(found, key=lambda each: each[0])]


class StruckCluster(Cluster):
    """Meshes of two devices, the second of which can be struck, and workers with one device."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        # Whoever has no more room notices with the next tensor: nothing is given out again that was freed.
        self._environment = {**self._environment, "MALLOC_MMAP_THRESHOLD_": str(_LITTLE_BYTES)}

    def start_mesh(self, name: str) -> None:
        """Start a mesh."""
        self.run(name, "bench.devices_worker", [self.target, name, str(self.directory)])

    def device_processes(self, name: str) -> list[psutil.Process]:
        """Device processes of a worker, in the order of the devices."""
        return device_processes(self.workers[name].pid)

    def strike(self, name: str, how: str) -> float:
        """Have the device struck in the middle of the next backward; when it was lost, in Unix seconds.

        One without room for another tensor is lost once it asks for one, which may be some of an op later.
        """
        done = self.directory / f"{name}.struck"
        done.unlink(missing_ok=True)
        num_full = self._num_full(name)
        write_whole(self.directory / f"{name}.strike", how)
        if how == "fill":
            self._until(name, lambda: self._num_full(name) > num_full)
            return time.time()
        self._until(name, done.exists)
        return float(done.read_text(encoding="utf-8"))

    def _num_full(self, name: str) -> int:
        told = self.log_of(name)
        return sum(told.count(words) for words in _FULL)

    def _until(self, name: str, is_so: Callable[[], bool]) -> None:
        until_s = time.monotonic() + START_S
        while not is_so():
            assert time.monotonic() < until_s, self.log_of(name)[-2000:]
            time.sleep(_LOOK_S)


@contextmanager
def training(folder: Path) -> Iterator[tuple[StruckCluster, Client]]:
    """A cluster whose workers all have joined, and a client; ended on the way out."""
    with StruckCluster(folder) as cluster:
        cluster.start_coordinator()
        cluster.start_mesh(MESH)
        for name in SINGLES:
            cluster.start_worker(name)
        cluster.wait_for_workers(NUM_WORKERS)
        with cluster.client() as client:
            yield cluster, client


@dataclass(frozen=True, slots=True, kw_only=True)
class LostDevice:
    """Outcome of one strike; seconds are since it.

    Attributes:
        ended_s: until the worker had ended all its device processes.
        noticed_s: until the coordinator began a generation without the worker.
        back_s: until the worker was there again, with one device.
        working_s: until it held a stage again.
        step_s: median of the steps before.
        num_lost: steps that were committed and made again, or made twice.
        num_dropped: microbatches that a step does not have.
        num_left: processes of the mesh that were still there when the worker was back.
        losses: of each step.
    """

    ended_s: float
    noticed_s: float
    back_s: float
    working_s: float
    step_s: float
    num_lost: int
    num_dropped: int
    num_left: int
    losses: tuple[float, ...]


def job_of(name: str, seed: int) -> JobSpec:
    """The same job under any name."""
    return make_job(
        name,
        num_workers=NUM_WORKERS,
        steps=100_000,
        seed=seed,
        precision=Precision.FP64,
        num_microbatches=NUM_MICROBATCHES,
    )


def measure(cluster: StruckCluster, client: Client, way: str, *, run: int, seed: int) -> LostDevice:
    """Strike once, and see what came of it."""
    spec = job_of(f"{way}-{run}", seed)
    job = client.submit(spec)
    try:
        wait_for_steps(job, NUM_STEPS_BEFORE)
        processes = cluster.device_processes(MESH)
        struck_s = cluster.strike(MESH, way)
        gone, _ = psutil.wait_procs(processes, timeout=START_S)
        ended_s = time.time()
        noticed = noticed_s(job, struck_s, (MESH, MESH))
        back_s = _when(lambda: _is_here(client, "cpu"))
        num_left = sum(process.is_running() for process in processes if process not in gone)
        working_s = _when(lambda: any(w.worker == MESH and w.stages for w in client.workers()))
        wait_for_steps(job, NUM_STEPS_AFTER)
        events = job.history()
    finally:
        job.cancel(discard=True)
    commits = [e.wall_s for e in events if isinstance(e.body, StepFinished) and e.wall_s < struck_s]
    return LostDevice(
        ended_s=ended_s - struck_s,
        noticed_s=noticed - struck_s,
        back_s=back_s - struck_s,
        working_s=working_s - struck_s,
        step_s=median(after - before for before, after in pairwise(commits)),
        num_lost=num_steps_lost(events) + num_doubled(events),
        num_dropped=num_dropped(spec, events),
        num_left=num_left,
        losses=tuple(e.body.record.loss for e in events if isinstance(e.body, StepFinished)),
    )


def _is_here(client: Client, devices: str) -> bool:
    """Whether the mesh's worker is here, with these devices."""
    found = [worker for worker in client.workers() if worker.worker == MESH]
    return any(w.state is not WorkerState.LOST and w.profile.device == devices for w in found)


def _when(is_so: Callable[[], bool]) -> float:
    """Unix time at which something has come to be."""
    until_s = time.monotonic() + START_S
    while not is_so():
        assert time.monotonic() < until_s, "the worker did not come back"
        time.sleep(_POLL_S)
    return time.time()


def num_dropped(spec: JobSpec, events: Sequence[JobEvent]) -> int:
    """Microbatches that steps lack, by their tokens and by what incidents tell."""
    whole = spec.batch.samples * spec.data.sequence_tokens
    missing = sum(whole - e.body.record.num_tokens for e in events if isinstance(e.body, StepFinished))
    told = sum(incident.num_dropped for incident in incidents_of(events))
    return max(told, -(-missing // (MICROBATCH_SAMPLES * SEQUENCE_TOKENS)))


def rel_loss(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Farthest that a step's loss is from the one that is wanted, as a share of it."""
    return max(abs(one - other) / abs(other) for one, other in zip(found, wanted, strict=False))


def rows_of(way: str, found: Sequence[LostDevice], wanted: Sequence[float]) -> list[Row]:
    """Figures of one way; `wanted` are the losses of one plain torch process, of as many steps at least."""
    what, goal_s = _WAYS[way]
    return [
        _seconds(f"{what}: the worker has noticed, and ended the mesh", [x.ended_s for x in found], goal_s),
        _seconds(f"{what}: the coordinator has noticed", [x.noticed_s for x in found], goal_s),
        _seconds(f"{what}: the worker is back with one device", [x.back_s for x in found], BACK_GOAL_S),
        _seconds(f"{what}: it holds a stage again", [x.working_s for x in found], None),
        _none(f"{what}: steps lost", [x.num_lost for x in found]),
        _none(f"{what}: microbatches lost", [x.num_dropped for x in found]),
        _none(f"{what}: processes left", [x.num_left for x in found]),
        _curve(
            f"{what}: farthest loss from one plain torch process", [rel_loss(x.losses, wanted) for x in found]
        ),
    ]


def _seconds(what: str, found: Sequence[float], goal_s: float | None) -> Row:
    longest_s, against = max(found), f"longest of {len(found)}, median {median(found):.2f} s"
    is_met = goal_s is None or longest_s <= goal_s
    goal, ratio = ("none", 0.0) if goal_s is None else (f"<= {goal_s:g} s", longest_s / goal_s)
    return Row(
        what=what,
        value=longest_s,
        unit="s",
        against=against,
        ratio=ratio,
        goal=goal,
        holds=is_met,
        spread=spread(found),
    )


def _none(what: str, found: Sequence[int]) -> Row:
    total, against = sum(found), f"in {len(found)} losses"
    return Row(
        what=what,
        value=total,
        unit="",
        against=against,
        ratio=float(total),
        goal="0",
        holds=not total,
        spread=0.0,
    )


def _curve(what: str, found: Sequence[float]) -> Row:
    farthest = max(found)
    return Row(
        what=what,
        value=farthest,
        unit="of it",
        against="every step of each job",
        ratio=farthest / REL_LOSS,
        goal=f"<= {REL_LOSS:g}",
        holds=farthest <= REL_LOSS,
        spread=0.0,
    )


def main() -> int:
    """Take turns over the ways, print each time, and the line."""
    parser = argparse.ArgumentParser(prog="skein bench devices", description=main.__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each way")
    parser.add_argument("--ways", default=",".join(_WAYS), help=f"of {', '.join(_WAYS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keeps the logs")
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    args = parser.parse_args()
    found: dict[str, list[LostDevice]] = {way: [] for way in args.ways.split(",")}
    if unknown := sorted(found.keys() - _WAYS.keys()):
        parser.error(f"--ways: {', '.join(unknown)}: give some of {', '.join(_WAYS)}")
    with (
        tempfile.TemporaryDirectory() as passing,
        Meter() as meter,
        training(args.folder or Path(passing)) as (cluster, client),
    ):
        for run in range(args.runs):
            for way, losses in found.items():
                losses.append(measure(cluster, client, way, run=run, seed=args.seed))
                cluster.kill_worker(MESH)
                cluster.start_mesh(MESH)
                _when(lambda: _is_here(client, "cpu:2"))
                if not args.json:
                    told = replace(losses[-1], losses=())
                    print(f"run {run}: {way}: {told}, load {os.getloadavg()[0]:.1f}", flush=True)
    figures = {"seed": float(args.seed), "load": os.getloadavg()[0], "others_cores": meter.others_cores}
    num_steps = max(len(loss.losses) for losses in found.values() for loss in losses)
    wanted = [step.loss for step in run_reference(job_of("reference", args.seed), num_steps)]
    rows = [row for way, losses in found.items() for row in rows_of(way, losses, wanted)]
    return finish("devices", rows, figures=figures)


if __name__ == "__main__":
    sys.exit(main())
