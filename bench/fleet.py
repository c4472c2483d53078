"""A thousand light workers over real gRPC: seconds until the first commit and of a step, and what each is told.

    python -m bench.fleet [--stages 20] [--replicas 50] [--steps 20] [--profile FILE] [--json]

One process has the coordinator's services, without Ray, and plans in a process beside it; another has all workers, each
with a connection of its own. They join, acknowledge, report and vote without arithmetic. Ends with one JSON line; exit
code 1 if a goal is missed.
"""

import argparse
import asyncio
import cProfile
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import inf
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from bench.light_worker import FleetCounts, LightWorker
from bench.report import Row, finish, spread
from coordinator.driver import AppendLog
from coordinator.serving import Serving, ServingOptions
from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import (
    BackupSpec,
    BatchSpec,
    BudgetSpec,
    CheckpointSpec,
    EvaluationSpec,
    JobSpec,
    ParallelSpec,
    PlanSpec,
)
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.protocol.coordinator.coordinator_io import MakePlan, PlanMade
from skein.protocol.coordinator.runs.placing.portfolio import plan_here
from skein.protocol.log.records import Record
from skein.types import JobId
from skein.wire.channel import Lane, open_channel
from skein.wire.credentials import NO_CREDENTIALS
from skein.wire.process.files import raise_open_files
from skein.wire.v1 import jobs_pb2, jobs_pb2_grpc

FIRST_COMMIT_S, STEP_S, TOLD_BYTES = 15.0, 3.0, 2000
MICROBATCHES_PER_REPLICA = 2
LIMIT_S = 600.0
"""For all steps, after the job was submitted."""
JOIN_S = 300.0
NUM_JOINING = 50
"""Workers that dial at once; the next ones follow when these were admitted."""
NUM_SITES = 4


def fleet_job(*, stages: int, replicas: int) -> JobSpec:
    """A job that wants a worker for each chunk, and nothing but steps."""
    num_microbatches = MICROBATCHES_PER_REPLICA * replicas
    shape = LlamaShape(hidden_size=128, intermediate_size=384, num_hidden_layers=2 * stages)
    return JobSpec(
        name="fleet",
        model=LlamaModel(shape=shape),
        data=DataSpec(sources=(TextSource(path="/light"),), sequence_tokens=256),
        batch=BatchSpec(samples=4 * num_microbatches, microbatch_samples=4),
        parallel=ParallelSpec(stages=stages, replicas=replicas),
        plan=PlanSpec(method="balanced", replan_if_off_by=1e6),
        budget=BudgetSpec(steps=1_000_000),
        evaluation=EvaluationSpec(every_steps=0),
        checkpoint=CheckpointSpec(every_steps=0),
        backup=BackupSpec(every_steps=0),
    )


# --- the coordinator's process ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Moment at which a record became durable or a plan was made, and CPU seconds of the process until then."""

    what: str
    at_s: float
    cpu_s: float

    @classmethod
    def now(cls, what: str) -> "Mark":
        return cls(what=what, at_s=time.time(), cpu_s=time.process_time())


class MarkingLog:
    """A run log that notes when records become durable."""

    def __init__(self, log: AppendLog, marks: list[Mark]) -> None:
        self._log = log
        self._marks = marks

    def append(self, records: Sequence[Record]) -> None:
        self._log.append(records)
        self._marks += [Mark.now(type(record).__name__) for record in records]

    def read(self, job: JobId | None = None) -> Iterator[Record]:
        return self._log.read(job)


async def serve(state_dir: Path, port: int) -> list[Mark]:
    """Serve until SIGTERM; gives what was noted."""
    marks: list[Mark] = []
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:

        async def plan(asked: MakePlan) -> PlanMade:
            marks.append(Mark.now("PlanAsked"))
            made = await asyncio.get_running_loop().run_in_executor(pool, plan_here, asked)
            marks.append(Mark.now("PlanMade"))
            return made

        options = ServingOptions(state_dir=state_dir, port=port, metrics_port=None)
        serving = await Serving.start(options, plan, wrap=lambda log: MarkingLog(log, marks))
        print(serving.where().address, flush=True)
        await ended.wait()
        await serving.stop()
    return marks


