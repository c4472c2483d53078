"""The worker's driver: one inbox, one task that owns the machine, and the carrying out of what the machine commands.

Rules of this file
- Nothing here decides anything about training. Whatever happens becomes an event in the inbox; whatever is to be done
  comes out of the machine as a command.
- Commands are carried out in order, at once, by handing work to somebody: torch to the executor, bytes to the peers,
  what takes time to a child of the task group.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import assert_never

from skein.protocol.deadline import TimePassed
from skein.protocol.messages.directives import Member
from skein.protocol.messages.reports import Beat, PeersSeen, Report, Trouble
from skein.protocol.messages.ways import Ways
from skein.protocol.worker import worker_io as io
from skein.protocol.worker.keeping.desk import is_logged, key_of
from skein.protocol.worker.ops import ApplyOp, OpFailed, TensorKey
from skein.protocol.worker.pipeline import Occupancy
from skein.protocol.worker.worker import Worker
from skein.storage.outside import Outside
from skein.topology.fleet import Profile
from skein.types import Generation
from skein.wire.extra import LogLine, LogLines
from worker.chunks.build import Builder, Files
from worker.chunks.copies import ChunkCopies
from worker.chunks.saving import MovingBytes, Saver
from worker.compute.payload import pack
from worker.compute.state import Saved
from worker.executor import Executor, Ran, one_line
from worker.inbox import WorkerInbox
from worker.selection.picking import pick
from worker.telling.metrics import WorkerMetrics
from worker.telling.moments import named_moment, op_named, tell_report, unwatched
from worker.transport.coordinator import ControlStream
from worker.transport.links import Sight
from worker.transport.peers import Peers
from worker.transport.reach.explorer import Explorer

_log = logging.getLogger(__name__)


class WorkerDriver:
    """Drives one Worker machine from its inbox. Children live in `group`, which is left after `run` has returned.

    Args:
        take_ways: told of the ways around what cannot be dialled.
        measure: blocks while it measures the device; called on torch's thread.
        on_generation: called with each new generation, and again when it has other peers than the one before, so that
            what belongs to older generations and former peers is forgotten.
        outside: asks file systems, which may never answer.
        num_moved: grows while files are read or written and while state comes in.
        watch: told "after ..." when the machine has taken an event, "before ..." and "after ..." each command is begun.
    """

    def __init__(
        self,
        machine: Worker,
        inbox: WorkerInbox,
        *,
        group: asyncio.TaskGroup,
        control: ControlStream,
        peers: Peers,
        explorer: Explorer,
        take_ways: Callable[[Ways], None],
        executor: Executor,
        builder: Builder,
        copies: ChunkCopies,
        files: Files,
        metrics: WorkerMetrics,
        measure: Callable[[], Profile],
        take_log_lines: Callable[[], tuple[LogLine, ...]],
        on_generation: Callable[[Generation], None],
        outside: Outside | None = None,
        num_moved: Callable[[], int] = lambda: 0,
        watch: Callable[[str], None] = unwatched,
    ) -> None:
        self._machine = machine
        self._inbox = inbox
        self._desk = inbox.desk
        self._group = group
        self._control = control
        self._peers = peers
        self._explorer = explorer
        self._take_ways = take_ways
        self._executor = executor
        self._builder = builder
        self._copies = copies
        self._metrics = metrics
        self._device_profile = measure
        self._is_measuring = False
        self._take_log_lines = take_log_lines
        self._on_generation = on_generation
        self._moves = MovingBytes(inbox.post, num_moved)
        asked = Outside() if outside is None else outside
        self._saver = Saver(files, asked, self._moves, metrics, places=builder.places)
        self._watch = watch
        self._loop = asyncio.get_running_loop()
        self._generation = machine.generation
        self._peers_before = machine.peers
        self._building: asyncio.Task[io.Built | io.BuildFailed] | None = None
        self._children: set[asyncio.Task[None]] = set()
        self._saved: Saved | None = None
        """Copied by the op that has ended last, till the machine hears of that."""
        self._num_saving = 0
        self._timer: asyncio.TimerHandle | None = None
        self._exit: io.Exit | None = None

    async def run(self) -> io.Exit:
        """Carry on until the machine says that nothing depends on this process any more; why.

        A clean exit waits for checkpoints that are being written.
        """
        while self._exit is None or (self._exit.is_clean and self._num_saving):
            event = await self._inbox.get()
            commands = self._machine.handle(event, now=self._loop.time())
            self._watch(f"after {named_moment(event)}")
            for command in commands:
                self._watch(f"before {named_moment(command)}")
                self._carry_out(command)
                self._watch(f"after {named_moment(command)}")
            if isinstance(event, io.OpEnded):
                # What is still here was copied after its job was over.
                self._saved = None
            self._follow_generation()
            self._set_timer()
        return self._exit

    def close(self) -> None:
        """End what is still going on."""
        if self._timer is not None:
            self._timer.cancel()
        if self._building is not None:
            self._building.cancel()
        self._copies.close()
        for child in self._children:
            child.cancel()

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        child = self._group.create_task(work)
        self._children.add(child)
        child.add_done_callback(self._children.discard)

    # --- what is to be done ---

    def _carry_out(self, command: io.WorkerCommand) -> None:
        match command:
            case io.SendReport():
                self._report(command.report)
            case io.RunOp():
                self._run_op(command)
            case io.Complete():
                self._complete()
            case io.PickCandidates():
                self._begin(pick(command, self._executor, self._inbox.post))
            case io.KeepParameters():
                self._on_compute(partial(self._executor.compute.keep_parameters, command.version))
            case io.TakeChoice():
                self._desk.selected()
                self._on_compute(partial(self._executor.compute.draw_by, command.choice))
            case io.SendTensor():
                self._send(command)
            case io.DropTensor():
                self._desk.drop(command.envelope.generation, key_of(command.envelope.header))
            case io.Build():
                self._start_build(command)
            case io.CancelBuild():
                self._cancel_build()
            case io.StartPrefetch() | io.StartOpening() | io.FollowCommit() | io.DropCopies():
                self._copies.carry_out(command)
            case io.MeasureLinks():
                self._begin(self._measure(command))
            case io.MeasureDevice():
                if not self._is_measuring:
                    self._begin(self._measure_device())
            case io.TakeWays():
                self._take_ways(command.ways)
            case io.LookAtPeers():
                self._begin(self._look_at(command.peers))
            case io.ForgetJob():
                self._forget_job()
            case io.DialAgain():
                if command.is_news:
                    _log.warning(command.reason)
                self._control.dial_again(command.after_s)
            case io.Exit():
                self._exit = command
            case _:
                assert_never(command)

    def _report(self, report: Report) -> None:
        tell_report(report)
        if isinstance(report, Beat):
            pipeline = self._machine.pipeline
            occupancy, depths = (
                (Occupancy(), {}) if pipeline is None else (pipeline.occupancy, pipeline.queue_depths)
            )
            self._metrics.queues(occupancy, depths, self._desk.num_bytes)
            # An op that others keep from the processors is not stuck.
            running_s = max(0.0, report.running_s - self._executor.waited_s)
            report = replace(report, running_s=running_s, statistics=self._metrics.counts())
        if isinstance(report, Beat | Trouble):
            # Trouble can end the job, and lines that come later would be told to those who watch the next one.
            lines = self._take_log_lines()
            if lines:
                self._control.send(LogLines(lines=lines))
        self._control.send(report)

    def _run_op(self, command: io.RunOp) -> None:
        generation = command.generation
        operands, lost = self._desk.take(command.op, generation)
        self._tell_lost(lost)

        def on_ran(ran: Ran) -> None:
            # An op may outlast the loop: then nobody waits for it any more.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ran, generation, ran)

        self._executor.run(command.op, operands, on_ran)

    def _send(self, command: io.SendTensor) -> None:
        payload = self._desk.for_sending(command.envelope)
        if payload is None:
            self._tell_lost((key_of(command.envelope.header),), is_wanted=True)
        else:
            bundle = pack(payload) if isinstance(payload, Mapping) else payload
            self._peers.send(command.to, command.envelope, bundle)

    def _tell_lost(self, keys: Iterable[TensorKey], *, is_wanted: bool = False) -> None:
        lost = tuple(key for key in keys if is_logged(key))
        if lost:
            self._inbox.post(io.LogShortened(keys=lost, is_wanted=is_wanted))

    def _ran(self, generation: Generation, ran: Ran) -> None:
        """File what an op made, before the machine hears of its end."""
        op, done = ran.op, ran.done
        is_failed = isinstance(done.outcome, OpFailed)
        self._metrics.op_ended(op_named(op).lower(), ran.seconds, is_failed=is_failed)
        self._tell_lost(self._desk.ended(op, generation, None if is_failed else done.outputs, done.added))
        if isinstance(op, ApplyOp) and not is_failed:
            self._metrics.step_ended(now=self._loop.time())
        self._saved = done.saved
        self._inbox.post(io.OpEnded(op=op, outcome=done.outcome, seconds=ran.seconds))

    def _on_compute(self, told: Callable[[], None]) -> None:
        """On torch's thread: after ops that were asked for before, and before any later one."""
        self._executor.tell(told)

    def _forget_job(self) -> None:
        # The machine has not heard yet that the op has ended: who awaits the checkpoint may lack this alone.
        self._save_copied()
        self._cancel_build()
        self._metrics.step_abandoned()
        self._desk.forget()
        self._builder.forget()
        self._copies.forget()
        self._executor.tell(self._executor.compute.forget)

    # --- what takes time ---

    def _start_build(self, command: io.Build) -> None:
        self._building = self._group.create_task(self._build(command))
        # Not in the task: one that is cancelled before its first step never runs.
        self._building.add_done_callback(self._build_ended)

    async def _build(self, command: io.Build) -> io.Built | io.BuildFailed:
        assign = command.assign
        began_s = self._loop.time()
        with self._moves.told():
            event = await self._builder.build(assign, command.donors)
        shown = ",".join(f"s{chunk.stage.index}:{chunk.source.kind}" for chunk in assign.chunks)
        if isinstance(event, io.BuildFailed):
            reason = "" if event.report is None else event.report.reason
            _log.warning("generation=%d could not build %s: %s", assign.generation, shown, reason)
        else:
            elapsed_s = self._loop.time() - began_s
            _log.info(
                "generation=%d version=%d built %s in %.1f s",
                assign.generation,
                assign.version,
                shown,
                elapsed_s,
            )
        return event

    def _build_ended(self, building: asyncio.Task[io.Built | io.BuildFailed]) -> None:
        if building.cancelled():
            self._inbox.post(io.BuildFailed(report=None))
        elif building.exception() is None:
            self._inbox.post(building.result())

    def _cancel_build(self) -> None:
        if self._building is not None and not self._builder.is_installing:
            self._building.cancel()

    def _complete(self) -> None:
        if self._saved is not None:
            self._save_copied()
        elif self._machine.job is not None:
            self._copies.snapshot_begun(self._machine.job)

    def _save_copied(self) -> None:
        saved, self._saved = self._saved, None
        if saved is not None:
            self._num_saving += 1
            self._begin(self._save(saved))

    async def _save(self, saved: Saved) -> None:
        event = await self._saver.save(saved)
        self._num_saving -= 1
        self._inbox.post(event)

    async def _measure_device(self) -> None:
        """Between two ops, on torch's thread: beside one it would measure that."""
        self._is_measuring = True
        try:
            found = await asyncio.wrap_future(self._executor.call(self._device_profile))
        except (RuntimeError, MemoryError) as error:
            _log.warning("the device could not be measured: %s", one_line(error))
        else:
            _log.info(
                "measured %.3g GFLOP/s, runs %.0f %% apart", found.flops_per_s / 1e9, 100 * found.spread
            )
            self._inbox.post(io.DeviceMeasured(flops_per_s=found.flops_per_s, spread=found.spread))
        finally:
            self._is_measuring = False

    async def _measure(self, command: io.MeasureLinks) -> None:
        found = await self._explorer.explore(command.peers, only_direct=command.only_direct)
        for _ in found.unreached:
            self._metrics.rpc_failed("probe")
        self._inbox.post(found)

    async def _look_at(self, peers: tuple[Member, ...]) -> None:
        """All at once: it is asked when work stands still."""
        sights = await asyncio.gather(*(self._explorer.look_at(peer) for peer in peers))
        found = {
            sight: tuple(peer.incarnation for peer, seen in zip(peers, sights, strict=True) if seen is sight)
            for sight in Sight
        }
        self._inbox.post(PeersSeen(reached=found[Sight.REACHED], gone=found[Sight.GONE]))

    # --- after every event ---

    def _follow_generation(self) -> None:
        if self._machine.generation != self._generation:
            self._generation = self._machine.generation
            self._desk.adopt(self._generation)
            self._copies.adopt(self._generation)
            self._on_generation(self._generation)
        elif self._machine.peers is not self._peers_before:
            self._on_generation(self._generation)
        self._peers_before = self._machine.peers

    def _set_timer(self) -> None:
        deadline = self._machine.deadline()
        if self._timer is not None:
            if self._timer.when() == deadline and not self._timer.cancelled():
                return
            self._timer.cancel()
        self._timer = None if deadline is None else self._loop.call_at(deadline, self._time_passed)

    def _time_passed(self) -> None:
        self._timer = None
        self._inbox.post(TimePassed())
