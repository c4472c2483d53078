"""The World: a driver of the very machines that the services run, with a heap for a clock.

It carries out commands as the real drivers do: records are durable before what follows them, streams are ordered and
lose what was in flight when they break, tensors travel over modelled links, ops take modelled time.
"""

from collections.abc import Callable, Iterable
from functools import partial

from skein.config.job import JobSpec
from skein.plan.balanced import make_plan, reckoned_s
from skein.plan.moving import between_s
from skein.plan.plan import Infeasible, Plan
from skein.protocol.coordinator import Coordinator
from skein.protocol.coordinator_io import (
    Append,
    CoordinatorCommand,
    CoordinatorEvent,
    Log,
    MakePlan,
    ManifestWritten,
    PlanMade,
    PruneCheckpoints,
    ReportArrived,
    Send,
    StreamBroken,
    WriteManifest,
)
from skein.protocol.coordinator_io import TimePassed as CoordinatorTime
from skein.protocol.messages import HopTensor, Report
from skein.protocol.ops import ApplyOp, Op, SaveOp, SnapshotOp
from skein.protocol.records import CheckpointCommitted, EpochOpened, Record
from skein.protocol.worker import Worker
from skein.protocol.worker_io import (
    Build,
    BuildFailed,
    CancelBuild,
    DirectiveArrived,
    DropCopies,
    DropTensor,
    Exit,
    FollowCommit,
    ForgetJob,
    Identity,
    LinksProbed,
    MeasureLinks,
    OpEnded,
    RunOp,
    SendFailed,
    SendReport,
    SendTensor,
    StartPrefetch,
    StreamLost,
    StreamOpened,
    TensorArrived,
    TensorTaken,
    WorkerCommand,
    WorkerEvent,
)
from skein.protocol.worker_io import TimePassed as WorkerTime
from skein.sim.builds import Builds
from skein.sim.clock import Clock
from skein.sim.executor import Contributions, SimExecutor
from skein.sim.invariants import Invariants
from skein.sim.network import FAILURE_S, Network
from skein.sim.process import SimWorker
from skein.topology.fleet import Fleet, Profile
from skein.types import Epoch, Generation, Incarnation, SiteId, Step, WorkerId

APPEND_S = 0.002
"""One durable append."""
PLAN_S = 0.2
CONTROL_S = 0.01
"""A message on a control stream, one way."""
DIAL_S = 0.05
"""From a broken stream to the next try."""
RESTART_S = 1.0
"""From a coordinator's death to its successor."""


Planner = Callable[[JobSpec, Fleet, Plan | None, int], Plan | Infeasible]
"""As `skein.plan.balanced.make_plan`."""


