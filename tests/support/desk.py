"""Driving a Coordinator machine by hand: workers, planner and disk are played by the test."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import TypeVar

from skein.config.job import JobSpec
from skein.config.quota import UNBOUNDED, QuotasSpec
from skein.plan.plan import Infeasible, Plan
from skein.protocol.coordinator.coordinator import Coordinator
from skein.protocol.coordinator.coordinator_io import (
    Append,
    CoordinatorCommand,
    CoordinatorEvent,
    Log,
    MakePlan,
    ManifestWritten,
    PlanMade,
    ReportArrived,
    Send,
    StreamBroken,
    SubmitAsked,
    WriteManifest,
)
from skein.protocol.deadline import TimePassed
from skein.protocol.log.records import CheckpointCommitted, EpochOpened, Record, StageFiles
from skein.protocol.messages.directives import (
    Assign,
    ChunkVersion,
    Directive,
    Ledger,
    Look,
    OpenData,
    Prefetch,
    Save,
)
from skein.protocol.messages.reports import (
    Ack,
    Beat,
    CheckpointWritten,
    ChunksReady,
    DataOpened,
    EvaluationDone,
    Hello,
    PeersSeen,
    Prefetched,
    Report,
    StageDone,
    Vote,
)
from skein.types import (
    DEFAULT_NAMESPACE,
    Epoch,
    Generation,
    Incarnation,
    JobId,
    StageIndex,
    StageSpec,
    Step,
    WorkerId,
)
from tests.support.reports import attempt, hello, spread

D = TypeVar("D")
R = TypeVar("R")

DESK_KEY = b"of the run log"
LEASE_S, GRACE_S = 3.0, 0.5
"""Whatever the defaults are, a beat a second keeps everybody."""


def checkpoint(
    job: JobId, version: int, *, num_stages: int = 2, url: str | None = None
) -> CheckpointCommitted:
    stages = tuple(StageFiles(stage=StageIndex(s), files=()) for s in range(num_stages))
    return CheckpointCommitted(job=job, version=Step(version), url=url, stages=stages, wall_s=0.0)


class Desk:
    """One coordinator, from the first record on or after a restart. Time passes when it is told to."""

    def __init__(self, log: Sequence[Record] = (), *, quotas: QuotasSpec = UNBOUNDED) -> None:
        self.log: list[Record] = list(log)
        self.now = 100.0 * sum(isinstance(record, EpochOpened) for record in log)
        epoch = Epoch(1 + sum(isinstance(record, EpochOpened) for record in log))
        self.log.append(EpochOpened(epoch=epoch, wall_s=self.now))
        self.machine = Coordinator(lease_s=LEASE_S, grace_s=GRACE_S, quotas=quotas)
        self.machine.sign_with(DESK_KEY)
        self.machine.replay(self.log)
        self.commands: list[CoordinatorCommand] = []
        self.incarnations: dict[WorkerId, Incarnation] = {}
        self._dead: set[Incarnation] = set()

    # --- what happens ---

    def give(self, event: CoordinatorEvent) -> list[CoordinatorCommand]:
        """Hand an event in; its records are durable at once."""
        self.commands = self.machine.handle(event, now=self.now)
        self.log += [command.record for command in self.commands if isinstance(command, Append)]
        return self.commands

    def report(self, worker: str, report: Report) -> list[CoordinatorCommand]:
        name = WorkerId(worker)
        incarnation = report.incarnation if isinstance(report, Hello) else self.incarnations[name]
        return self.give(ReportArrived(worker=name, incarnation=incarnation, report=report))

    def wait(self, seconds: float) -> list[CoordinatorCommand]:
        """Let time pass, as much as a driver would make of it."""
        until = self.now + seconds
        commands: list[CoordinatorCommand] = []
        while (deadline := self.machine.deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            commands += self.give(TimePassed())
        self.now = until
        self.commands = commands
        return commands

    def submit(self, spec: JobSpec, *, key: str = "key") -> JobId:
        self.give(SubmitAsked(key=key, spec=spec))
        return self.machine.history.job_by_key[DEFAULT_NAMESPACE, key]

    def join(self, *workers: str, incarnation: int = 1) -> list[CoordinatorCommand]:
        commands: list[CoordinatorCommand] = []
        for worker in workers:
            said = hello(worker, f"{worker}-{incarnation}")
            self.incarnations[said.worker] = said.incarnation
            commands += self.report(worker, said)
        self.commands = commands
        return commands

    def break_stream(self, worker: str) -> list[CoordinatorCommand]:
        """A worker's process dies: its stream breaks and the grace passes, while the others beat on.

        Who is asked whether it is there says that it is gone.
        """
        name = WorkerId(worker)
        self._dead.add(self.incarnations[name])
        self.give(StreamBroken(worker=name, incarnation=self.incarnations[name], reason="reset"))
        commands = self.wait(GRACE_S)
        for looking, look in sorted(self.told(Look).items()):
            gone = tuple(peer.incarnation for peer in look.peers if peer.incarnation in self._dead)
            commands = [*commands, *self.report(looking, PeersSeen(reached=(), gone=gone))]
        self.commands = commands
        return commands

    def beat(self, *workers: str, seconds: float = 0.0) -> list[CoordinatorCommand]:
        """Let time pass in which only these workers are heard, once a second."""
        commands: list[CoordinatorCommand] = []
        until = self.now + seconds
        while True:
            for worker in workers:
                commands += self.report(worker, Beat(progress=0, running_s=0.0, statistics=()))
            if self.now >= until:
                self.commands = commands
                return commands
            commands += self.wait(min(1.0, until - self.now))

    # --- what comes out ---

    def found(self, kind: type[R]) -> list[R]:
        """Commands of a kind among the last ones."""
        return [command for command in self.commands if isinstance(command, kind)]

    def told(self, kind: type[D]) -> dict[str, D]:
        """Directives of a kind among the last commands, by worker; the last one each."""
        return {
            command.worker: command.directive
            for command in self.found(Send)
            if isinstance(command.directive, kind)
        }

    def recorded(self, kind: type[R]) -> list[R]:
        """Records of a kind among the last commands."""
        return [command.record for command in self.found(Append) if isinstance(command.record, kind)]

    def lines(self) -> list[str]:
        return [command.line for command in self.found(Log)]

    def directives(self) -> list[Directive]:
        return [command.directive for command in self.found(Send)]

    @property
    def job(self) -> JobId:
        """The newest that was submitted."""
        return list(self.machine.history.jobs)[-1]

    @property
    def generation(self) -> Generation:
        return self.machine.history.generation

    # --- longer stretches ---

    def acknowledge(
        self,
        workers: Iterable[str],
        held: Mapping[str, Sequence[tuple[StageSpec, int]]] | None = None,
    ) -> list[CoordinatorCommand]:
        """Acks of the present generation; `held` says which stages at which versions, by worker."""
        commands: list[CoordinatorCommand] = []
        for worker in workers:
            chunks = tuple(
                ChunkVersion(stage=stage, version=Step(version))
                for stage, version in (held or {}).get(worker, ())
            )
            commands += self.report(
                worker, Ack(generation=self.generation, chunks=chunks, progress=(), backups=())
            )
        self.commands = commands
        return commands

    def plan(self, result: Plan | Infeasible) -> list[CoordinatorCommand]:
        """Answer the MakePlan that is among the last commands."""
        [asked] = self.found(MakePlan)
        return self.give(PlanMade(request=asked.request, result=result))

    def adopt(self, plan: Plan) -> list[CoordinatorCommand]:
        """See this plan put into place: asked for now, or taken up again because nothing has changed."""
        return self.plan(plan) if self.found(MakePlan) else self.commands

    def ready(self, workers: Iterable[str], *, fingerprint: str = "data") -> list[CoordinatorCommand]:
        commands: list[CoordinatorCommand] = []
        for worker in workers:
            commands += self.report(
                worker,
                ChunksReady(
                    generation=self.generation,
                    num_train_samples=100,
                    num_validation_samples=10,
                    data_fingerprint=fingerprint,
                ),
            )
        self.commands = commands
        return commands

    def settle(self, plan: Plan) -> list[CoordinatorCommand]:
        """From an open generation to the first directive of a step: acknowledge, plan, build."""
        self.acknowledge(self.live)
        self.plan(plan)
        assert self.told(Assign)
        return self.ready(plan.workers)

    @property
    def live(self) -> list[str]:
        return sorted(self.machine.membership.live)

    def ledgers(self, plan: Plan, *, loss_sum: float = 2.0, num_tokens: int = 4) -> list[CoordinatorCommand]:
        """Every chunk reports what was assigned; the head knows the loss."""
        commands: list[CoordinatorCommand] = []
        run = self.machine.run
        assert run is not None
        step = run.job.version
        for at, microbatches in plan.microbatches_by_chunk().items():
            is_last = at.stage == len(plan.stages) - 1
            commands += self.report(
                at.worker,
                StageDone(
                    generation=run.job.generation,
                    step=step,
                    ledger=Ledger(stage=at.stage, worker=at.worker, microbatches=microbatches),
                    loss_sum=loss_sum if is_last else 0.0,
                    tokens=spread(num_tokens, len(microbatches)) if is_last else (),
                ),
            )
        self.commands = commands
        return commands

    def votes(self, plan: Plan, *, squared_norm: float = 1.0) -> list[CoordinatorCommand]:
        """Every holder votes the same on every group; gives what the last votes caused."""
        commands: list[CoordinatorCommand] = []
        run = self.machine.run
        assert run is not None
        step = run.job.version
        for group in plan.groups:
            for worker in group.workers:
                commands += self.report(
                    worker,
                    Vote(
                        generation=run.job.generation,
                        step=step,
                        group=group.group,
                        attempt=attempt(generation=run.job.generation, epoch=self.machine.history.epoch),
                        digest="same",
                        squared_norm=squared_norm,
                        is_finite=isfinite(squared_norm),
                    ),
                )
        self.commands = commands
        return commands

    def step(self, plan: Plan) -> list[CoordinatorCommand]:
        """One whole step under this plan."""
        self.ledgers(plan)
        return self.votes(plan)

    def evaluate(self, plan: Plan, num_microbatches: int) -> list[CoordinatorCommand]:
        """The heads report an evaluation of so many microbatches, each its own."""
        commands: list[CoordinatorCommand] = []
        run = self.machine.run
        assert run is not None
        version = run.job.version
        ends = [way.hops[-1].worker for way in plan.evaluation_paths]
        for head in sorted(set(ends)):
            mine = tuple(e for e in range(num_microbatches) if ends[e % len(ends)] == head)
            commands += self.report(
                head,
                EvaluationDone(
                    generation=self.generation,
                    version=version,
                    microbatches=mine,  # type: ignore[arg-type]
                    loss_sum=2.0 * len(mine),
                    num_tokens=len(mine),
                ),
            )
        self.commands = commands
        return commands

    def prefetch(self) -> list[CoordinatorCommand]:
        """The copies that the last commands ask for are here, and data that they ask for are open."""
        sent = self.found(Send)
        commands = self.prefetch_copies()
        for command in sent:
            if isinstance(command.directive, OpenData):
                opened = DataOpened(job=command.directive.job, error="", is_unfit=False)
                commands += self.report(command.worker, opened)
        self.commands = commands
        return commands

    def prefetch_copies(self) -> list[CoordinatorCommand]:
        """The copies that the last commands ask for are here."""
        commands: list[CoordinatorCommand] = []
        for command in self.found(Send):
            asked = command.directive
            if isinstance(asked, Prefetch):
                here = Prefetched(job=asked.job, stage=asked.stage, version=asked.version, error="")
                commands += self.report(command.worker, here)
        self.commands = commands
        return commands

    def save(self) -> list[CoordinatorCommand]:
        """Write what the last commands ask to save, and the manifest; gives what that caused."""
        for worker, asked in self.told(Save).items():
            for stage, walker in zip(asked.stages, asked.walkers, strict=True):
                written = CheckpointWritten(
                    generation=asked.generation, version=asked.version, stage=stage, files=(), walker=walker
                )
                self.report(worker, written)
        [manifest] = self.found(WriteManifest)
        return self.give(ManifestWritten(checkpoint=manifest.checkpoint, error=None))
