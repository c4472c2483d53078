"""Builds of workers from their assignments: state drawn, kept, fetched from each other or read from the disk."""

from collections.abc import Callable, Mapping
from functools import partial

from skein.config.job import ArrayJob, JobSpec
from skein.config.sweep.rows import RowOrigin
from skein.errors import LocalError, RemoteError, SkeinError, UnfitError
from skein.protocol.log.records import CheckpointCommitted, num_walkers, walker_of, walker_prefix
from skein.protocol.messages.directives import Assign, CheckpointFile, ChunkAssignment
from skein.protocol.messages.reports import CheckpointUnwritten, CheckpointWritten
from skein.protocol.worker.keeping.search import StateLook, StatePlace, StateSearch
from skein.protocol.worker.ops import SaveOp
from skein.protocol.worker.worker_io import Build, BuildFailed, Built, WorkerEvent
from skein.sim.clock import Clock
from skein.sim.compute.executor import StageTimes, stage_times
from skein.sim.compute.rows import NUM_ROWS
from skein.sim.judging.invariants import Invariants, Violated, initial_of
from skein.sim.lines.network import Network
from skein.sim.processes.copies import SimCopies
from skein.sim.processes.data import SimData
from skein.sim.processes.store import Store
from skein.sim.processes.worker import SimWorker
from skein.types import Incarnation, JobId, StageIndex, StageSpec, Step, WorkerId

BUILD_S = 0.05
SAVE_S = 0.5
"""Seconds of writing one stage of a checkpoint."""
SILENT_S = 5.0
"""Until a worker gives up on a store that does not answer."""

Give = Callable[[SimWorker, WorkerEvent], None]


