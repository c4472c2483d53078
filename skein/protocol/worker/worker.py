"""The Worker machine: directives, tensors and ended ops go in; ops, sends and reports come out.

Rules of this file
- One op runs at a time. A running op is never interrupted: what invalidates it waits for its end.
- A generation is acknowledged when no op of an older one runs any more, with all that was done, and not before.
- What is built counts as held, whatever generation asked for it, unless the job was forgotten meanwhile.
"""

from dataclasses import replace
from typing import assert_never

from skein import PROTOCOL_VERSION
from skein.protocol.deadline import TimePassed
from skein.protocol.messages import directives, reports, ways
from skein.protocol.messages.coresets import CandidatesPicked
from skein.protocol.messages.passes import GenerationKey
from skein.protocol.worker import worker_io as io
from skein.protocol.worker.building import Building
from skein.protocol.worker.copies import Copies
from skein.protocol.worker.gate import PeerGate
from skein.protocol.worker.ops import (
    ApplyOp,
    ComputeOp,
    JoinOp,
    Op,
    OpFailed,
    OpOutcome,
    PackOp,
    SaveOp,
    Sketched,
    SketchOp,
    SnapshotOp,
    SumOp,
)
from skein.protocol.worker.pipeline import Pipeline
from skein.protocol.worker.standing import Standing
from skein.protocol.worker.steps import Steps
from skein.protocol.worker.timing import Timing
from skein.types import Epoch, Generation, JobId, Step, WorkerId

FIRST_WAIT_S, LAST_WAIT_S = 0.5, 4.0
"""Pauses before a worker that another run log turned away asks again; they double. The last one is far below the
time for which a job waits for silent workers before it gives up steps."""


