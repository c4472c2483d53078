"""Driving one Worker machine by hand: say what the coordinator and peers say, see what it commands."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from skein.plan.plan import Group, Plan
from skein.protocol.coordinator.runs.placing.neighbours import neighbours_of
from skein.protocol.coordinator.runs.placing.sources import Sources, assignments
from skein.protocol.messages.directives import (
    Assign,
    Commit,
    Decision,
    Directive,
    GroupResult,
    Ledger,
    Member,
    NewGeneration,
    Prepare,
    Resumption,
    SourceKind,
    Start,
    StateSource,
    StepRecord,
    Welcome,
)
from skein.protocol.messages.passes import GenerationKey
from skein.protocol.messages.reports import Ack, Report
from skein.protocol.messages.tensors import Envelope, TensorHeader
from skein.protocol.worker.ops import Joined, JoinOp, Loss, LossOp, Op, OpOutcome
from skein.protocol.worker.worker import Worker
from skein.protocol.worker.worker_io import (
    Build,
    Built,
    DirectiveArrived,
    Identity,
    OpEnded,
    RunOp,
    SendReport,
    SendTensor,
    StreamOpened,
    TensorArrived,
    WorkerCommand,
    WorkerEvent,
)
from skein.types import (
    Attempt,
    ChunkRef,
    Epoch,
    Generation,
    GroupId,
    Incarnation,
    JobId,
    SiteId,
    Step,
    WorkerId,
    parse_group,
)
from tests.support.reports import attempt, profile

JOB = JobId("small-1")
LOSS = Loss(loss_sum=2.0, num_tokens=3)
R = TypeVar("R")


def identity(worker: str) -> Identity:
    return Identity(
        worker=WorkerId(worker),
        incarnation=Incarnation(f"{worker}-1"),
        site=SiteId("here"),
        address=f"{worker}:1",
        profile=profile(),
        secret=f"secret of {worker}",
    )


def record(
    step: int = 0,
    *,
    attempts: dict[str, Attempt] | None = None,
    decision: Decision = Decision.APPLY,
) -> StepRecord:
    """A decision on `step`, naming these attempts by group."""
    results = tuple(
        GroupResult(
            group=parse_group(group), attempt=tried, digest="same", squared_norm=1.0, weight=1.0, num_tokens=1
        )
        for group, tried in (attempts or {}).items()
    )
    return StepRecord(
        step=Step(step),
        decision=decision,
        reason="",
        results=results,
        loss=1.0,
        num_tokens=1,
        weight=1.0,
        gradient_norm=1.0,
        clip=1.0,
        learning_rate=0.01,
        samples_after=8 * (step + 1),
    )


def alone(group: str, parts: Sequence[Ledger]) -> Group:
    """A group of just those whose ledgers are listed."""
    members = tuple(ChunkRef(stage=part.stage, worker=part.worker) for part in parts)
    return Group(group=parse_group(group), members=members, num_shards=1)


def key_of(generation: int) -> GenerationKey:
    """Key of a generation, as all members of it are told."""
    return GenerationKey.of(b"of the coordinator", Epoch(1), Generation(generation))


def peer(worker: WorkerId) -> Member:
    """A worker as its peers are told of it."""
    return Member(worker=worker, incarnation=Incarnation(f"{worker}-1"), address=f"{worker}:1")


class Hand:
    """One worker of a plan, its driver and its coordinator. Time stands still unless it is told to pass."""

    def __init__(self, worker: str = "w0a") -> None:
        self.machine = Worker(identity(worker))
        self.now = 0.0
        self.commands: list[WorkerCommand] = []
        self.running: Op | None = None
        self._groups: dict[GroupId, Group] = {}

    def give(self, event: WorkerEvent) -> list[WorkerCommand]:
        """Hand an event in; keeps an eye on the op that runs."""
        if isinstance(event, OpEnded):
            self.running = None
        self.commands = self.machine.handle(event, now=self.now)
        for command in self.commands:
            if isinstance(command, RunOp):
                assert self.running is None, f"{command.op} while {self.running} runs"
                self.running = command.op
        return self.commands

    def hear(self, directive: Directive) -> list[WorkerCommand]:
        if isinstance(directive, Assign):
            self._groups = {group.group: group for group in directive.groups}
        return self.give(DirectiveArrived(directive=directive))

    def found(self, kind: type[R]) -> list[R]:
        """Commands of a kind among those that the last event caused."""
        return [command for command in self.commands if isinstance(command, kind)]

    def said(self) -> list[Report]:
        """Reports that the last event caused."""
        return [command.report for command in self.found(SendReport)]

    def sent(self) -> list[tuple[WorkerId, TensorHeader]]:
        """Tensors that the last event sent to peers."""
        return [(command.to.worker, command.envelope.header) for command in self.found(SendTensor)]

    # --- longer stretches ---

    def connect(self, *, epoch: int = 1) -> None:
        self.give(StreamOpened())
        self.hear(Welcome(epoch=Epoch(epoch), lease_s=3.0, beat_s=1.0))

    def end(self, outcome: OpOutcome = None, *, seconds: float = 0.5) -> list[WorkerCommand]:
        """The running op ends; losses and joins have an outcome by themselves."""
        op = self.running
        assert op is not None
        if outcome is None and isinstance(op, LossOp):
            outcome = LOSS
        elif outcome is None and isinstance(op, JoinOp):
            outcome = Joined(group=op.group.group, digest="same", squared_norm=1.0, is_finite=True)
        return self.give(OpEnded(op=op, outcome=outcome, seconds=seconds))

    def run_all(self) -> list[Op]:
        """End ops until none runs; gives them in order."""
        ran = []
        while self.running is not None:
            ran.append(self.running)
            self.end()
        return ran

    def fence(
        self,
        plan: Plan,
        *,
        generation: int = 1,
        epoch: int = 1,
        job: JobId = JOB,
        last_commit: StepRecord | None = None,
    ) -> list[WorkerCommand]:
        """A new generation of all workers of the plan."""
        return self.hear(
            NewGeneration(
                epoch=Epoch(epoch),
                generation=Generation(generation),
                job=job,
                key=key_of(generation).value,
                last_commit=last_commit,
            )
        )

    def acknowledge(self) -> Ack:
        """End what stands before the acknowledgement, and give that. It may have come with the last event."""
        while not (acks := [report for report in self.said() if isinstance(report, Ack)]):
            self.end()
        return acks[0]

    def assignment(
        self,
        plan: Plan,
        *,
        generation: int = 1,
        epoch: int = 1,
        version: int = 0,
        job: JobId = JOB,
        resumption: Resumption | None = None,
    ) -> Assign:
        """This worker's part of a plan, everything drawn anew, unless something stays of a step in progress."""
        me = self.machine.identity.worker
        drawn = StateSource(kind=SourceKind.INITIAL, version=Step(version))
        told = assignments(
            plan,
            Sources(
                version=Step(version),
                by_chunk={placed.chunk: drawn for placed in plan.chunks},
                unheld=(),
            ),
            job=job,
            job_spec="{}",
            resumptions={} if resumption is None else {me: resumption},
        )
        peers = tuple(peer(worker) for worker in sorted(neighbours_of(plan)[me]))
        return replace(told[me], epoch=Epoch(epoch), generation=Generation(generation), peers=peers)

    def built(self, assign: Assign) -> list[WorkerCommand]:
        return self.give(
            Built(
                generation=assign.generation,
                num_train_samples=100,
                num_validation_samples=10,
                data_fingerprint="data",
            )
        )

    def settle(self, plan: Plan, *, generation: int = 1, epoch: int = 1, version: int = 0) -> None:
        """Fence, acknowledge, build: ready for the first directive of a step."""
        self.fence(plan, generation=generation, epoch=epoch)
        self.acknowledge()
        assign = self.assignment(plan, generation=generation, epoch=epoch, version=version)
        self.hear(assign)
        assert self.found(Build)
        self.built(assign)

    def start(self, *, step: int = 0, generation: int = 1, epoch: int = 1) -> list[WorkerCommand]:
        return self.hear(Start(epoch=Epoch(epoch), generation=Generation(generation), step=Step(step)))

    def arrive(
        self,
        header: TensorHeader,
        *,
        sender: str = "w1a",
        generation: int = 1,
        epoch: int = 1,
        job: JobId = JOB,
    ) -> list[WorkerCommand]:
        """A peer's tensor is here."""
        return self.give(
            TensorArrived(
                envelope=envelope(header, sender=sender, generation=generation, epoch=epoch, job=job)
            )
        )

    def prepare(
        self,
        group: str | GroupId,
        parts: Sequence[Ledger],
        *,
        number: int = 0,
        step: int = 0,
        generation: int = 1,
    ) -> list[WorkerCommand]:
        return self.hear(
            Prepare(
                epoch=Epoch(1),
                generation=Generation(generation),
                step=Step(step),
                group=self._groups.get(parse_group(str(group))) or alone(str(group), parts),
                attempt=attempt(number),
                parts=tuple(parts),
                exchange=None,
            )
        )

    def commit(
        self, decided: StepRecord, *, goes_on: bool = True, generation: int = 1
    ) -> list[WorkerCommand]:
        return self.hear(
            Commit(epoch=Epoch(1), generation=Generation(generation), record=decided, goes_on=goes_on)
        )


def envelope(
    header: TensorHeader, *, sender: str, generation: int = 1, epoch: int = 1, job: JobId = JOB
) -> Envelope:
    return Envelope(
        job=job,
        epoch=Epoch(epoch),
        generation=Generation(generation),
        sender=WorkerId(sender),
        incarnation=Incarnation(f"{sender}-1"),
        header=header,
    )