class Builds:
    """Carries out Build and SaveOp. The disk is shared by all workers, as an object store is.

    Args:
        workers: all processes, by name; the caller changes it.
        spec_of: a job as it was submitted.
        checkpoint_of: the committed checkpoint of a job's version.
        give: hands a worker an event.
        crash: ends a worker that holds something else than it has told.
    """

    def __init__(
        self,
        clock: Clock,
        network: Network,
        workers: Mapping[WorkerId, SimWorker],
        invariants: Invariants,
        store: Store,
        *,
        spec_of: Callable[[JobId], JobSpec],
        checkpoint_of: Callable[[JobId, Step], CheckpointCommitted],
        give: Give,
        crash: Callable[[SimWorker, AssertionError], None],
    ) -> None:
        self._crash = crash
        self._spec_of = spec_of
        self._clock = clock
        self._network = network
        self._workers = workers
        self._invariants = invariants
        self._checkpoint_of = checkpoint_of
        self._give = give
        self.copies = SimCopies(
            clock, network, workers, times_of=self.times_of, give=give, lineage_now=invariants.lineage_now
        )
        self.data = SimData(clock, give=give)
        self._read: dict[Incarnation, str] = {}
        """Fingerprint of the data that a process has opened for its newest build."""
        self._times: dict[tuple[JobId, StageSpec], StageTimes] = {}
        self._store = store

    # --- building ---

    def begin(self, worker: SimWorker, command: Build) -> None:
        """Start a build; a newer one, or `cancel`, makes it void."""
        worker.build += 1
        seconds = max(
            (self._fetch_s(worker, command.assign.job, c) for c in command.assign.chunks), default=0.0
        )
        built = partial(self._built, worker, command, worker.build)
        self._clock.after(BUILD_S + seconds, partial(worker.when_running, built))

    def times_of(self, job: JobId, stage: StageSpec) -> StageTimes:
        """Costs of a stage of a job."""
        if (job, stage) not in self._times:
            spec = self._spec_of(job)
            self._times[job, stage] = stage_times(spec, spec.layers, stage)
        return self._times[job, stage]

    def _times_at(self, worker: SimWorker, job: JobId, chunk: ChunkAssignment) -> StageTimes:
        """Costs of a stage at a worker by the speed that it tells."""
        times, mesh = self.times_of(job, chunk.stage), worker.mesh
        if mesh is None:
            return times
        memory_bytes = worker.machine.identity.profile.memory_bytes
        return mesh.times(times, self._spec_of(job), chunk, memory_bytes=memory_bytes)

    def _fetch_s(self, worker: SimWorker, job: JobId, chunk: ChunkAssignment) -> float:
        source = chunk.source
        if source.neighbours:
            return sum(self._travels_s(worker, job, x.peer, x.stage, 1) for x in source.neighbours)
        if source.peer is None:
            return 0.0
        lag = self.copies.lag(worker, job, chunk.stage, source.version)
        return self._travels_s(worker, job, source.peer, chunk.stage, 3 if lag is None else lag)

    def _travels_s(
        self, worker: SimWorker, job: JobId, donor: WorkerId, stage: StageSpec, num_copies: int
    ) -> float:
        """Seconds in which so many vectors as long as a stage's parameters come from a donor."""
        here = worker.machine.identity.worker
        if donor == here or donor not in self._workers:
            return 0.0
        link = self._network.link(donor, here)
        return link.latency_s + num_copies * self.times_of(job, stage).parameter_bytes / link.bytes_per_s

    def _built(self, worker: SimWorker, command: Build, build: int) -> None:
        if build != worker.build:
            return
        assign = command.assign
        search = StateSearch[str](assign, worker.machine.identity.worker, command.donors)
        try:
            given = self._given(worker, command, search)
            times = {chunk.stage.index: self._times_at(worker, assign.job, chunk) for chunk in assign.chunks}
            worker.executor.build(assign, given, times, self._invariants.visits[assign.generation])
        except (SkeinError, OSError) as error:
            failed = search.failed(error, str(error))
            wait_s = SILENT_S if isinstance(error, OSError) and self._store.hangs else 0.0
            self._clock.after(
                wait_s, partial(worker.when_running, partial(self._tell, worker, build, failed))
            )
            return
        except Violated as error:
            self._crash(worker, error)
            return
        self._invariants.holds(worker.machine, assign.generation, assign.version, given)
        self._invariants.built(worker.machine, assign.generation)
        built = Built(
            generation=assign.generation,
            num_train_samples=self._num_rows(assign.job) if search.is_origin else 0,
            num_validation_samples=10**4 if search.is_origin else 0,
            data_fingerprint=self._read[worker.machine.identity.incarnation] if search.is_origin else "",
        )
        self._give(worker, built)

    def _num_rows(self, job: JobId) -> int:
        return NUM_ROWS if self._spec_of(job).data.coreset.follows_model else 10**6

    def _tell(self, worker: SimWorker, build: int, failed: BuildFailed) -> None:
        if build == worker.build:
            self._give(worker, failed)

    def _given(self, worker: SimWorker, command: Build, search: StateSearch[str]) -> dict[StageIndex, str]:
        """Lineages of what a build has found, by stage.

        Raises:
            SkeinError | OSError: something is not there.
        """
        assign, now = command.assign, self._invariants.lineage_now
        for need in search.needs():
            if need is StatePlace.DATA:
                read = self.data.opened(worker, assign.job, assign.data_fingerprint)
                self._invariants.reads(worker.machine, assign.generation, read)
                self._read[worker.machine.identity.incarnation] = read
            if need is StatePlace.CHECKPOINT:
                reason = self._store.trouble(self._checkpoint_of(assign.job, assign.version))
                if reason:
                    raise OSError(reason)
        given: dict[StageIndex, str] = {}
        for chunk in assign.chunks:
            for look in search.looks(chunk):
                look.found = self._found(worker, assign, chunk, look)
            # The lineage of an average is that of what it is made of, for the model has another since.
            found = {
                now(assign.job, part.stage, part.found) for part in search.parts if part.found is not None
            }
            given[chunk.stage.index] = now(assign.job, chunk.stage, " and ".join(sorted(found)))
        return given

    def _found(
        self, worker: SimWorker, assign: Assign, chunk: ChunkAssignment, look: StateLook[str]
    ) -> str | None:
        stage, version = look.stage, look.version
        match look.place:
            case StatePlace.INITIAL:
                self._begin_rows(worker, assign.job)
                return initial_of(assign.job)
            case StatePlace.CHECKPOINT:
                saved = self._saved(worker, assign.job, chunk, version)
                # Whoever said what the files are may have lied; who reads them sees that tensors are missing.
                if self._invariants.has_liars and not self._invariants.is_of(assign.job, version, saved):
                    raise LocalError(f"no file has all of stage {stage.index}")
                return saved
            case StatePlace.CHUNK:
                return worker.executor.state_of(stage, version)
            case StatePlace.COPY:
                return self.copies.kept(worker, stage, version)
            case StatePlace.FOLLOWED:
                return self.copies.caught_up(worker, assign.job, stage, version)
            case _:
                donor = self._workers.get(look.peers[0].worker)
                is_let_in = donor is not None and donor.machine.gate.may_fetch(look.peers[0].door)
                given = self.copies.fixed(donor, stage, version) if donor is not None and is_let_in else None
                if given is None:
                    raise RemoteError("the donor does not hold it")
                return given

    def _begin_rows(self, worker: SimWorker, job: JobId) -> None:
        """Have the rows of an array go on from what checkpoints of others have."""
        spec = self._spec_of(job)
        if isinstance(spec, ArrayJob):
            found = [None if row.origin is None else self._origin(row.origin) for row in spec.rows]
            worker.executor.begins_rows(job, spec, found)

    def _origin(self, origin: RowOrigin) -> str:
        """Lineage of an array at the version that a row of another goes on from."""
        job, version = JobId(origin.job), Step(origin.version)
        saved = self._checkpoint_of(job, version)
        if reason := self._store.trouble(saved):
            told = ("from", f"{job}@{version} row {origin.row}", reason)
            raise UnfitError(*told)
        ((_, _, lineage),) = (self._store.files[file.name] for part in saved.stages for file in part.files)
        if not self._invariants.is_of(job, version, lineage):
            raise Violated(f"{job} at {version} is {lineage}")
        return lineage

    # --- the disk ---

    def save(self, worker: SimWorker, op: SaveOp) -> None:
        """Write a stage; it is durable a little later, if the process lives that long."""
        chunk = worker.executor.held(op.stage)
        self._invariants.holds(worker.machine, op.generation, op.version, {op.stage: chunk.lineage})
        name = f"g{op.generation}-v{op.version}-s{op.stage}-w{op.walker}"
        worker.executor.writes(op.stage, name)
        tensors = (f"{walker_prefix(op.walker)}layers",)
        file = CheckpointFile(name=name, num_bytes=1, sha256="", tensors=tensors)
        saved = CheckpointWritten(
            generation=op.generation,
            version=op.version,
            stage=op.stage,
            walker=op.walker,
            files=(file,),
        )

        durable = partial(self._durable, worker, saved, (chunk.stage, chunk.lineage))
        self._clock.after(SAVE_S, partial(worker.when_running, durable))

    def _durable(self, worker: SimWorker, saved: CheckpointWritten, written: tuple[StageSpec, str]) -> None:
        reason = self._store.refusal()
        if not reason:
            self._store.files[saved.files[0].name] = (saved.files[0], *written)
            self._give(worker, saved)
            return
        failed = CheckpointUnwritten(
            generation=saved.generation,
            version=saved.version,
            stage=saved.stage,
            reason=reason,
            walker=saved.walker,
        )
        after_s = SILENT_S if self._store.hangs else 0.0
        self._clock.after(after_s, partial(worker.when_running, partial(self._give, worker, failed)))

    def _saved(self, worker: SimWorker, job: JobId, chunk: ChunkAssignment, version: Step) -> str:
        """Lineage of the files that hold a stage's layers, whatever the cut was when they were written.

        A walker that the checkpoint does not have begins as a copy of one that it has.
        """
        stage, saved = chunk.stage, self._checkpoint_of(job, version).stages
        walker = chunk.walker % num_walkers(saved)
        files = [file for part in saved for file in part.files]
        mine = [file.name for file in files if {walker_of(name) for name in file.tensors} == {walker}]
        found = {name: self._store.files[name] for name in mine if name in self._store.files}
        here = {
            n: x for n, (_, held, x) in found.items() if held.first < stage.stop and stage.first < held.stop
        }
        worker.executor.reads(stage.index, tuple(here), num_walkers=num_walkers(saved))
        return " and ".join(sorted(set(here.values())))