class Worker:
    """State of one worker. `handle` is the only way in, what it returns the only way out."""

    def __init__(self, identity: io.Identity) -> None:
        self.identity = identity
        self.progress = 0
        self._standing = Standing(identity)
        self._steps = Steps(self._standing)
        self.gate = PeerGate(self._standing, lambda: self.version)
        self._copies = Copies(self._standing)
        self._building = Building(self._standing)
        self._timing = Timing(identity.worker)
        self._adopting: directives.NewGeneration | None = None
        self._running: Op | None = None
        self._is_running_void = False
        self._is_to_acknowledge = False
        self._runs_since = 0.0
        self._is_stopping = False
        self._beat_s = 1.0
        self._next_beat: float | None = None
        self._num_turned_away = 0
        """Times in a row that a coordinator with another run log refused this worker."""

    # --- the way in ---

    def handle(self, event: io.WorkerEvent, *, now: float) -> list[io.WorkerCommand]:
        """Take one event at time `now` (seconds, any origin); gives what to do about it, in order."""
        match event:
            case io.TensorArrived():
                self._steps.tensor_arrived(event.envelope)
            case io.OpEnded():
                self._timing.op_ended(event.op, event.seconds)
                self._op_ended(event.op, event.outcome)
            case io.TensorTaken():
                if event.envelope.generation == self.generation:
                    self._timing.tensor_taken(event.to, event.envelope.header, event.num_bytes, event.seconds)
            case io.DirectiveArrived():
                self._directive(event.directive, now=now)
            case TimePassed():
                self._beat(now=now)
            case io.SendFailed():
                self._send_failed(event)
            case io.Built():
                self._built(event)
            case io.BuildFailed():
                self._building.failed(event)
            case io.BytesMoved():
                self.progress += 1
            case io.SnapshotsHeld() | io.PrefetchEnded() | io.PrefetchFailed() | io.OpeningEnded():
                self._copies.ended(event)
            case (
                reports.CheckpointWritten()
                | reports.CheckpointUnwritten()
                | reports.LinksMeasured()
                | reports.PeersSeen()
                | CandidatesPicked()
            ):
                self._standing.tell(event)
            case io.DeviceMeasured():
                self._device_measured(event)
            case io.StreamOpened():
                self._stream_opened(now=now)
            case io.StreamLost():
                self._stream_lost()
            case io.LogShortened():
                self._steps.log_shortened(event.keys)
                if event.is_wanted:
                    self._standing.trouble(f"the boundary log has forgotten {event.keys[0]}")
            case io.StopRequested():
                self._stop(event.reason)
            case _:
                assert_never(event)
        self._dispatch(now=now)
        return self._standing.drain()

    def deadline(self) -> float | None:
        """Time when `TimePassed` is wanted next; None: no time matters."""
        return self._next_beat

    # --- for others to see ---

    @property
    def peers(self) -> frozenset[WorkerId]:
        """Workers that this one exchanges tensors with or fetches state from, by the newest Assign."""
        return self._standing.peer_names

    @property
    def pipeline(self) -> Pipeline | None:
        """The compute state of the present generation; None while there is none."""
        return self._steps.pipeline

    @property
    def epoch(self) -> Epoch:
        """Epoch of the coordinator that is followed; 0 before the first."""
        return self._standing.epoch

    @property
    def generation(self) -> Generation:
        """The newest that was adopted."""
        return self._standing.generation

    @property
    def job(self) -> JobId | None:
        """Job that is worked on; None if there is none."""
        return self._standing.job

    @property
    def version(self) -> Step:
        """Version of all chunks that are held."""
        return self._steps.version

    # --- the control stream ---

    def _stream_opened(self, *, now: float) -> None:
        self._standing.is_connected = True
        self._next_beat = now + self._beat_s
        identity = self.identity
        self._standing.tell(
            reports.Hello(
                worker=identity.worker,
                incarnation=identity.incarnation,
                protocol_version=PROTOCOL_VERSION,
                site=identity.site,
                address=identity.address,
                profile=identity.profile,
                epoch=self.epoch,
                position=self._standing.position,
                host=identity.host,
                secret=identity.secret,
                offers_relay=identity.offers_relay,
                labels=identity.labels,
                offers=identity.offers,
            )
        )
        if self._is_stopping:
            self._standing.tell(reports.Leaving(reason="asked to stop"))

    def _stream_lost(self) -> None:
        self._standing.is_connected = False
        self._next_beat = None
        if self._is_stopping:
            self._exit("asked to stop, and no coordinator to tell", is_clean=True)

    def _beat(self, *, now: float) -> None:
        if self._next_beat is not None and now >= self._next_beat:
            self._standing.tell(
                reports.Beat(progress=self.progress, running_s=self._running_s(now), statistics=())
            )
            times = self._timing.report(self.generation)
            if times is not None:
                self._standing.tell(times)
            self._next_beat = now + self._beat_s

    def _running_s(self, now: float) -> float:
        return 0.0 if self._running is None else now - self._runs_since

    def _stop(self, reason: str) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._standing.is_connected:
            self._standing.tell(reports.Leaving(reason=reason))
        else:
            self._exit(reason, is_clean=True)

    def _exit(self, reason: str, *, is_clean: bool) -> None:
        self._standing.commands.append(io.Exit(is_clean=is_clean, reason=reason))

    def _send_failed(self, event: io.SendFailed) -> None:
        if event.generation == self.generation:
            suspected = reports.Suspected(generation=self.generation, peer=event.to, reason=event.reason)
            self._standing.tell(suspected)

    def _device_measured(self, event: io.DeviceMeasured) -> None:
        """Report the speed, and put it in the profile: a new coordinator's stream hears the same later."""
        profile = replace(self.identity.profile, flops_per_s=event.flops_per_s, spread=event.spread)
        self.identity = replace(self.identity, profile=profile)
        self._standing.tell(reports.SpeedMeasured(flops_per_s=event.flops_per_s, spread=event.spread))

    # --- directives ---

    def _directive(self, directive: directives.Directive, *, now: float) -> None:
        match directive:
            case directives.Welcome():
                if directive.epoch >= self.epoch:
                    self._standing.epoch = directive.epoch
                    self._standing.position = directive.position
                    self._standing.probe_door = directive.door
                    self._beat_s = directive.beat_s
                    self._num_turned_away = 0
                    self._next_beat = now + directive.beat_s
            case directives.Refused():
                self._refused(directive)
            case directives.Prefetch() | directives.OpenData() | directives.Follow():
                self._copies.take(directive)
            case directives.Snapshot():
                if (directive.epoch, directive.generation) == self._standing.place:
                    self._copies.snapshot(directive)
            case directives.Probe():
                self._standing.commands.append(
                    io.MeasureLinks(peers=directive.peers, only_direct=directive.only_direct)
                )
            case directives.Measure():
                self._standing.commands.append(io.MeasureDevice())
            case directives.Look():
                self._standing.commands.append(io.LookAtPeers(peers=directive.peers))
            case ways.Ways():
                self._standing.commands.append(io.TakeWays(ways=directive))
            case directives.Dismiss():
                self._dismiss(directive)
            case directives.NewGeneration():
                self._new_generation(directive)
            case directives.UseChoice():
                if (directive.epoch, directive.generation) == self._standing.place:
                    self._steps.selected()
                    self._standing.commands.append(io.TakeChoice(choice=directive.choice))
            case directives.Assign():
                self._assigned(directive)
            case (
                directives.Start()
                | directives.Evaluate()
                | directives.Prepare()
                | directives.TakeSketch()
                | directives.Commit()
                | directives.Save()
            ):
                if (directive.epoch, directive.generation) == self._standing.place:
                    if isinstance(directive, directives.Commit):
                        self._standing.heard_of(directive.position)
                    self._steps.take(directive)
            case _:
                assert_never(directive)

    def _refused(self, directive: directives.Refused) -> None:
        """End, unless another run log is the reason: state that a run log may still count is kept until that is back.

        A coordinator that was started on an empty state directory knows no worker's log. A worker that holds nothing of
        a job follows the new log.
        """
        if directive.log is None:
            self._exit(directive.reason, is_clean=False)
            return
        works = self._standing.job or self._copies.job or self._building.is_going_on
        if works and directive.log is directives.OtherLog.UNKNOWN:
            pause_s = min(FIRST_WAIT_S * 2.0**self._num_turned_away, LAST_WAIT_S)
            self._num_turned_away += 1
            reason = f"keeps what it holds and waits for the run log that it knows: {directive.reason}"
            is_news = self._num_turned_away == 1
            self._standing.commands.append(io.DialAgain(after_s=pause_s, reason=reason, is_news=is_news))
            return
        self._forget()
        self._standing.follow_another_log()
        reason = f"follows another run log: {directive.reason}"
        self._standing.commands.append(io.DialAgain(after_s=FIRST_WAIT_S, reason=reason, is_news=True))

    def _assigned(self, directive: directives.Assign) -> None:
        if (directive.epoch, directive.generation) != self._standing.place:
            return
        assign = self._standing.take(directive)
        if assign is None:
            self._standing.trouble(f"the Assign of generation {directive.since} is not here")
        else:
            self._building.want(assign)

    def _new_generation(self, directive: directives.NewGeneration) -> None:
        standing = self._standing
        if (directive.epoch, directive.generation) <= standing.place:
            return
        if {standing.job, self._copies.job} - {None, directive.job}:
            self._forget()
        standing.epoch = directive.epoch
        standing.generation = directive.generation
        standing.heard_of(directive.position)
        standing.job = directive.job
        standing.adopt(GenerationKey(value=directive.key))
        self._steps.stop()
        self._copies.stop()
        if directive.last_commit is not None:
            self._copies.hear(directive.last_commit)
        self._timing.clear()
        self._adopting = directive
        self._building.cancel()

    def _dismiss(self, directive: directives.Dismiss) -> None:
        if directive.epoch < self.epoch:
            return
        if directive.job in (None, self.job, self._copies.job):
            self._forget()
        if directive.may_exit:
            self._exit("drained", is_clean=True)

    def _forget(self) -> None:
        self._standing.forget()
        self._steps.forget()
        self._copies.forget()
        self._adopting = None
        self._is_to_acknowledge = False
        self._is_running_void = self._running is not None
        self._building.forget()
        self._standing.commands.append(io.ForgetJob())

    # --- building chunks ---

    def _built(self, event: io.Built) -> None:
        assign = self._building.end()
        if assign is None:
            return
        self._steps.hold(assign)
        self._copies.built(self._steps.chunks, assign.version)
        if event.generation != self.generation:
            return
        self._steps.settle(assign)
        self._standing.tell(
            reports.ChunksReady(
                generation=event.generation,
                num_train_samples=event.num_train_samples,
                num_validation_samples=event.num_validation_samples,
                data_fingerprint=event.data_fingerprint,
            )
        )
        self._steps.unpark()

    # --- ops ---

    def _dispatch(self, *, now: float) -> None:
        """Adopt, acknowledge, build or run an op, if nothing is under way."""
        if self._running is not None or self._building.is_going_on:
            return
        if self._adopting is not None:
            self._steps.adopt(self._adopting.last_commit)
            self._adopting = None
            self._is_to_acknowledge = True
        if self._is_to_acknowledge and not self._steps.has_queue:
            self._acknowledge()
        if self._building.is_wanted and not self._steps.has_queue:
            self._building.begin()
            return
        # A snapshot comes before what is queued: that may be the update that it must not see.
        snapshot = self._copies.next_op(self.version, self._steps.chunks)
        self._running = snapshot or self._steps.next_op()
        if self._running is not None:
            self._runs_since = now
            self._standing.commands.append(io.RunOp(generation=self.generation, op=self._running))

    def _acknowledge(self) -> None:
        """Acknowledge the generation, saying what is here: nothing older is acted on any more."""
        self._is_to_acknowledge = False
        chunks, progress = self._steps.fenced()
        self._standing.tell(
            reports.Ack(
                generation=self.generation,
                chunks=chunks,
                progress=progress,
                backups=self._copies.held,
                kept=self._steps.kept,
                assigned=self._standing.assigned,
            )
        )

    def _op_ended(self, op: Op, outcome: OpOutcome) -> None:
        assert op == self._running, f"{op} ended, but {self._running} was running"
        self._running = None
        self.progress += 1
        if self._is_running_void:
            self._is_running_void = False
            return
        if isinstance(outcome, OpFailed):
            self._op_failed(op, outcome)
            return
        match op:
            case ApplyOp():
                self._steps.applied(op)
            case SaveOp() | SnapshotOp():
                self._standing.commands.append(io.Complete(op=op))
            case ComputeOp():
                self._steps.computed(op, outcome)
            case PackOp() | SumOp() | JoinOp():
                self._steps.reduced(op, outcome)
            case SketchOp():
                assert isinstance(outcome, Sketched)
                self._standing.tell(op.report(outcome))
            case _:
                assert_never(op)

    def _op_failed(self, op: Op, outcome: OpFailed) -> None:
        """The chunk's sums are spoilt, or its parameters: do nothing more until a new generation."""
        if isinstance(op, ApplyOp):
            self._exit(f"an update failed halfway: {outcome.reason}", is_clean=False)
            return
        if isinstance(op, ComputeOp):
            self._steps.spoilt(op)
        self._steps.stop()
        if self._adopting is not None:
            return  # It was of an older generation, which is over anyway.
        if outcome.blamed not in (None, self.identity.worker):
            reason = f"sent what cannot be used: {outcome.reason}"
            self._standing.tell(
                reports.Suspected(generation=self.generation, peer=outcome.blamed, reason=reason)
            )
            return
        trouble = reports.Trouble(
            generation=self.generation,
            is_fatal=outcome.is_fatal,
            reason=outcome.reason,
            is_unfit=outcome.is_unfit,
        )
        self._standing.tell(trouble)