def serve_process(args: argparse.Namespace) -> int:
    """Be the coordinator's process; the marks go to a file beside the state directory."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    raise_open_files()
    profile = cProfile.Profile()
    if args.profile:
        marks = profile.runcall(asyncio.run, serve(args.serve / "state", 0))
        profile.dump_stats(args.profile)
    else:
        marks = asyncio.run(serve(args.serve / "state", 0))
    (args.serve / "marks.json").write_text(json.dumps([asdict(mark) for mark in marks]), encoding="utf-8")
    return 0


@asynccontextmanager
async def coordinator(folder: Path, profile: Path | None) -> AsyncIterator[str]:
    """Address of a coordinator in a process of its own, which has written its marks when this is left."""
    given = () if profile is None else ("--profile", str(profile))
    with (folder / "coordinator.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.fleet", "--serve", str(folder), *given),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.terminate()
        await process.wait()


# --- the workers' process ---


async def run_fleet(folder: Path, args: argparse.Namespace) -> FleetCounts:
    """Have a fleet join, and a job's first steps committed; gives what the workers saw."""
    counts, num_workers = FleetCounts(), args.stages * args.replicas
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(coordinator(folder, args.profile))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        running: list[asyncio.Task[None]] = []
        async with asyncio.timeout(JOIN_S):
            for number in range(num_workers):
                channel = open_channel(address, Lane.CONTROL, credentials=NO_CREDENTIALS)
                worker = LightWorker(f"w{number:04}", f"site{number % NUM_SITES}", channel, counts)
                running.append(group.create_task(worker.run()))
                await counts.reach(welcomes=number + 1 - NUM_JOINING)
            await counts.reach(welcomes=num_workers)
        spec = fleet_job(stages=args.stages, replicas=args.replicas)
        async with open_channel(address, Lane.CONTROL, credentials=NO_CREDENTIALS) as channel:
            request = jobs_pb2.SubmitRequest(key="fleet", spec=spec.canonical_json())
            await jobs_pb2_grpc.JobsStub(channel).Submit(request)
        with suppress(TimeoutError):
            async with asyncio.timeout(args.limit):
                await counts.reach(commits=args.steps)
        for task in running:
            task.cancel()
    return counts


# --- figures ---


def rows_of(marks: Sequence[Mark], counts: FleetCounts, args: argparse.Namespace) -> list[Row]:
    """What the run showed beside its goals."""
    planned = next((mark for mark in marks if mark.what == "PlanMade"), None)
    commits = [mark for mark in marks if mark.what == "StepCommitted"]
    steps_s = [b.at_s - a.at_s for a, b in pairwise(commits)] or [args.limit]
    steps_cpu_s = [b.cpu_s - a.cpu_s for a, b in pairwise(commits)] or [args.limit]
    first_s = commits[0].at_s - planned.at_s if planned and commits else args.limit
    lost = sum(counts.lost_streams.values())
    generations = [
        (told["new_generation"] + told["assign"]) / counts.num_sampled
        for generation, told in counts.sent_bytes.items()
        if generation
    ]
    whole = sum(told["assign"] for told in counts.told_bytes.values()) / counts.num_sampled
    num_told = counts.num_sampled * max(1, len(commits))
    step_bytes = sum(
        told[kind] for told in counts.sent_bytes.values() for kind in ("start", "prepare", "commit")
    )
    return [
        _row("from the plan to the first commit", first_s, "s", FIRST_COMMIT_S),
        _row("a step, median", median(steps_s), "s", STEP_S, spread=spread(steps_s)),
        _row("a step, longest", max(steps_s), "s", STEP_S),
        _row(
            "CPU of the coordinator in a step", median(steps_cpu_s), "s", STEP_S, spread=spread(steps_cpu_s)
        ),
        _row("streams that ended", lost, "streams", 0),
        _row("sent to each by a generation, at most", max(generations, default=0.0), "bytes", TOLD_BYTES),
        _row("sent to each in a step", step_bytes / num_told, "bytes", TOLD_BYTES),
        _row("all assignments of a worker, before compression", whole, "bytes", inf),
        _row("generations until the last step", len(generations), "generations", 1),
    ]


def _row(what: str, value: float, unit: str, most: float, *, spread: float = 0.0) -> Row:
    return Row(
        what=what,
        value=round(value, 3),
        unit=unit,
        against=f"at most {most:g}",
        ratio=round(value / most, 3) if most else value,
        goal=f"<= {most:g} {unit}",
        holds=value <= most,
        spread=round(spread, 3),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="skein bench fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=20)
    parser.add_argument("--replicas", type=int, default=50, help="of each stage, each a worker")
    parser.add_argument("--steps", type=int, default=20, help="that are committed before the run ends")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that all steps may take")
    parser.add_argument("--folder", type=Path, help="keeps the coordinator's log")
    parser.add_argument("--profile", type=Path, help="file for a profile of the coordinator's process")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    return parser.parse_args()


def main() -> int:
    """Run a fleet, and print what it showed."""
    args = _arguments()
    if args.serve is not None:
        return serve_process(args)
    raise_open_files()
    with tempfile.TemporaryDirectory() as passing:
        folder = args.folder or Path(passing)
        folder.mkdir(parents=True, exist_ok=True)
        counts = asyncio.run(run_fleet(folder, args))
        marks = [Mark(**mark) for mark in json.loads((folder / "marks.json").read_text(encoding="utf-8"))]
    rows = rows_of(marks, counts, args)
    if not args.json:
        for row in rows:
            print(f"{row.what}: {row.value} {row.unit} (goal {row.goal}, holds: {row.holds})")
        print(
            f"streams ended: {counts.lost_streams.most_common(5)}, refused: {counts.refused.most_common(5)}"
        )
    if not args.json:
        print(
            f"beats were late by at most {counts.longest_late_s:.1f} s, writes {counts.longest_write_s:.1f} s"
        )
    figures = {"workers": float(args.stages * args.replicas), "load": os.getloadavg()[0]}
    return finish("fleet", rows, figures=figures)


if __name__ == "__main__":
    sys.exit(main())
