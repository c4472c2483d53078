"""Copies of stages that simulated workers keep beside their chunks: snapshots, backups, and what follows the commits.

As elsewhere in the simulator a lineage stands for state. Bytes go over the modelled links in pieces, so that they share
these with training as real streams do; donors take pieces off one list, each as fast as its link.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce

from skein.protocol.messages.directives import ChunkVersion, Prefetch, StepRecord
from skein.protocol.worker.keeping.shelf import CopyShelf, ShelvedCopy, failure_of
from skein.protocol.worker.keeping.snapshots import SnapshotTerm, changes, outlived
from skein.protocol.worker.ops import SnapshotOp
from skein.protocol.worker.worker_io import (
    DropCopies,
    FollowCommit,
    SnapshotsHeld,
    StartPrefetch,
    WorkerEvent,
)
from skein.sim.clock import Clock
from skein.sim.compute.executor import StageTimes
from skein.sim.judging.invariants import Violated, lineage_after
from skein.sim.lines.network import Network
from skein.sim.processes.worker import SimWorker
from skein.types import Incarnation, JobId, StageSpec, Step, WorkerId

MIXED = "mixed"
"""Lineage of a copy with pieces of several histories."""
NUM_PIECES = 16
"""Number of pieces that a state travels in."""
NUM_STREAMS = 2
"""Pieces on their way from one donor at a time."""
RETRY_S = 0.2
NUM_RETRIES = 50
"""Fruitless looks for a donor before a copy is given up."""

Give = Callable[[SimWorker, WorkerEvent], None]
Place = tuple[StageSpec, Step]
LineageNow = Callable[[JobId, StageSpec, str], str]


class _Copy(ShelvedCopy):
    """A copy that is being fetched, or is here; `lineage` is known from the first piece on."""

    def __init__(self, prefetch: Prefetch) -> None:
        super().__init__(prefetch)
        self.lineage: str | None = None
        self.pieces = NUM_PIECES
        """Not asked for yet."""
        self.busy: Counter[WorkerId] = Counter()
        self.retries = 0
        self.is_dropped = False
        self.is_applying = False


@dataclass(slots=True, kw_only=True)
class _Snapshot(SnapshotTerm):
    """A chunk's lineage at a version."""

    lineage: str


@dataclass(slots=True)
class _Shelf:
    """Copies and results that one process keeps."""

    snapshots: dict[Place, _Snapshot] = field(default_factory=dict)
    results: set[Place] = field(default_factory=set)
    fetched: CopyShelf[_Copy] = field(default_factory=lambda: CopyShelf(_Copy))

    def thin_out(self, stage: StageSpec) -> None:
        """Let go of what is too old."""
        here = sorted(self.snapshots.values(), key=lambda x: x.version)
        for snapshot in outlived(here, stage):
            del self.snapshots[stage, snapshot.version]
        keeping = [v for (x, v), snapshot in self.snapshots.items() if x == stage and snapshot.keeps_results]
        self.results = {
            (x, step) for x, step in self.results if x != stage or (keeping and step >= min(keeping))
        }