class World:
    """Machines, clock and network of one simulated deployment.

    Args:
        job: submitted at time 0 is left to the caller; this is what stage costs are computed for.
        sites: places that workers may be in.
        seed: of the network's links.

    Of every `repeat_every` tensors that peers take, one arrives twice; 0: none does. Plans are `planner`'s.
    `before_append` and `after_append` are told how many records the log holds: faults may strike in between.
    """

    def __init__(self, job: JobSpec, sites: tuple[SiteId, ...], *, seed: int) -> None:
        self.clock = Clock()
        self.network = Network(sites, seed=seed)
        self.log: list[Record] = []
        self.lines: list[str] = []
        self.workers: dict[WorkerId, SimWorker] = {}
        self.coordinator: Coordinator | None = None
        self.repeat_every = 0
        self.planner: Planner = make_plan
        self.before_append: Callable[[int], None] | None = None
        self.after_append: Callable[[int], None] | None = None
        self._invariants = Invariants()
        self._builds = Builds(
            job,
            self.clock,
            self.network,
            self.workers,
            self._invariants,
            checkpoint_of=self._checkpoint_of,
            give=self._give,
        )
        self.copies = self._builds.copies
        self._num_sent = 0
        self._num_incarnations = 0
        self._term = 0
        self._coordinator_wakes_at: float | None = None

    # --- the coordinator ---

    def start_coordinator(self) -> None:
        """Open the log under a new epoch and replay it, as a restarted service does."""
        self._term += 1
        opened = EpochOpened(epoch=Epoch(self._term), wall_s=self.clock.now)
        self.log.append(opened)
        self._invariants.recorded(opened)
        self.coordinator = Coordinator()
        self.coordinator.replay(self.log)
        self._coordinator_wakes_at = None
        for worker in sorted(self.workers):
            self.clock.after(
                DIAL_S, partial(self._dial, worker, self.workers[worker].machine.identity.incarnation)
            )

    def crash_coordinator(self, *, restarts_after_s: float = RESTART_S) -> None:
        """Kill the coordinator; commands it has not carried out yet are lost."""
        if self.coordinator is None:
            return
        self.coordinator = None
        for worker in sorted(self.workers):
            self._disconnect(self.workers[worker], "the coordinator died")
        self.clock.after(restarts_after_s, self.start_coordinator)

    def tell(self, event: CoordinatorEvent) -> None:
        """Give the coordinator an event, if there is one."""
        if self.coordinator is not None:
            self._carry_out(self.coordinator.handle(event, now=self.clock.now))
            self._wake_coordinator()

    def _tell_term(self, term: int, event: CoordinatorEvent) -> None:
        if term == self._term:
            self.tell(event)

    def _wake_coordinator(self) -> None:
        coordinator = self.coordinator
        deadline = None if coordinator is None else coordinator.deadline()
        if deadline is not None and (
            self._coordinator_wakes_at is None or deadline < self._coordinator_wakes_at
        ):
            self._coordinator_wakes_at = deadline
            self.clock.at(deadline, partial(self._coordinator_due, self._term, deadline))

    def _coordinator_due(self, term: int, deadline: float) -> None:
        if term != self._term or self.coordinator is None:
            return
        if self._coordinator_wakes_at == deadline:
            self._coordinator_wakes_at = None
        at = self.coordinator.deadline()
        if at is not None and at <= self.clock.now:
            self.tell(CoordinatorTime())
        else:
            self._wake_coordinator()

    def _carry_out(self, commands: Iterable[CoordinatorCommand]) -> None:
        """Everything after an append waits for it; a crash in between loses the rest."""
        waits_s = 0.0
        for command in commands:
            if isinstance(command, Append):
                self._append(command.record)
                if self.coordinator is None:
                    return
                waits_s = APPEND_S
            elif waits_s:
                self.clock.after(waits_s, partial(self._act, self._term, command))
            else:
                self._act(self._term, command)

    def _append(self, record: Record) -> None:
        if self.before_append is not None:
            self.before_append(len(self.log))
        if self.coordinator is None:
            return
        self.log.append(record)
        self._invariants.recorded(record)
        if self.after_append is not None:
            self.after_append(len(self.log))

    def _act(self, term: int, command: CoordinatorCommand) -> None:
        if term != self._term or self.coordinator is None:
            return
        match command:
            case Send():
                self._send_directive(command)
            case MakePlan():
                self.clock.after(PLAN_S, partial(self._tell_term, term, self._plan(command)))
            case WriteManifest():
                event_written = ManifestWritten(checkpoint=command.checkpoint, error=None)
                self.clock.after(APPEND_S, partial(self._tell_term, term, event_written))
            case Log():
                self.lines.append(f"{self.clock.now:.3f} {command.line}")
            case PruneCheckpoints() | Append():
                pass

    def _plan(self, asked: MakePlan) -> PlanMade:
        job, fleet, before = asked.job, asked.fleet, asked.previous
        made = self.planner(job, fleet, before, job.seed)
        return PlanMade(
            request=asked.request,
            result=made,
            current_s=None if before is None else reckoned_s(job, fleet, before),
            move_s=between_s(job, fleet, before, made) if isinstance(made, Plan) else 0.0,
        )

    def _send_directive(self, command: Send) -> None:
        worker = self.workers.get(command.worker)
        if worker is None or not worker.is_connected:
            return
        if worker.machine.identity.incarnation == command.incarnation:
            event = DirectiveArrived(directive=command.directive)
            self.clock.after(CONTROL_S, partial(self._hear, worker, self._term, event))

    def _hear(self, worker: SimWorker, term: int, event: DirectiveArrived) -> None:
        if term == self._term:
            worker.when_heard(partial(self._take_directive, worker, event))

    def _take_directive(self, worker: SimWorker, event: DirectiveArrived) -> None:
        self._invariants.announced(event.directive)
        self._give(worker, event)

    # --- workers ---

    def add_worker(self, name: WorkerId, site: SiteId, *, flops_per_s: float, memory_bytes: int) -> None:
        """Start a worker process; under a known name, its predecessor is dead."""
        self._num_incarnations += 1
        profile = Profile(
            device="cpu", device_name="simulated", flops_per_s=flops_per_s, memory_bytes=memory_bytes
        )
        identity = Identity(
            worker=name,
            incarnation=Incarnation(f"i{self._num_incarnations}"),
            site=site,
            address=f"{name}:1",
            profile=profile,
        )
        self.kill_worker(name)
        self.network.place(name, site)
        self.workers[name] = SimWorker(Worker(identity), SimExecutor(name, flops_per_s))
        self.clock.after(DIAL_S, partial(self._dial, name, identity.incarnation))

    def kill_worker(self, name: WorkerId) -> None:
        """End a worker process at once; its stream breaks."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return
        worker.is_alive = False
        self._disconnect(worker, "killed")

    def restart_worker(self, name: WorkerId) -> None:
        """A new process under the same name."""
        old = self.workers.get(name)
        if old is not None:
            profile = old.machine.identity.profile
            site = old.machine.identity.site
            self.add_worker(name, site, flops_per_s=profile.flops_per_s, memory_bytes=profile.memory_bytes)

    def freeze_worker(self, name: WorkerId, seconds: float) -> None:
        """Stop a process as SIGSTOP does: it says and does nothing, and goes on later."""
        worker = self.workers.get(name)
        if worker is not None:
            worker.is_frozen = True
            self.clock.after(seconds, partial(self._thaw, worker))

    def _thaw(self, worker: SimWorker) -> None:
        worker.thaw()
        self._give(worker, WorkerTime())

    def mute_worker(self, name: WorkerId, seconds: float) -> None:
        """Hold back what a worker and the coordinator say to each other; peers still reach it."""
        worker = self.workers.get(name)
        if worker is not None:
            worker.is_muted = True
            self.clock.after(seconds, worker.unmute)

    def slow_worker(self, name: WorkerId, factor: float, *, seconds: float | None = None) -> None:
        """Have a worker's ops take `factor` times as long as its profile says, for so long; None: for good."""
        worker = self.workers.get(name)
        if worker is not None:
            profile_flops_per_s = worker.machine.identity.profile.flops_per_s
            worker.executor.flops_per_s = profile_flops_per_s / factor
            if seconds is not None:
                self.clock.after(seconds, partial(self.slow_worker, name, 1.0))

    def stick_worker(self, name: WorkerId) -> None:
        """Let no op of a worker end any more; it beats on."""
        if name in self.workers:
            self.workers[name].is_stuck = True

    def give(self, name: WorkerId, event: WorkerEvent) -> None:
        """Give a worker's machine an event."""
        if name in self.workers:
            self._give(self.workers[name], event)

    def _give(self, worker: SimWorker, event: WorkerEvent) -> None:
        if worker.is_alive and not worker.is_frozen:
            self._handle(worker, event)
        else:
            worker.when_running(partial(self._handle, worker, event))

    def _handle(self, worker: SimWorker, event: WorkerEvent) -> None:
        for command in worker.machine.handle(event, now=self.clock.now):
            self._do(worker, command)
        deadline = worker.machine.deadline()
        if deadline is not None and (worker.wakes_at is None or worker.wakes_at <= self.clock.now):
            worker.wakes_at = deadline
            self.clock.at(deadline, partial(self._worker_due, worker))
        self._invariants.handled(worker.machine)

    def _worker_due(self, worker: SimWorker) -> None:
        worker.wakes_at = None
        self._give(worker, WorkerTime())

    def _dial(self, name: WorkerId, incarnation: Incarnation) -> None:
        worker = self.workers.get(name)
        if worker is None or worker.machine.identity.incarnation != incarnation or worker.is_connected:
            return
        if self.coordinator is None:
            return
        worker.is_connected = True
        self._give(worker, StreamOpened())

    def _disconnect(self, worker: SimWorker, reason: str) -> None:
        if not worker.is_connected:
            return
        worker.is_connected = False
        worker.muted.clear()
        identity = worker.machine.identity
        broken = StreamBroken(worker=identity.worker, incarnation=identity.incarnation, reason=reason)
        self.clock.after(CONTROL_S, partial(self._tell_term, self._term, broken))
        self._give(worker, StreamLost(reason=reason))

    def break_stream(self, name: WorkerId) -> None:
        """Break a worker's control stream; it dials again."""
        worker = self.workers.get(name)
        if worker is not None:
            self._disconnect(worker, "broken")
            self.clock.after(DIAL_S, partial(self._dial, name, worker.machine.identity.incarnation))

    def _do(self, worker: SimWorker, command: WorkerCommand) -> None:
        name = worker.machine.identity.worker
        match command:
            case RunOp():
                seconds = worker.executor.seconds(command.op)
                worker.is_busy = True
                self.clock.after(seconds, partial(self._end_op, worker, command.op, seconds))
            case SendTensor():
                self._send_tensor(worker, command)
            case SendReport():
                self._send_report(worker, command.report)
            case Build():
                self._builds.begin(worker, command)
            case CancelBuild():
                worker.build += 1
                cancelled = BuildFailed(
                    generation=Generation(-1), peer=None, is_fatal=False, reason="cancelled"
                )
                self.clock.after(0.0, partial(self._give, worker, cancelled))
            case StartPrefetch():
                self.copies.start(worker, command)
            case FollowCommit():
                self.copies.follow(worker, command)
            case DropCopies():
                self.copies.drop(worker, command)
            case MeasureLinks():
                links = tuple(
                    link
                    for peer in command.peers
                    if peer.worker in self.workers
                    for link in (self.network.link(name, peer.worker), self.network.link(peer.worker, name))
                )
                self.clock.after(0.5, partial(self._give, worker, LinksProbed(links=links)))
            case ForgetJob():
                self.copies.forget(worker)
                worker.is_to_forget = worker.is_busy
                if not worker.is_busy:
                    worker.executor.forget()
            case Exit():
                self.lines.append(f"{self.clock.now:.3f} {name} exits: {command.reason}")
                self.kill_worker(name)
            case DropTensor():
                pass

    def _send_report(self, worker: SimWorker, report: Report) -> None:
        if not worker.is_connected:
            return
        identity = worker.machine.identity
        event = ReportArrived(worker=identity.worker, incarnation=identity.incarnation, report=report)
        self.clock.after(CONTROL_S, partial(self._say, worker, self._term, event))

    def _say(self, worker: SimWorker, term: int, event: ReportArrived) -> None:
        worker.when_heard(partial(self._tell_term, term, event))

    def _send_tensor(self, worker: SimWorker, command: SendTensor) -> None:
        num_bytes, content = worker.executor.payload(command.envelope)
        sender, to = worker.machine.identity.worker, command.to.worker
        arrival_s = self.network.arrival_s(sender, to, num_bytes, now=self.clock.now)
        if arrival_s is None:
            self._fail_send(worker, command, "no route")
            return
        back_s = self.network.link(to, sender).latency_s
        taken = TensorTaken(
            to=to,
            envelope=command.envelope,
            num_bytes=num_bytes,
            seconds=arrival_s + back_s - self.clock.now,
        )
        self.clock.at(arrival_s, partial(self._deliver, worker, command, content, taken))

    def _deliver(
        self, sender: SimWorker, command: SendTensor, content: Contributions | None, taken: TensorTaken
    ) -> None:
        receiver = self.workers.get(command.to.worker)
        if receiver is None or receiver.machine.identity.incarnation != command.to.incarnation:
            self._fail_send(sender, command, "connection refused")
            return
        if isinstance(command.envelope.header, HopTensor):
            # A latency too early, which saves the clock an action for each tensor.
            self._give(sender, taken)
        self._num_sent += 1
        is_repeated = self.repeat_every and self._num_sent % self.repeat_every == 0
        for _ in range(2 if is_repeated else 1):
            receiver.executor.receive(command.envelope.header, content)
            self._give(receiver, TensorArrived(envelope=command.envelope))

    def _fail_send(self, worker: SimWorker, command: SendTensor, reason: str) -> None:
        failed = SendFailed(to=command.to.worker, generation=command.envelope.generation, reason=reason)
        self.clock.after(FAILURE_S, partial(self._give, worker, failed))

    def _end_op(self, worker: SimWorker, op: Op, seconds: float) -> None:
        if not worker.is_stuck:
            worker.when_running(partial(self._finish_op, worker, op, seconds))

    def _finish_op(self, worker: SimWorker, op: Op, seconds: float) -> None:
        if isinstance(op, ApplyOp):
            lineages = (chunk.lineage for chunk in worker.executor.chunks.values())
            self._invariants.applies(worker.machine, op.record, lineages)
        outcome = worker.executor.run(op)
        worker.is_busy = False
        if worker.is_to_forget:
            worker.is_to_forget = False
            worker.executor.forget()
        elif isinstance(op, SaveOp):
            self._builds.save(worker, op)
        elif isinstance(op, SnapshotOp):
            self.copies.snapshot(worker, op)
        elif isinstance(op, ApplyOp):
            self.copies.applied(worker, op.record)
        self._handle(worker, OpEnded(op=op, outcome=outcome, seconds=seconds))

    def _checkpoint_of(self, version: Step) -> CheckpointCommitted:
        """The last one of this version."""
        return [r for r in self.log if isinstance(r, CheckpointCommitted) and r.version == version][-1]
