"""The workers of the newest generation: what they have said under it, and how the run speaks to them."""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set

from skein.protocol.coordinator.coordinator_io import Outbox
from skein.protocol.coordinator.runs.placing.neighbours import Assigned, difference
from skein.protocol.log.history import JobHistory
from skein.protocol.log.records import GenerationMember, GenerationOpened
from skein.protocol.membership.membership import Entry
from skein.protocol.messages.directives import Assign, ChunkVersion, Directive, Dismiss, Member, NewGeneration
from skein.protocol.messages.reports import Ack, ChunksReady, Prefetched
from skein.topology.fleet import Fleet
from skein.types import Generation, Incarnation, SiteId, Step, WorkerId

_NUM_COPIES = 8
"""Copies of one worker that are remembered; it keeps fewer."""


class Members:
    """Workers that were live when the generation was opened, less those that were lost since.

    `placed` are those of them that the plan uses, sorted.
    """

    def __init__(self, job: JobHistory, live: Mapping[WorkerId, Entry], outbox: Outbox) -> None:
        self.acks: dict[WorkerId, Ack] = {}
        self.ready: dict[WorkerId, ChunksReady] = {}
        self.placed: dict[WorkerId, None] = {}
        self._donors: dict[WorkerId, frozenset[WorkerId]] = {}
        """Workers from which each worker of the plan was to fetch state."""
        self.keepers: dict[GenerationMember, tuple[ChunkVersion, ...]] = {}
        """Processes that have told of copies in their memory, here or not, and of which."""
        self.job = job
        self.live = live
        """Workers of the run that are not lost, members or not."""
        self.out = outbox
        self._entries: dict[WorkerId, Entry] = {}
        self._assigned: dict[Incarnation, Assigned] = {}
        """Newest Assign that each process was sent; whether it has that shows by what it acknowledges."""
        self._computed: dict[Incarnation, Step] = {}
        """Newest step of which each process has reported."""

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._entries

    def is_this(self, entry: Entry) -> bool:
        """Whether this very process is a member, not another of its name."""
        return self._entries.get(entry.hello.worker) is entry

    def lost(self, worker: WorkerId) -> None:
        """A worker is no more."""
        self._entries.pop(worker, None)

    def acknowledged(self, worker: WorkerId, ack: Ack) -> None:
        """A member has acknowledged the generation, with all that it holds."""
        self.acks[worker] = ack
        self._keeps(worker, ack.backups)

    def copied(self, worker: WorkerId, report: Prefetched) -> None:
        """A worker, member or not, has a copy of a stage."""
        if not report.error and worker in self._entries:
            told = ChunkVersion(stage=report.stage, version=report.version)
            before = self.keepers.get(self._entries[worker].holder, ())
            self._keeps(worker, (*before, told)[-_NUM_COPIES:])

    def _keeps(self, worker: WorkerId, copies: tuple[ChunkVersion, ...]) -> None:
        for other in [other for other in self.keepers if other.worker == worker]:
            del self.keepers[other]
        if copies:
            self.keepers[self._entries[worker].holder] = copies

    # --- a generation ---

    def open_generation(self, reason: str, *, without: Collection[WorkerId] = (), now: float) -> Generation:
        """Record a generation of all workers that are live, `without` some, and fence whatever is older."""
        history = self.out.history
        self._entries = {x: entry for x, entry in sorted(self.live.items()) if x not in without}
        self.acks.clear()
        self.ready.clear()
        generation = Generation(history.generation + 1)
        opened = GenerationOpened(
            job=self.job.job,
            generation=generation,
            members=tuple(entry.holder for entry in self._entries.values()),
            reason=reason,
            wall_s=now,
        )
        self.out.record(opened)
        self.out.log(
            f"generation={opened.generation} members={len(self._entries)}: {reason}", job=self.job.job
        )
        self._fence(generation)
        return opened.generation

    def _fence(self, generation: Generation) -> None:
        """Have all members stop; those that may lack the last commit are given it, and the others are not."""
        version, position = self.job.version, self.out.position
        key = self.out.generation_key(generation).value
        told: dict[bool, list[WorkerId]] = {True: [], False: []}
        for worker, entry in self._entries.items():
            told[self._computed.get(entry.hello.incarnation) == version].append(worker)
        for has_commit, workers in told.items():
            last_commit = None if has_commit else self.job.last_commit
            fence = NewGeneration(job=self.job.job, key=key, last_commit=last_commit, position=position)
            self.send(fence, *workers)

    def computed(self, worker: WorkerId, step: Step) -> None:
        """A member reports of a step, so it has applied the commit before that."""
        if step == self.job.version:
            self._computed[self._entries[worker].hello.incarnation] = step

    def has_state(self, worker: WorkerId) -> bool:
        """Whether a member that has acknowledged holds chunks or copies of stages."""
        ack = self.acks[worker]
        return bool(ack.chunks or ack.backups)

    @property
    def is_fenced(self) -> bool:
        """Whether every member has acknowledged: nobody acts on anything older any more."""
        return len(self.acks) == len(self._entries)

    def num_begun(self) -> int:
        """Microbatches that some worker had something of when the generation was opened."""
        told = (done for ack in self.acks.values() for done in ack.progress)
        return len({m for done in told for m in (*done.ledger, *(m for _, m in done.held))})

    def unacknowledged(self) -> tuple[WorkerId, ...]:
        """Members that the fence still waits for."""
        return tuple(worker for worker in self._entries if worker not in self.acks)

    def place(self, workers: Iterable[WorkerId]) -> None:
        """Give these workers a place, though no plan was assigned."""
        self.placed = dict.fromkeys(workers)
        self._donors.clear()

    def assign(self, told: Mapping[WorkerId, Assign], near: Mapping[WorkerId, Set[WorkerId]]) -> None:
        """Tell each worker of the plan its part and its peers, as a difference to what it has by its acknowledgement.

        Args:
            told: the parts, by worker.
            near: workers that each exchanges tensors with; donors of state are peers too.
        """
        self.place(sorted(told))
        peers = {worker: entry.member for worker, entry in self._entries.items()}
        assigned: dict[Incarnation, Assigned] = {}
        for worker in self.placed:
            donors = self._donors[worker] = donors_of(told[worker])
            incarnation = peers[worker].incarnation
            before = self._assigned.get(incarnation)
            if before is not None and self.acks[worker].assigned != before.generation:
                before = None
            mine = tuple(peers[other] for other in sorted((donors | near[worker]) - {worker}))
            self.send(difference(told[worker], mine, before), worker)
            assigned[incarnation] = Assigned(
                generation=self.job.generation, job=self.job.job, peers={peer.worker: peer for peer in mine}
            )
        self._assigned = assigned

    def may_have_met(self, worker: WorkerId, peer: WorkerId) -> bool:
        """Whether the plan that was assigned lets a worker know whether a peer can be reached."""
        return worker in self.placed and (peer in self.placed or peer in self._donors.get(worker, ()))

    def built(self, worker: WorkerId, report: ChunksReady) -> bool:
        """A worker has its chunks; whether every worker of the plan has them now."""
        if worker in self.placed:
            self.ready[worker] = report
        return worker in self.placed and len(self.ready) == len(self.placed)

    def late(self) -> tuple[WorkerId, ...]:
        """Workers of the plan that have not built yet what they are to, while others have."""
        return tuple(worker for worker in self.placed if worker not in self.ready) if self.ready else ()

    @property
    def sites(self) -> dict[WorkerId, SiteId]:
        """Site of each member."""
        return {worker: entry.hello.site for worker, entry in self._entries.items()}

    @property
    def fleet(self) -> Fleet:
        """Members that stay, as they were when they joined."""
        entries = (entry for entry in self._entries.values() if not entry.is_going)
        return Fleet(workers=tuple(entry.fleet_worker for entry in entries), links=())

    def entries_of(self, workers: Sequence[WorkerId]) -> list[Entry]:
        """Entries of these members, in this order."""
        return [self._entries[worker] for worker in workers]

    # --- speaking ---

    def donor(self, worker: WorkerId) -> Member:
        """Address and door of a member, for those who are to fetch from it."""
        return self.out.as_donor(self._entries[worker].member, self.job.generation)

    def tell(self, directive: Directive, worker: WorkerId) -> None:
        """To anybody who is live, member or not."""
        entry = self.live.get(worker)
        if entry is not None:
            self.out.send(directive, entry.process, generation=self.job.generation)

    def send(self, directive: Directive, *workers: WorkerId) -> None:
        """To these members."""
        processes = [self._entries[worker].process for worker in workers]
        self.out.send(directive, *processes, generation=self.job.generation)

    def send_placed(self, directive: Directive) -> None:
        """To every worker of the plan."""
        self.send(directive, *self.placed)

    def free_unplaced(self, *, keeping: Collection[WorkerId] = ()) -> None:
        """Members without a place may forget the job, but for some; those that are leaving may go."""
        kept = {*self.placed, *keeping}
        self._dismiss(entry for worker, entry in self._entries.items() if worker not in kept)

    def free_strangers(self) -> None:
        """Let workers that came after the generation was opened forget the job: they hold nothing that counts.

        Nor do copies count that a worker that is away may keep.
        """
        self.keepers.clear()
        self._dismiss(entry for entry in self.live.values() if not self.is_this(entry))

    def free_all(self) -> None:
        """The job is over for everybody who is live, member or not."""
        self._dismiss(self.live.values())

    def let_go(self, worker: WorkerId) -> None:
        """Let this worker go, which wants to: nothing depends on it."""
        self._dismiss([self.live[worker]])

    def let_leaving_go(self) -> None:
        """Let all leaving workers go: nothing depends on anybody."""
        self._dismiss(entry for entry in self.live.values() if entry.is_going)

    def is_going(self, worker: WorkerId) -> bool:
        """Whether a member wants to go, or is wanted elsewhere."""
        return self._entries[worker].is_going

    def _dismiss(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self.out.send(Dismiss(job=self.job.job, may_exit=entry.is_leaving), entry.process)


def donors_of(assign: Assign) -> frozenset[WorkerId]:
    """Peers from which a worker is to fetch state."""
    sources = [chunk.source for chunk in assign.chunks]
    averaged = (neighbour.peer for source in sources for neighbour in source.neighbours)
    return frozenset([*(source.peer for source in sources if source.peer is not None), *averaged])
