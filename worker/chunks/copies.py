"""Copies of stages on this worker: those it takes of its own chunks, those it fetches, and what peers get of them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import assert_never

from torch import Tensor

from skein.config.job import read_spec
from skein.errors import LocalError, SkeinError, UnfitError
from skein.protocol.messages.directives import ChunkVersion, Member, OpenData, Prefetch
from skein.protocol.worker.keeping.shelf import CopyShelf, failure_of
from skein.protocol.worker.worker_io import (
    DropCopies,
    FollowCommit,
    OpeningEnded,
    SnapshotsHeld,
    StartOpening,
    StartPrefetch,
    WorkerEvent,
)
from skein.types import Generation, JobId, StageIndex, StageSpec, Step
from skein.units import format_bytes
from skein.wire.extra import FetchStateRequest, StateKind
from worker.bundle import WireTensor, to_torch, to_wire
from worker.chunks.fetched import FetchedCopy, Givers
from worker.data.opening import Datasets
from worker.executor import Executor, one_line

CopyCommand = StartPrefetch | StartOpening | FollowCommit | DropCopies


class ChunkCopies:
    """The copies of one worker. Those that are fetched come from `start` on, and in its group.

    Args:
        post: where what has happened is told.
        memory_bytes: what fetched copies may take together.
        patience_s: how long peers that have not got there yet are waited for; raise it if steps take longer.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        post: Callable[[WorkerEvent], None],
        memory_bytes: int,
        patience_s: float = 60.0,
    ) -> None:
        self._datasets = Datasets()
        self._executor = executor
        self._snapshots = executor.compute.snapshots
        self._post = post
        self._memory_bytes = memory_bytes
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        self._from: tuple[asyncio.TaskGroup, Givers] | None = None
        self._job: JobId | None = None
        self._num_forgotten = 0
        """Jobs that are over: what torch's thread still says of their snapshots is true no more."""
        self._shelf = CopyShelf(self._new_copy)

    def start(self, group: asyncio.TaskGroup, givers: Givers, datasets: Datasets | None = None) -> None:
        """Have copies fetched from `givers` from here on, in `group`; `datasets` opens data that will be wanted."""
        self._from = (group, givers)
        if datasets is not None:
            self._datasets = datasets

    def close(self) -> None:
        """End what is still going on."""
        for copy in self._shelf:
            copy.halt()

    def forget(self) -> None:
        """The job is over: drop everything."""
        self.close()
        self._job = None
        self._num_forgotten += 1
        self._shelf.clear()
        self._executor.tell(self._snapshots.clear)

    # --- snapshots of chunks that are held here ---

    def snapshot_begun(self, job: JobId) -> None:
        """A SnapshotOp has ended: complete what it began, between other ops, and tell what is here."""
        self._job = job
        self._complete()

    def adopt(self, generation: Generation) -> None:
        """A new generation has begun."""
        self._executor.tell(partial(self._snapshots.adopt, generation))
        self._complete()

    def _complete(self) -> None:
        self._executor.tell(partial(self._complete_snapshots, self._num_forgotten))

    def _complete_snapshots(self, num_forgotten: int) -> None:
        """On the torch thread: one piece, and the next behind what else is waiting there."""
        if self._snapshots.copy_some():
            self._executor.tell(partial(self._complete_snapshots, num_forgotten))
        else:
            self._loop.call_soon_threadsafe(self._tell_snapshots, num_forgotten, self._snapshots.held())

    def _tell_snapshots(self, num_forgotten: int, held: tuple[ChunkVersion, ...]) -> None:
        if self._job is not None and num_forgotten == self._num_forgotten:
            self._post(SnapshotsHeld(job=self._job, copies=held))

    # --- what peers get ---

    async def give(self, request: FetchStateRequest) -> Mapping[str, WireTensor] | None:
        """Tensors that a peer asks for, from a snapshot, a backup or a chunk; None if they are not here."""
        job, stage, version = request.job, request.stage, request.version
        if request.kind is StateKind.RESULT:
            return self._snapshots.result_of(job, stage, version)
        kept = self._kept(job, stage, version)
        if kept is not None:
            return kept
        names = frozenset(request.names) or None
        copying = self._executor.call(partial(self._executor.compute.copy_state, job, stage, version, names))
        state = await asyncio.wrap_future(copying)
        return None if state is None else {name: to_wire(name, tensor) for name, tensor in state.items()}

    def _kept(self, job: JobId, stage: StageIndex, version: Step) -> Mapping[str, WireTensor] | None:
        """A copy that stays as it is; after another cut, of all stages of that index."""
        found = dict(self._snapshots.state_of(job, stage, version) or {})
        for copy in self._shelf.backups(job, stage, version):
            found |= copy.tensors
        return found or None

    # --- what chunks are built from ---

    def kept(self, job: JobId, stage: StageIndex, version: Step) -> Mapping[str, Tensor] | None:
        """Copy of a stage at a version that this worker has itself; None if it has none."""
        found = self._kept(job, stage, version)
        return None if found is None else {name: to_torch(tensor) for name, tensor in found.items()}

    async def caught_up(
        self, job: JobId, stage: StageSpec, version: Step, members: Sequence[Member]
    ) -> Mapping[str, Tensor] | None:
        """The copy that follows `stage`, brought to `version` by results of `members`; None: it cannot get there."""
        copy = self._shelf.followed(job, stage)
        return None if copy is None else await copy.caught_up(version, members)

    # --- commands ---

    def carry_out(self, command: CopyCommand) -> None:
        """Begin what the machine asks for."""
        match command:
            case StartPrefetch():
                self._start(command.prefetch)
            case StartOpening():
                assert self._from is not None
                self._from[0].create_task(self._open(command.opens))
            case FollowCommit():
                followed = self._shelf.followed(command.job, command.stage)
                if followed is not None:
                    followed.follow(command.record)
            case DropCopies():
                self._drop(command)
            case _:
                assert_never(command)

    async def _open(self, opens: OpenData) -> None:
        """Have the job's data open before somebody waits for them."""
        error, is_unfit = "", False
        try:
            job, trained_on = read_spec(opens.job_spec), opens.data_fingerprint
            await self._datasets.open(job, trained_on=trained_on, is_awaited=False)
        except asyncio.CancelledError:
            return  # the job is over
        except (SkeinError, MemoryError) as failed:
            error, is_unfit = one_line(failed), isinstance(failed, UnfitError)
        self._post(OpeningEnded(job=opens.job, error=error, is_unfit=is_unfit))

    def _start(self, prefetch: Prefetch) -> None:
        self._job = prefetch.job
        try:
            self._shelf.asked(prefetch).go_on(prefetch)
        except LocalError as error:
            self._post(failure_of(prefetch, str(error)))

    def _new_copy(self, prefetch: Prefetch) -> FetchedCopy:
        assert self._from is not None
        group, givers = self._from
        copy = FetchedCopy(prefetch, group=group, givers=givers, post=self._post, patience_s=self._patience_s)
        if copy.num_bytes > self._free_bytes:
            self._shelf.make_room()
        if copy.num_bytes > self._free_bytes:
            free = format_bytes(self._free_bytes)
            raise LocalError(f"the copy takes {format_bytes(copy.num_bytes)}, and {free} are left for it")
        return copy

    @property
    def _free_bytes(self) -> int:
        return self._memory_bytes - sum(copy.num_bytes for copy in self._shelf)

    def _drop(self, command: DropCopies) -> None:
        for copy in self._shelf.drop(command):
            copy.halt()
        above = command.above
        if above is not None:
            self._executor.tell(partial(self._snapshots.drop_above, above))
            self._complete()