class SimCopies:
    """Carries out SnapshotOp, StartPrefetch, FollowCommit and DropCopies.

    Args:
        workers: all processes, by name; the caller changes it.
        times_of: costs of a stage of a job.
        give: hands a worker an event.
        lineage_now: what a lineage is called since other stages were averaged.
    """

    def __init__(
        self,
        clock: Clock,
        network: Network,
        workers: Mapping[WorkerId, SimWorker],
        *,
        times_of: Callable[[JobId, StageSpec], StageTimes],
        give: Give,
        lineage_now: LineageNow,
    ) -> None:
        self._lineage_now = lineage_now
        self._clock = clock
        self._network = network
        self._workers = workers
        self._times_of = times_of
        self._give = give
        self._shelves: dict[Incarnation, _Shelf] = {}

    def _shelf(self, worker: SimWorker) -> _Shelf:
        incarnation = worker.machine.identity.incarnation
        if incarnation not in self._shelves:
            self._shelves[incarnation] = _Shelf()
        return self._shelves[incarnation]

    def forget(self, worker: SimWorker) -> None:
        """The job is over for this process."""
        for copy in self._shelf(worker).fetched:
            copy.is_dropped = True
        self._shelves.pop(worker.machine.identity.incarnation)

    # --- snapshots ---

    def snapshot(self, worker: SimWorker, op: SnapshotOp) -> None:
        """A SnapshotOp has ended."""
        chunk, shelf = worker.executor.held(op.stage), self._shelf(worker)
        if chunk.version != op.version:
            raise Violated(f"{worker.machine.identity.worker} takes {op} of a chunk at {chunk.version}")
        taken = _Snapshot(
            stage=chunk.stage,
            version=op.version,
            generation=op.generation,
            keeps_results=op.keeps_results,
            lineage=chunk.lineage,
        )
        shelf.snapshots.setdefault((chunk.stage, op.version), taken).asked_again(op)
        shelf.thin_out(chunk.stage)
        self._tell_snapshots(worker, worker.machine.job)

    def applied(self, worker: SimWorker, record: StepRecord) -> None:
        """The chunks have been updated: keep what was applied to those that somebody may catch up with."""
        shelf = self._shelf(worker)
        for chunk in worker.executor.chunks.values():
            for snapshot in shelf.snapshots.values():
                if snapshot.stage == chunk.stage:
                    snapshot.stepped(worker.machine.generation)
                    snapshot.adopted(worker.machine.generation)
            shelf.results.add((chunk.stage, record.step))
            shelf.thin_out(chunk.stage)

    def _tell_snapshots(self, worker: SimWorker, job: JobId | None) -> None:
        if job is not None:
            places = sorted(self._shelf(worker).snapshots, key=lambda place: (place[0].index, place[1]))
            copies = tuple(ChunkVersion(stage=stage, version=version) for stage, version in places)
            self._give(worker, SnapshotsHeld(job=job, copies=copies))

    # --- what others, and builds, find here ---

    def fixed(self, worker: SimWorker, stage: StageSpec, version: Step) -> str | None:
        """Lineage of a chunk, snapshot or backup of a worker at a version; None if it has none."""
        here = worker.executor.state_of(stage, version)
        return self.kept(worker, stage, version) if here is None else here

    def kept(self, worker: SimWorker, stage: StageSpec, version: Step) -> str | None:
        """Lineage of a snapshot or backup of a worker at a version; None if it has none."""
        shelf = self._shelf(worker)
        found = shelf.snapshots.get((stage, version))
        if found is not None:
            return found.lineage
        backups = (x for x in shelf.fetched if x.prefetch.is_backup and x.prefetch.stage == stage)
        return next((x.lineage for x in backups if x.version == version and x.is_whole), None)

    def lag(self, worker: SimWorker, job: JobId, stage: StageSpec, version: Step) -> int | None:
        """Number of results that a followed copy still needs for `version`; None if it cannot get there."""
        copy = self._shelf(worker).fetched.followed(job, stage)
        missing = None if copy is None else copy.lacking(version)
        if copy is None or missing is None:
            return None
        wanted = [record for record in missing if changes(record, stage.index)]
        is_there = all(self._giver(worker, copy, record) is not None for record in wanted)
        return len(wanted) if is_there else None

    def caught_up(self, worker: SimWorker, job: JobId, stage: StageSpec, version: Step) -> str | None:
        """Lineage of a followed copy brought to `version`; None as for `lag`."""
        copy = self._shelf(worker).fetched.followed(job, stage)
        if copy is None or self.lag(worker, job, stage, version) is None:
            return None
        return reduce(lineage_after, copy.lacking(version) or (), copy.lineage or "")

    # --- fetching ---

    def start(self, worker: SimWorker, command: StartPrefetch) -> None:
        """Begin to fetch a copy, or go on with other donors."""
        copy = self._shelf(worker).fetched.asked(command.prefetch)
        copy.prefetch, copy.retries = command.prefetch, 0
        self._fetch(worker, copy)
        self._advance(worker, copy)

    def _fetch(self, worker: SimWorker, copy: _Copy) -> None:
        """Ask every donor that is there and idle for a piece; look again later if there is none at all."""
        if copy.is_dropped or copy.is_whole:
            return
        for donor in self._donors(copy):
            name = donor.machine.identity.worker
            lineage = self.fixed(donor, copy.prefetch.stage, copy.version)
            while lineage is not None and copy.pieces and copy.busy[name] < NUM_STREAMS:
                self._comes_from(copy, lineage)
                if not self._ask(worker, copy, donor):
                    break
        if not copy.busy.total():
            self._look_again(worker, copy)

    def _comes_from(self, copy: _Copy, lineage: str) -> None:
        """All pieces are of one state, whatever became of other stages while they came."""
        job, stage = copy.prefetch.job, copy.prefetch.stage
        given = self._lineage_now(job, stage, lineage)
        if copy.lineage is not None and self._lineage_now(job, stage, copy.lineage) != given:
            # Of two histories: who is cut off does not hear that the job went back. Nobody may ever hold that.
            given = MIXED
        copy.lineage = given

    def _donors(self, copy: _Copy) -> list[SimWorker]:
        """Donors that live and run, by the incarnation that was named."""
        named = {member.worker: member for member in copy.prefetch.donors}
        found = [self._workers[name] for name in sorted(named) if name in self._workers]
        return [
            donor
            for donor in found
            if donor.machine.identity.incarnation == named[donor.machine.identity.worker].incarnation
            and donor.machine.gate.may_fetch(named[donor.machine.identity.worker].door)
            and not donor.is_frozen
        ]

    def _ask(self, worker: SimWorker, copy: _Copy, donor: SimWorker) -> bool:
        """Whether a piece is on its way."""
        name = donor.machine.identity.worker
        num_bytes = 3 * self._times_of(copy.prefetch.job, copy.prefetch.stage).parameter_bytes // NUM_PIECES
        me = worker.machine.identity.worker
        arrival_s = self._network.arrival_s(name, me, num_bytes, now=self._clock.now)
        if arrival_s is None:
            return False
        copy.pieces -= 1
        copy.busy[name] += 1
        self._clock.at(arrival_s, partial(worker.when_running, partial(self._arrived, worker, copy, donor)))
        return True

    def _arrived(self, worker: SimWorker, copy: _Copy, donor: SimWorker) -> None:
        copy.busy[donor.machine.identity.worker] -= 1
        if copy.is_dropped:
            return
        if donor.is_alive:
            copy.retries = 0
        else:
            copy.pieces += 1
        copy.is_whole = not copy.pieces and not copy.busy.total()
        if not copy.is_whole:
            self._fetch(worker, copy)
            return
        self._give(worker, copy.ended())
        self._advance(worker, copy)

    def _look_again(self, worker: SimWorker, copy: _Copy) -> None:
        copy.retries += 1
        if copy.retries <= NUM_RETRIES:
            again = partial(worker.when_running, partial(self._fetch, worker, copy))
            self._clock.after(RETRY_S, again)
            return
        self._give(worker, failure_of(copy.prefetch, "no donor has it"))

    # --- following ---

    def follow(self, worker: SimWorker, command: FollowCommit) -> None:
        """A step is committed that a copy has to take part in."""
        copy = self._shelf(worker).fetched.followed(command.job, command.stage)
        if copy is not None:
            copy.records.append(command.record)
            copy.retries = 0
            self._advance(worker, copy)

    def _advance(self, worker: SimWorker, copy: _Copy) -> None:
        """Apply the oldest result that is missing, when it has come."""
        stage, record = copy.prefetch.stage, copy.due
        if copy.is_dropped or copy.is_applying or record is None:
            return
        if not changes(record, stage.index):
            self._apply(worker, copy)
            return
        giver = self._giver(worker, copy, record)
        arrival_s = None
        if giver is not None:
            num_bytes = self._times_of(copy.prefetch.job, stage).parameter_bytes
            name, me = giver.machine.identity.worker, worker.machine.identity.worker
            arrival_s = self._network.arrival_s(name, me, num_bytes, now=self._clock.now)
        if arrival_s is not None:
            copy.is_applying = True
            self._clock.at(arrival_s, partial(worker.when_running, partial(self._apply, worker, copy)))
        elif copy.retries < NUM_RETRIES:
            copy.retries += 1
            self._clock.after(RETRY_S, partial(worker.when_running, partial(self._advance, worker, copy)))

    def _giver(self, worker: SimWorker, copy: _Copy, record: StepRecord) -> SimWorker | None:
        """A donor that has kept what a step applied; or any worker that has, which an assignment would name."""
        place = (copy.prefetch.stage, record.step)
        everybody = [self._workers[name] for name in sorted(self._workers)]
        others = [x for x in (*self._donors(copy), *everybody) if x is not worker and not x.is_frozen]
        return next((x for x in others if place in self._shelf(x).results), None)

    def _apply(self, worker: SimWorker, copy: _Copy) -> None:
        copy.is_applying = False
        if copy.is_dropped:
            return
        assert copy.lineage is not None and copy.due is not None
        copy.lineage = lineage_after(copy.lineage, copy.due)
        copy.stepped()
        self._give(worker, copy.ended())
        self._advance(worker, copy)

    # --- dropping ---

    def drop(self, worker: SimWorker, command: DropCopies) -> None:
        """Let go of what is of no more use."""
        shelf, above = self._shelf(worker), command.above
        for copy in shelf.fetched.drop(command):
            copy.is_dropped = True
        if above is not None:
            shelf.snapshots = {place: x for place, x in shelf.snapshots.items() if place[1] <= above}
            shelf.results = {place for place in shelf.results if place[1] < above}
            self._tell_snapshots(worker, worker.machine.job)
