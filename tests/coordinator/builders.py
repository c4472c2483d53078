"""Coordinators in memory: a run log whose disk can be held up, and everything else a driver needs."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.checkpoints import CheckpointStore
from coordinator.driver import AnswerPlan, Driver
from coordinator.records.journal import Journal
from coordinator.streams import Stream
from coordinator.telling.metrics import CoordinatorMetrics
from skein import PROTOCOL_VERSION
from skein.config.data.sources import DigitsSource
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec, BudgetSpec, JobSpec, ParallelSpec
from skein.model.families.digits_cnn import DigitsCnnModel
from skein.plan.balanced import make_balanced_plan
from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator import Coordinator
from skein.protocol.coordinator.coordinator_io import CancelAsked, MakePlan, PlanMade
from skein.protocol.log.records import (
    CheckpointCommitted,
    EpochOpened,
    JobSubmitted,
    Record,
    StageFiles,
    StepCommitted,
    job_of_record,
)
from skein.protocol.messages.directives import CheckpointFile, Decision, NewGeneration, StepRecord
from skein.protocol.messages.reports import Ack, Hello
from skein.topology.fleet import Fleet, FleetWorker, Profile
from skein.types import Epoch, Incarnation, JobId, SiteId, StageIndex, Step, WorkerId
from tests.support.turns import until

WAIT_S = 120.0
"""Far above what anything here takes; reached only when something hangs."""


def job_spec(name: str = "digits", *, steps: int = 10) -> JobSpec:
    """A job that one worker can do."""
    return JobSpec(
        name=name,
        model=DigitsCnnModel(family="digits_cnn"),
        data=DataSpec(sources=(DigitsSource(format="digits"),), sequence_tokens=1),
        batch=BatchSpec(samples=4, microbatch_samples=2),
        parallel=ParallelSpec(stages=1, replicas=1),
        budget=BudgetSpec(steps=steps),
    )


def hello(
    worker: str = "w1",
    incarnation: str = "first",
    *,
    version: int = PROTOCOL_VERSION,
    secret: str = "of all processes of this name",  # noqa: S107 - to test with
) -> Hello:
    profile = Profile(device="cpu", device_name="test", flops_per_s=1e9, memory_bytes=1 << 30)
    return Hello(
        worker=WorkerId(worker),
        incarnation=Incarnation(incarnation),
        protocol_version=version,
        site=SiteId("here"),
        address="127.0.0.1:1",
        profile=profile,
        epoch=Epoch(0),
        secret=secret,
    )


def opened(epoch: int) -> EpochOpened:
    return EpochOpened(epoch=Epoch(epoch), wall_s=float(epoch))


def submitted(job: str, *, steps: int = 10) -> JobSubmitted:
    spec = job_spec(steps=steps).canonical_json()
    return JobSubmitted(job=JobId(job), key=f"key-of-{job}", spec=spec, wall_s=0.0)


def committed(job: str, step: int, *, wall_s: float, num_tokens: int = 100) -> StepCommitted:
    record = StepRecord(
        step=Step(step),
        decision=Decision.APPLY,
        reason="",
        results=(),
        loss=5.0 - 0.1 * step,
        num_tokens=num_tokens,
        weight=1 / num_tokens,
        gradient_norm=1.5,
        clip=1.0,
        learning_rate=1e-3,
        samples_after=4 * (step + 1),
    )
    return StepCommitted(job=JobId(job), record=record, wall_s=wall_s)


def checkpointed(
    job: str, version: int, *files: CheckpointFile, url: str | None = None
) -> CheckpointCommitted:
    stages = (StageFiles(stage=StageIndex(0), files=files),)
    return CheckpointCommitted(job=JobId(job), version=Step(version), url=url, stages=stages, wall_s=50.0)


class MemoryLog:
    """A run log in memory. While `gate` is closed its disk is slow; `error` is what it says instead of writing."""

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self.records = list(records)
        self.appends: list[tuple[Record, ...]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error: Exception | None = None

    async def is_entered(self) -> None:
        """Returns once an append has begun."""
        assert await asyncio.to_thread(self.entered.wait, WAIT_S)

    def append(self, records: Sequence[Record]) -> None:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        self.appends.append(tuple(records))
        self.records += records

    def read(self, job: JobId | None = None) -> Iterator[Record]:
        return iter([record for record in self.records if job in (None, job_of_record(record))])


class Files(CheckpointStore):
    """Checkpoint files that come out well unless there is an `error`, and what was asked of them."""

    def __init__(self) -> None:
        super().__init__(Path("unused"))
        self.error: Exception | None = None
        self.manifests: list[CheckpointCommitted] = []
        self.pruned: list[tuple[JobId, tuple[Step, ...]]] = []

    def write_manifest(self, checkpoint: CheckpointCommitted, spec: JobSpec) -> None:
        self.manifests.append(checkpoint)
        if self.error is not None:
            raise self.error

    def verify(self, checkpoint: CheckpointCommitted) -> None:
        if self.error is not None:
            raise self.error

    def prune(self, job: JobId, url: str | None, keep: Sequence[Step], drop: Sequence[Step] = ()) -> None:
        self.pruned.append((job, tuple(keep)))


def one_worker_plan() -> Plan:
    """Everything on w1."""
    worker = FleetWorker(worker=WorkerId("w1"), site=SiteId("here"), profile=hello().profile)
    plan = make_balanced_plan(job_spec(), Fleet(workers=(worker,), links=()), None, 0)
    assert isinstance(plan, Plan)
    return plan


async def plan_at_once(asked: MakePlan) -> PlanMade:
    return PlanMade(
        request=asked.request, result=make_balanced_plan(asked.job, asked.fleet, asked.previous, 0)
    )


@dataclass
class Clock:
    """Seconds that pass when a test says so."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Lab:
    """A driver that runs, and its surroundings."""

    driver: Driver
    log: MemoryLog
    clock: Clock
    files: Files
    running: asyncio.Task[None]
    streams: list[Stream] = field(default_factory=list)

    async def join(self, worker: str = "w1", incarnation: str = "first", *, max_waiting: int = 100) -> Stream:
        """A worker's stream, once its Hello is answered."""
        stream = Stream(WorkerId(worker), Incarnation(incarnation), max_waiting=max_waiting)
        await self.driver.opened(stream, hello(worker, incarnation))
        self.streams.append(stream)
        await eventually(lambda: stream.num_waiting > 0)
        return stream

    async def handled(self) -> None:
        """All that was said so far is handled, and what it recorded is durable."""
        _ = await self.driver.ask(CancelAsked(job=JobId("none")))

    async def acknowledge(self, stream: Stream) -> NewGeneration:
        """The worker takes what waits, up to a new generation, and acknowledges that."""
        while not isinstance(directive := await stream.take(), NewGeneration):
            assert directive is not None
        ack = Ack(generation=directive.generation, chunks=(), progress=(), backups=())
        await self.driver.reported(stream, ack)
        return directive


@asynccontextmanager
async def lab(
    log: MemoryLog | None = None,
    plan: AnswerPlan = plan_at_once,
) -> AsyncIterator[Lab]:
    """A driver over `log`, replayed; stopped at the end if it still runs."""
    log = log or MemoryLog([opened(1)])
    machine, clock, files = Coordinator(), Clock(), Files()
    machine.replay(log.records)
    journal = Journal(lambda job: driver.read_records(job))
    journal.recorded(log.records)
    driver = Driver(
        machine,
        log,
        plan=plan,
        checkpoints=files,
        clock=clock,
        journal=journal,
        meter=CoordinatorMetrics(),
        note_worker=lambda _worker, _words: None,
    )
    running = asyncio.create_task(driver.run())
    try:
        yield Lab(driver, log, clock, files, running)
    finally:
        log.gate.set()
        driver.stop()
        await asyncio.wait({running}, timeout=WAIT_S)
        _ = running.exception()


async def eventually(holds: Callable[[], bool]) -> None:
    """Waits for the turn of the loop after which `holds`; fails if none comes."""
    async with asyncio.timeout(WAIT_S):
        await until(holds)
