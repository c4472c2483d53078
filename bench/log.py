"""A coordinator with a long past: a run log of a million entries and ten thousand jobs, and how soon it serves again.

    python -m bench.log [--records N] [--jobs N] [--state DIR] [--json]

The log is written as a coordinator writes it, entry by entry chained to the one before; all jobs but the newest have
ended. The first start makes the snapshot beside it, as after an upgrade of the release; the starts after it are
measured in a process of their own: seconds from the end of its imports until it serves, the first page of Jobs/List,
`skein jobs`, the events of one ended job, and the process's memory. Ends with one JSON line; exit code 1 if a goal is
missed.
"""

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.report import Row, finish, spread
from client.aio import AsyncClient
from coordinator.records.logfile import LOG_FILE, chained, entry_checksum, open_database
from coordinator.serving import Serving, ServingOptions
from skein.config.job import JobSpec
from skein.config.load import parse_job
from skein.protocol.coordinator.coordinator_io import MakePlan, PlanMade
from skein.protocol.log.records import (
    CheckpointCommitted,
    EpochOpened,
    GenerationMember,
    GenerationOpened,
    JobEnded,
    JobSubmitted,
    StepCommitted,
)
from skein.protocol.messages.directives import Decision, StepRecord
from skein.types import Epoch, Generation, Incarnation, JobId, JobState, Step, WorkerId
from skein.wire.codec import RECORD
from skein.wire.v1 import log_pb2

SERVE_S, PAGE_S, COMMAND_S, MEMORY_MIB = 2.0, 0.3, 0.7, 250.0
"""Goals: serving, first page, `skein jobs`, and the resident memory of the coordinator."""
_BATCH = 20_000
_JOB = """
name: past
model: {{family: llama, shape: {{hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2}}}}
data: {{sources: [{{format: text, path: /corpus{seed}}}], sequence_tokens: 64}}
batch: {{samples: 8, microbatch_samples: 2}}
budget: {{steps: 100000000}}
"""


def log_entries(num_records: int, jobs: list[JobSpec], num_jobs: int) -> Iterator[bytes]:
    """Payloads of a log: an opening, then one job after the other, the newest of which has not ended."""
    yield RECORD.to_bytes(EpochOpened(epoch=Epoch(1), wall_s=1.0))
    per_job = (num_records - 1) // num_jobs
    for number in range(num_jobs):
        is_last = number == num_jobs - 1
        size = num_records - 1 - per_job * (num_jobs - 1) if is_last else per_job
        yield from _of_job(number, jobs[number % len(jobs)], size, has_ended=not is_last)


def _of_job(number: int, spec: JobSpec, size: int, *, has_ended: bool) -> Iterator[bytes]:
    job, wall_s = JobId(f"{spec.name}-{number + 1}"), 10.0 * number
    text = spec.canonical_json()
    yield RECORD.to_bytes(JobSubmitted(job=job, key=f"key-{number}", spec=text, wall_s=wall_s))
    members = tuple(
        GenerationMember(worker=WorkerId(f"w{i}"), incarnation=Incarnation(f"i{i}-{number // 100}"))
        for i in range(4)
    )
    opened = GenerationOpened(
        job=job, generation=Generation(number + 1), members=members, reason="begins", wall_s=wall_s
    )
    yield RECORD.to_bytes(opened)
    num_steps = size - 3 - has_ended
    yield from _steps(job, num_steps, wall_s)
    saved = CheckpointCommitted(job=job, version=Step(num_steps), url=None, stages=(), wall_s=wall_s + 9.0)
    yield RECORD.to_bytes(saved)
    if has_ended:
        ended = JobEnded(job=job, state=JobState.FINISHED, reason="all steps done", wall_s=wall_s + 9.5)
        yield RECORD.to_bytes(ended)


def _steps(job: JobId, num_steps: int, wall_s: float) -> Iterator[bytes]:
    """Commits of a job, each made of the same message: encoding a million values anew would take a minute."""
    record = StepRecord(
        step=Step(0),
        decision=Decision.APPLY,
        reason="",
        results=(),
        loss=1.0,
        num_tokens=4096,
        weight=1 / 4096,
        gradient_norm=1.0,
        clip=1.0,
        learning_rate=0.001,
        samples_after=0,
    )
    message: log_pb2.Record = RECORD.encode(StepCommitted(job=job, record=record, wall_s=wall_s))
    committed = message.step_committed
    for step in range(num_steps):
        committed.record.step = step
        committed.record.loss = 3.0 / (1 + step)
        committed.record.samples_after = 8 * (step + 1)
        committed.wall_s = wall_s + 0.05 * step
        yield message.SerializeToString(deterministic=True)


