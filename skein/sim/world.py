"""The World: a driver of the very machines that the services run, with a heap for a clock.

It carries out commands as the real drivers do: records are durable before what follows them, streams are ordered and
lose what was in flight when they break, tensors travel over modelled links, ops take modelled time.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from numpy.random import Generator as Draw

from skein import PROTOCOL_VERSION
from skein.config.job import JobSpec, read_spec
from skein.protocol.coordinator.coordinator_io import ReportArrived, Send, StreamBroken
from skein.protocol.deadline import TimePassed
from skein.protocol.log.records import CheckpointCommitted, JobHeld, JobSubmitted, Record, RolledBack
from skein.protocol.messages.coresets import parts_of
from skein.protocol.messages.directives import Member
from skein.protocol.messages.reports import Hello, PeersSeen, Report
from skein.protocol.worker import worker_io as io
from skein.protocol.worker.mesh.losing import DeviceLoss
from skein.protocol.worker.ops import ApplyOp, OpFailed, OpOutcome, SaveOp, SnapshotOp
from skein.protocol.worker.worker import Worker
from skein.sim.compute.executor import SimExecutor
from skein.sim.compute.rows import picked_by
from skein.sim.lines.lies import Says, mutated
from skein.sim.lines.network import COORDINATOR, Network
from skein.sim.lines.streams import Streams
from skein.sim.lines.transport import Transport
from skein.sim.processes.builds import Builds
from skein.sim.processes.coordinator import SimService
from skein.sim.processes.devices import SimMesh, left_of, share_of, simulated_mesh
from skein.sim.processes.meshes import Meshes
from skein.sim.processes.worker import SimWorker
from skein.topology.fleet import Profile
from skein.types import Epoch, Incarnation, JobId, MicrobatchId, SiteId, Step, WorkerId

LOOK_S = 0.05
"""Seconds from a look at a peer to what is found."""
PICK_S = 0.2
"""Seconds of picking candidates."""
PART_BYTES = 256
"""Bytes of a part of the candidates that a worker tells of, so that they are several."""
BACK_S = 5.0
"""Seconds from the end of a process by an error of its own until somebody has started it again."""
WITHOUT_S = 1.0
"""Seconds from the loss of a device until the others have started and measured themselves."""


def _measured(worker: SimWorker) -> io.DeviceMeasured:
    return io.DeviceMeasured(flops_per_s=worker.executor.flops_per_s, spread=0.0)


class World(SimService):
    """Machines, clock and network of one simulated deployment.

    Args:
        sites: places that workers may be in; the coordinator is in the first.
        seed: of the network's links.
        new_executor: what each worker process computes with.
    """

    def __init__(
        self,
        sites: tuple[SiteId, ...],
        *,
        seed: int,
        new_executor: Callable[[WorkerId, float], SimExecutor] = SimExecutor,
    ) -> None:
        super().__init__()
        self.network = Network(sites, seed=seed)
        self.workers: dict[WorkerId, SimWorker] = {}
        self._builds = Builds(
            self.clock,
            self.network,
            self.workers,
            self.invariants,
            self.store,
            spec_of=self._spec_of,
            checkpoint_of=self._checkpoint_of,
            give=self._give,
            crash=self._crash,
        )
        self.copies = self._builds.copies
        self.meshes = Meshes(self.clock, lose=self._lose_device)
        self.transport = Transport(self.clock, self.network, self.workers, give=self._give)
        self._streams = Streams(self, self.network, self.workers, take=self._take_directive, give=self._give)
        self.network.on_changed = self._streams.pass_on
        self.network.is_up = lambda carrier: (
            self.coordinator is not None if carrier == COORDINATOR else carrier in self.workers
        )
        self.network.answers = lambda name: name in self.workers and not self.workers[name].is_frozen
        self.times_as_long: Callable[[], float] = lambda: 1.0
        """Drawn for each op: what else goes on at its worker's machine."""
        self._new_executor = new_executor
        self._num_incarnations = 0
        self.submitted: dict[str, JobSpec] = {}
        """Jobs that clients have handed in, by key."""
        self.to_resume: set[JobId] = set()
        """Jobs that somebody has had held or cancelled, and is going to have go on."""
        self.relays: frozenset[WorkerId] = frozenset()
        """Workers that relay, from their next start on."""
        self.has_liars = False
        """Whether a worker may lie: losses are no measure then, nor how long a job takes."""

    # --- the coordinator, as others see it ---

    def _hold(self, record: Record) -> None:
        if isinstance(record, RolledBack | JobHeld):
            self.invariants.gives_up(
                record, self._streams.within_reach(), keeps_checkpoints=not self.store.is_spoilt
            )
        super()._hold(record)

    def _coordinator_is_up(self) -> None:
        self._streams.coordinator_is_up()

    def _coordinator_is_down(self) -> None:
        self._streams.coordinator_is_down()

    def _send_directive(self, command: Send) -> None:
        self._streams.send(command)

    def _take_directive(self, worker: SimWorker, event: io.DirectiveArrived) -> None:
        self.invariants.announced(event.directive)
        self._give(worker, event)

    def _send_report(self, worker: SimWorker, report: Report) -> None:
        self._streams.report(worker, report)

    # --- workers ---

    def add_worker(
        self, name: WorkerId, site: SiteId, *, flops_per_s: float, memory_bytes: int, num_devices: int = 1
    ) -> None:
        """Start a worker process; under a known name, its predecessor is dead. Its devices have so much together."""
        profile = Profile(
            device="cpu", device_name="simulated", flops_per_s=flops_per_s, memory_bytes=memory_bytes
        )
        if num_devices > 1:
            profile = simulated_mesh(num_devices, flops_per_s=flops_per_s, memory_bytes=memory_bytes)
        self._start(name, site, profile)

    def _start(self, name: WorkerId, site: SiteId, profile: Profile) -> None:
        self._num_incarnations += 1
        identity = io.Identity(
            worker=name,
            incarnation=Incarnation(f"i{self._num_incarnations}"),
            site=site,
            address=f"{name}:1",
            profile=profile,
            host=f"host of {name}",
            secret=f"secret of {name}",
            offers_relay=name in self.relays,
        )
        self.kill_worker(name)
        self.network.place(name, site)
        executor = self._new_executor(name, profile.flops_per_s)
        executor.is_told_true = not self.has_liars
        self.workers[name] = SimWorker(Worker(identity), executor, SimMesh.of(profile))
        self._streams.dial_soon(name, identity.incarnation)

    def add_impostor(self, name: WorkerId, seconds: float) -> None:
        """Have another machine's process say Hello under the name of a worker that is here, and be gone later."""
        worker = self.workers.get(name)
        if worker is None or self.coordinator is None:
            return
        self._num_incarnations += 1
        identity = worker.machine.identity
        incarnation = Incarnation(f"i{self._num_incarnations}")
        hello = Hello(
            worker=name,
            incarnation=incarnation,
            protocol_version=PROTOCOL_VERSION,
            site=identity.site,
            address="elsewhere:1",
            profile=identity.profile,
            epoch=Epoch(0),
            host="elsewhere",
            secret="another",  # noqa: S106 - as good as any
        )
        self.tell_term(self.term, ReportArrived(worker=name, incarnation=incarnation, report=hello))
        self.transport.forge(name, identity.incarnation)
        broken = StreamBroken(worker=name, incarnation=incarnation, reason="gone")
        self.clock.after(seconds, partial(self.tell_term, self.term, broken))

    def kill_worker(self, name: WorkerId) -> None:
        """End a worker process at once; its stream breaks."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return
        worker.is_alive = False
        self._streams.disconnect(worker, "killed")

    def restart_worker(self, name: WorkerId) -> None:
        """A new process under the same name."""
        old = self.workers.get(name)
        if old is not None:
            identity = old.machine.identity
            profile = replace(identity.profile, flops_per_s=old.executor.nominal_flops_per_s)
            self._start(name, identity.site, profile)

    def shrink_worker(self, name: WorkerId, share: float, seconds: float) -> None:
        """A new process under the same name with a share of speed and memory; after so long, a whole one again.

        A mesh has a share of its devices.
        """
        old = self.workers.get(name)
        if old is not None:
            identity = old.machine.identity
            self._start(name, identity.site, share_of(identity.profile, share))
            self.clock.after(seconds, partial(self._add_again, identity))

    def lose_device(self, name: WorkerId, number: int, seconds: float, *, hangs: bool) -> None:
        """A device of a worker hangs or ends; after so long the worker is started again, whole."""
        worker = self.workers.get(name)
        if worker is not None:
            self.clock.after(seconds, partial(self._add_again, worker.machine.identity))
            self.meshes.strike(worker, number, hangs=hangs)

    def _lose_device(self, worker: SimWorker, loss: DeviceLoss) -> None:
        """A mesh has lost a device: its process comes back as a new incarnation with those that are left."""
        identity = worker.machine.identity
        left = ",".join(loss.left)
        self.lines.append(
            f"{self.clock.now:.3f} {identity.worker} {loss.reason}; goes on with devices={left}"
        )
        self.kill_worker(identity.worker)
        smaller = replace(identity, profile=left_of(identity.profile, loss.left))
        self.clock.after(WITHOUT_S, partial(self._come_back, smaller))

    def bring_back(self, name: WorkerId, seconds: float) -> None:
        """Have the machine of a worker that is here start again after so long, unless it is here then."""
        worker = self.workers.get(name)
        if worker is not None:
            self.clock.after(seconds, partial(self._come_back, worker.machine.identity))

    def _come_back(self, identity: io.Identity) -> None:
        if identity.worker not in self.workers:
            self._add_again(identity)

    def _add_again(self, identity: io.Identity) -> None:
        self._start(identity.worker, identity.site, identity.profile)

    def freeze_worker(self, name: WorkerId, seconds: float) -> None:
        """Stop a process as SIGSTOP does: it says and does nothing, and goes on later."""
        worker = self.workers.get(name)
        if worker is not None:
            worker.is_frozen = True
            self._streams.note_reach(worker)
            self.clock.after(seconds, partial(self._thaw, worker))

    def thaw_worker(self, name: WorkerId) -> None:
        """Have a frozen process go on now, as SIGCONT does."""
        worker = self.workers.get(name)
        if worker is not None:
            self._thaw(worker)

    def _thaw(self, worker: SimWorker) -> None:
        worker.thaw()
        self._streams.note_reach(worker)
        self._give(worker, TimePassed())

    def mute_worker(
        self, name: WorkerId, seconds: float, *, is_heard: bool = False, hears: bool = False
    ) -> None:
        """Hold back what a worker and the coordinator say to each other, or one of them; peers still reach it."""
        for sender, receiver, is_open in ((name, COORDINATOR, is_heard), (COORDINATOR, name, hears)):
            if not is_open:
                self.network.cut(sender, receiver)
                self.clock.after(seconds, partial(self.network.mend, sender, receiver))

    def choke_worker(self, name: WorkerId, seconds: float) -> None:
        """For so long, lose what is large of what the coordinator sends a worker; its stream breaks each time."""
        self._streams.choke(name, is_choked=True)
        self.clock.after(seconds, partial(self._streams.choke, name, is_choked=False))

    def slow_worker(
        self, name: WorkerId, factor: float, *, seconds: float | None = None, is_starved: bool = False
    ) -> None:
        """Have a worker's ops take `factor` times as long as it said at first, for so long; None: for good.

        `is_starved`: since others have the processors of its machine, which it knows.
        """
        worker = self.workers.get(name)
        if worker is not None:
            worker.executor.flops_per_s = worker.executor.nominal_flops_per_s / factor
            worker.executor.share_of_time = 1.0 / factor if is_starved else 1.0
            if seconds is not None:
                self.clock.after(seconds, partial(self.slow_worker, name, 1.0))

    def expect_lies(self) -> None:
        """Expect from now on that workers may lie."""
        self.has_liars = self.invariants.has_liars = True
        for worker in self.workers.values():
            worker.executor.is_told_true = False

    def have_lie(self, name: WorkerId, draw: Draw, seconds: float) -> None:
        """Mutate a worker's reports for a while; nothing holds of what it says, and of what follows from that."""
        worker = self.workers.get(name)
        if worker is not None:
            worker.has_lied = True
            self.have_say(name, partial(mutated, draw=draw), seconds)

    def have_say(self, name: WorkerId, says: Says, seconds: float | None = None) -> None:
        """Have a worker send other reports than its machine made for so long; None: for good.

        Only reports are withheld, or added that say nothing of the worker itself: what it holds is as it says.
        """
        worker = self.workers.get(name)
        if worker is not None:
            worker.says = says
            if seconds is not None:
                self.clock.after(seconds, partial(setattr, worker, "says", None))

    def shorten_log(self, name: WorkerId, *, num_kept: int) -> None:
        """Have a worker's boundary log forget all but so many tensors, for want of room."""
        worker = self.workers.get(name)
        keys = () if worker is None else worker.executor.log.shorten(num_kept)
        if worker is not None and keys:
            self._give(worker, io.LogShortened(keys=keys, is_wanted=False))

    def crowd_worker(self, name: WorkerId, room_bytes: float, seconds: float) -> None:
        """Leave a worker so little room for a while that it takes no tensor early while others wait on its desk."""
        worker = self.workers.get(name)
        if worker is not None:
            worker.room_bytes = room_bytes
            self.clock.after(seconds, partial(setattr, worker, "room_bytes", inf))

    def give(self, name: WorkerId, event: io.WorkerEvent) -> None:
        """Give a worker's machine an event."""
        if name in self.workers:
            self._give(self.workers[name], event)

    def _give(self, worker: SimWorker, event: io.WorkerEvent) -> None:
        if worker.is_alive and not worker.is_frozen:
            self._handle(worker, event)
        else:
            worker.when_running(partial(self._handle, worker, event))

    def _handle(self, worker: SimWorker, event: io.WorkerEvent) -> None:
        try:
            commands = self._decide_for(worker, event)
        except AssertionError as error:
            self._crash(worker, error)
            return
        for command in commands:
            self._do(worker, command)
        worker.executor.desk.adopt(worker.machine.generation)
        deadline = worker.machine.deadline()
        if deadline is not None and (worker.wakes_at is None or worker.wakes_at <= self.clock.now):
            worker.wakes_at = deadline
            self.clock.at(deadline, partial(self._worker_due, worker))
        self.invariants.handled(worker.machine)

    def _decide_for(self, worker: SimWorker, event: io.WorkerEvent) -> list[io.WorkerCommand]:
        """Commands of a worker's machine for an event."""
        return worker.machine.handle(event, now=self.clock.now)

    def _crash(self, worker: SimWorker, error: AssertionError) -> None:
        """A process ends with an error of its own. Only what follows from its own lies may bring it there."""
        if not worker.has_lied:
            raise error
        identity = worker.machine.identity
        self.lines.append(f"{self.clock.now:.3f} {identity.worker} crashes: {error}")
        self.kill_worker(identity.worker)
        self.clock.after(BACK_S, partial(self._add_again, identity))

    def _worker_due(self, worker: SimWorker) -> None:
        worker.wakes_at = None
        self._give(worker, TimePassed())

    def break_stream(self, name: WorkerId) -> None:
        """Break a worker's control stream; it dials again."""
        self._streams.breaks(name)

    def _do(self, worker: SimWorker, command: io.WorkerCommand) -> None:
        name = worker.machine.identity.worker
        match command:
            case io.RunOp():
                seconds = worker.executor.seconds(command.op) * self.times_as_long()
                worker.is_busy = True
                self.invariants.begins(worker.machine, command.op)
                self.invariants.draws(worker.machine, command.op, worker.executor.choices)
                worker.executor.begins(command.op, command.generation)
                self.meshes.begins(worker, command.op)
                self.clock.after(seconds, partial(self._end_op, worker, command, seconds))
            case io.Complete(op=SaveOp() as op):
                self._builds.save(worker, op)
            case io.Complete(op=SnapshotOp() as op):
                self.copies.snapshot(worker, op)
            case io.PickCandidates():
                picked = partial(self._picked, worker, command, worker.executor.rows.give_away())
                self.clock.after(PICK_S, partial(worker.when_running, picked))
            case io.KeepParameters():
                here = {chunk.stage: chunk.version for chunk in worker.executor.chunks.values()}
                worker.executor.rows.keep(command.version, here)
            case io.TakeChoice():
                worker.executor.draw_by(command.choice)
                worker.executor.desk.selected()
                worker.executor.rows.end()
            case io.SendTensor():
                self.transport.send(worker, command)
            case io.SendReport():
                self._send_report(worker, command.report)
            case io.Build():
                self._builds.begin(worker, command)
            case io.CancelBuild():
                worker.build += 1
                cancelled = io.BuildFailed(report=None)
                self.clock.after(0.0, partial(self._give, worker, cancelled))
            case io.StartPrefetch():
                self.copies.start(worker, command)
            case io.StartOpening():
                self._builds.data.start(worker, command)
            case io.FollowCommit():
                self.copies.follow(worker, command)
            case io.DropCopies():
                self.copies.drop(worker, command)
            case io.MeasureDevice():
                self.clock.after(0.5, partial(self._give, worker, _measured(worker)))
            case io.MeasureLinks():
                peers = [peer.worker for peer in command.peers if peer.worker in self.workers]
                found, probe_s = self.network.probe(name, peers, only_direct=command.only_direct)
                self.clock.after(probe_s, partial(self._give, worker, found))
            case io.TakeWays():
                self.network.take_ways(name, command.ways)
            case io.LookAtPeers():
                seen = self._seen_by(name, command.peers)
                self.clock.after(LOOK_S, partial(self._give, worker, seen))
            case io.ForgetJob():
                self.copies.forget(worker)
                worker.executor.desk.forget()
                worker.is_to_forget = worker.is_busy
                if not worker.is_busy:
                    worker.executor.forget()
            case io.DialAgain():
                self._streams.dial_again(worker, command.after_s)
            case io.Exit():
                self.lines.append(f"{self.clock.now:.3f} {name} exits: {command.reason}")
                loss = None if command.is_clean else self.meshes.loss_of_turned_away(worker)
                self.kill_worker(name) if loss is None else self._lose_device(worker, loss)
            case io.DropTensor():
                pass

    def _picked(
        self, worker: SimWorker, command: io.PickCandidates, looked_at: frozenset[MicrobatchId]
    ) -> None:
        job = worker.machine.job
        if job is None:
            return
        spec, version = self._spec_of(job), command.version
        for row, model in worker.executor.asked(spec, version).items():
            found = picked_by(model, spec, looked_at, num_rows=command.num_rows)
            for part in parts_of(found, command.generation, version, row=row, part_bytes=PART_BYTES):
                self._give(worker, part)

    def _seen_by(self, me: WorkerId, peers: Sequence[Member]) -> PeersSeen:
        """Peers that a look finds: where a link is cut, or a process stands still, nothing is heard."""
        reached, gone = [], []
        for peer in peers:
            found = self.workers.get(peer.worker)
            if self.network.is_cut(me, peer.worker) or self.network.is_cut(peer.worker, me):
                continue
            if found is None or found.machine.identity.incarnation != peer.incarnation:
                gone.append(peer.incarnation)
            elif not found.is_frozen:
                reached.append(peer.incarnation)
        return PeersSeen(reached=tuple(reached), gone=tuple(gone))

    def _end_op(self, worker: SimWorker, command: io.RunOp, seconds: float) -> None:
        if not worker.is_stuck and (worker.mesh is None or not worker.mesh.hangs):
            worker.when_running(partial(self._finish_op, worker, command, seconds))

    def _finish_op(self, worker: SimWorker, command: io.RunOp, seconds: float) -> None:
        op = command.op
        if isinstance(op, ApplyOp):
            lineages = (chunk.lineage for chunk in worker.executor.chunks.values())
            self.invariants.applies(worker.machine, op.record, lineages)
        outcome = self._outcome(worker, command)
        worker.is_busy = False
        if worker.mesh is not None:
            worker.mesh.ended(seconds)
        if worker.is_to_forget:
            worker.is_to_forget = False
            worker.executor.forget()
        elif isinstance(op, ApplyOp) and not isinstance(outcome, OpFailed):
            self.copies.applied(worker, op.record)
        self._give(worker, io.OpEnded(op=op, outcome=outcome, seconds=seconds))

    def _outcome(self, worker: SimWorker, command: io.RunOp) -> OpOutcome:
        if worker.to_fail is None or not worker.to_fail(command.op):
            return worker.executor.run(command.op, command.generation)
        worker.to_fail = None
        return worker.executor.fail(command.op, command.generation, "made up")

    def damage_checkpoint(self, number: int, seconds: float) -> None:
        """Change a file of the newest checkpoint that counts; it is put back after so long."""
        self.store.has_failed = True
        coordinator = self.coordinator
        jobs = () if coordinator is None else coordinator.history.jobs.values()
        for newest in [job.newest_checkpoint for job in jobs]:
            if newest is not None and newest in self.log:
                self.store.damage(newest, number, seconds=seconds)

    def hide_checkpoints(self, seconds: float, *, newest_only: bool) -> None:
        """Have no checkpoint's files be there for so long, or the newest one's alone."""
        if not newest_only:
            self.store.unmount(seconds)
            return
        jobs = () if self.coordinator is None else self.coordinator.history.jobs.values()
        for newest in [job.newest_checkpoint for job in jobs]:
            if newest is not None and newest in self.log:
                self.store.hide(newest, seconds=seconds)

    def lose_data(self, name: WorkerId, seconds: float) -> None:
        """Let a worker not see its data for so long."""
        self._builds.data.lose(name, seconds)

    def replace_data(
        self, name: WorkerId, seconds: float, fingerprint: str = "", *, jobs: frozenset[JobId] | None = None
    ) -> None:
        """Let the files of a worker be other ones for so long, for `jobs` or all; by default no other's are."""
        self._builds.data.replace(name, seconds, fingerprint or f"other data of {name}", jobs)

    def _spec_of(self, job: JobId) -> JobSpec:
        [submitted] = [r for r in self.log if isinstance(r, JobSubmitted) and r.job == job]
        return read_spec(submitted.spec)

    def _checkpoint_of(self, job: JobId, version: Step) -> CheckpointCommitted:
        """The last one of this version."""
        saved = [r for r in self.log if isinstance(r, CheckpointCommitted) and r.job == job]
        return [r for r in saved if r.version == version][-1]