def write_log(directory: Path, num_records: int, num_jobs: int) -> None:
    """Write such a log, chained, in a few large transactions."""
    directory.mkdir(parents=True, exist_ok=True)
    before, rows = b"", []
    specs = [parse_job(_JOB.format(seed=seed), origin="bench") for seed in range(997)]
    with closing(open_database(directory / LOG_FILE)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN")
        for number, payload in enumerate(log_entries(num_records, specs, num_jobs), start=1):
            before = chained(before or None, number, 1, payload)
            rows.append((number, 1, payload, entry_checksum(number, 1, payload), before))
            if len(rows) == _BATCH:
                connection.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", rows)
                rows.clear()
        connection.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", rows)
        connection.execute("UPDATE owner SET epoch = 1")
        connection.execute("COMMIT")


# --- the coordinator that is measured ---


async def _never_asked(asked: MakePlan) -> PlanMade:
    raise AssertionError(f"no worker is here, and a plan is asked for: {asked.run}")


async def serve(directory: Path) -> None:
    """Serve until standard input ends; tells in a line how long it took, all imports being done."""
    began, busy = time.perf_counter(), time.process_time()
    serving = await Serving.start(ServingOptions(state_dir=directory), _never_asked)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(serving.stop)
        seconds = time.perf_counter() - began
        busy_s = time.process_time() - busy
        told = {"seconds": seconds, "busy_s": busy_s, "address": serving.where().address}
        print(json.dumps(told), flush=True)
        await asyncio.to_thread(sys.stdin.read)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A coordinator that serves: after how many seconds, of which the processor was busy for some; and its process."""

    seconds: float
    busy_s: float
    address: str
    pid: int

    @property
    def memory_mib(self) -> float:
        """Resident memory now."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise AssertionError("the kernel tells no VmRSS")


@contextmanager
def started(directory: Path) -> Iterator[Started]:
    """A coordinator in a process of its own."""
    command = [sys.executable, "-m", "bench.log", "--serve", str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        line = process.stdout.readline()
        assert line, "the coordinator ended"
        told = json.loads(line)
        try:
            yield Started(
                seconds=told["seconds"], busy_s=told["busy_s"], address=told["address"], pid=process.pid
            )
        finally:
            process.stdin.close()


def timed(command: Sequence[str]) -> tuple[float, float]:
    """Wall and processor seconds of a command, its interpreter's start included."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, busy_s


def first_page_s(address: str) -> float:
    """Seconds of the first page of Jobs/List, over a connection that is there already."""

    async def measured() -> float:
        async with AsyncClient(address) as client:
            _ = await client.version()
            began = time.perf_counter()
            page = await client.job_page()
            assert page.jobs
            return time.perf_counter() - began

    return asyncio.run(measured())


def main() -> int:
    """Write the log, start on it some times, and measure; exit 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="skein bench log", description=main.__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--state", type=Path, help="a folder for the log; one that is there already is used again"
    )
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print the line of JSON alone")
    args = parser.parse_args()
    if args.serve is not None:
        asyncio.run(serve(args.serve))
        return 0
    with tempfile.TemporaryDirectory(prefix="skein-log-") as folder:
        directory = args.state or Path(folder)
        if not (directory / LOG_FILE).exists():
            write_log(directory, args.records, args.jobs)
        return finish("log", _measured(directory, args.runs, is_quiet=args.json))


def _measured(directory: Path, num_runs: int, *, is_quiet: bool) -> list[Row]:
    with started(directory) as first:
        upgrade_s = first.seconds
    names = ("serving", "busy", "page", "command", "command busy", "events", "memory")
    runs: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(num_runs):
        with started(directory) as now:
            page_s = first_page_s(now.address)
            skein = [sys.executable, "-m", "skein"]
            command_s, command_busy_s = timed([*skein, "jobs", "--coordinator", now.address])
            events_s, _ = timed([*skein, "logs", "past-1", "--coordinator", now.address])
            figures = (now.seconds, now.busy_s, page_s, command_s, command_busy_s, events_s, now.memory_mib)
        for name, figure in zip(names, figures, strict=True):
            runs[name].append(figure)
        if not is_quiet:
            print(", ".join(f"{name} {figure:.3g}" for name, figure in zip(names, figures, strict=True)))
    goals = (
        ("a coordinator serves, its imports done", "serving", "s", SERVE_S),
        ("the same, of processor time", "busy", "s", SERVE_S),
        ("first page of Jobs/List", "page", "s", PAGE_S),
        ("skein jobs", "command", "s", COMMAND_S),
        ("the same, of processor time", "command busy", "s", COMMAND_S),
        ("skein logs of one ended job", "events", "s", 4 * COMMAND_S),
        ("resident memory of the coordinator", "memory", "MiB", MEMORY_MIB),
    )
    return [
        Row(
            what=what,
            value=median(runs[name]),
            unit=unit,
            against=f"the goal; the first start, which made the snapshot, took {upgrade_s:.1f} s",
            ratio=median(runs[name]) / goal,
            goal=f"<= {goal}",
            holds=median(runs[name]) <= goal,
            spread=spread(runs[name]),
        )
        for what, name, unit, goal in goals
    ]


if __name__ == "__main__":
    sys.exit(main())
