"""Makes the chunks of an assignment present: kept, drawn, read, fetched or averaged, then put in place all at once.

Rules of this file
- What is held changes in `hold` alone, at the end. A build that fails or is cancelled before has changed nothing.
- Tensors are made and filled on the torch thread, but for weights that a job begins from; files are read on others,
  peers are asked on the event loop.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar, assert_never

import torch
from torch import Tensor

from skein.config.job import JobSpec, read_spec
from skein.config.rule import Walkers
from skein.errors import LocalError, RemoteError, SkeinError, UnfitError, UserError
from skein.plan.load import stage_loads
from skein.plan.ops import Direction
from skein.protocol.log.records import num_walkers
from skein.protocol.messages.directives import (
    Assign,
    Beginning,
    CheckpointFile,
    ChunkAssignment,
    Member,
    Neighbour,
    SourceKind,
)
from skein.protocol.worker.worker_io import BuildFailed, Built
from skein.storage.outside import Outside, SilentError, call_moved, require_room
from skein.storage.places import ANYWHERE, Places
from skein.types import JobId, StageIndex, StageSpec, Step, WorkerId
from skein.units import format_bytes
from skein.wire.extra import ManifestReply
from worker.bundle import WireTensor, to_torch
from worker.chunks.checkpoint import Archive, UrlArchive, check_url, read_state
from worker.chunks.copies import ChunkCopies
from worker.compute.averages import Side, averaged_state, names_wanted
from worker.compute.batches import BatchReader
from worker.compute.chunk import Chunk
from worker.compute.ops import Holding
from worker.compute.state import saved_names, state_names
from worker.data.opening import Datasets
from worker.executor import Executor, one_line
from worker.model.weights import load_huggingface, load_parameters

T = TypeVar("T")

_MOVED_S = 1.0
"""Seconds between two signs of life while a file is on its way."""


class Donors(Protocol):
    """Peers that give state; `worker.transport.peers.Peers` is one."""

    async def fetch_state(
        self,
        member: Member,
        job: JobId,
        stage: StageIndex,
        version: Step,
        names: frozenset[str] | None = None,
    ) -> Mapping[str, WireTensor]: ...


class Files(Protocol):
    """The coordinator's checkpoint files; `worker.transport.coordinator.CheckpointFiles` is one."""

    async def manifest(self, job: JobId, version: Step) -> ManifestReply: ...

    async def get(self, job: JobId, version: Step, file: CheckpointFile, path: Path) -> None: ...

    async def put(self, job: JobId, version: Step, name: str, path: Path) -> None: ...


class CoordinatorArchive:
    """Files of one checkpoint at the coordinator, for threads other than that of `loop`."""

    def __init__(self, files: Files, job: JobId, version: Step, loop: asyncio.AbstractEventLoop) -> None:
        self._files = files
        self._job = job
        self._version = version
        self._loop = loop

    def put(self, path: Path, name: str) -> None:
        self._wait(self._files.put(self._job, self._version, name, path))

    def get(self, file: CheckpointFile, folder: Path) -> Path:
        path = folder / file.name
        require_room(folder, file.num_bytes)
        self._wait(self._files.get(self._job, self._version, file, path))
        return path

    def _wait(self, work: Coroutine[None, None, None]) -> None:
        """Until it has ended; it bears no silence itself."""
        going = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            with suppress(FutureTimeoutError):
                going.result(_MOVED_S)
                return
            if going.done():
                return going.result()
            call_moved()


def archive_of(url: str | None, files: Files, job: JobId, version: Step, places: Places) -> Archive:
    """Archive with the files of a checkpoint: under `url`, or without one at the coordinator."""
    if url is not None:
        return UrlArchive(url, job, version, places=places)
    return CoordinatorArchive(files, job, version, asyncio.get_running_loop())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """State that chunks need of a walker in a checkpoint; `place`: how many walkers there are, and which is wanted."""

    tensors: Mapping[str, Tensor]
    version: Step
    place: tuple[int, int] | None

    def load_into(self, chunk: Chunk) -> None:
        """Make it the chunk's."""
        if self.place is None:
            chunk.load_state(self.tensors, version=self.version)
            return
        available, walker = self.place
        chunk.load_walker(self.tensors, version=self.version, walker=walker, num_walkers=available)


class _UnreadError(Exception):
    """The checkpoint of `version` could not be read; 0: where checkpoints are to lie nothing answers."""

    def __init__(self, version: Step, reason: str) -> None:
        super().__init__(reason)
        self.version = version


class _DonorFailedError(Exception):
    def __init__(self, peer: WorkerId, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


class Builder:
    """Builds assignments, one at a time.

    Args:
        memory_bytes: what chunks and their activations may take together.
        places: what a job may name.
        outside: asks file systems, which may never answer.
        datasets: opens data, for whoever may ask for them before.
    """

    def __init__(
        self,
        worker: WorkerId,
        *,
        executor: Executor,
        donors: Donors,
        copies: ChunkCopies,
        files: Files,
        device: torch.device,
        memory_bytes: int,
        places: Places = ANYWHERE,
        outside: Outside | None = None,
        datasets: Datasets | None = None,
    ) -> None:
        self._outside = Outside() if outside is None else outside
        self._datasets = Datasets(self._outside, roots=places.data) if datasets is None else datasets
        self._worker = worker
        self._executor = executor
        self._donors = donors
        self._copies = copies
        self._files = files
        self._device = device
        self._memory_bytes = memory_bytes
        self.places = places
        self._checked_url: str | None = None
        self.is_installing = False
        """Whether the build has come to where it succeeds, and is no longer to be cancelled."""

    def forget(self) -> None:
        """The job is over: close its data."""
        self._datasets.forget()

    async def build(self, assign: Assign, members: tuple[Member, ...]) -> Built | BuildFailed:
        """Make the assignment's chunks what is held."""
        failed = partial(BuildFailed, generation=assign.generation)
        try:
            holding = await self._prepare(assign, members)
        except UnfitError as error:
            return failed(peer=None, is_fatal=False, reason=one_line(error), is_unfit=True)
        except UserError as error:
            return failed(peer=None, is_fatal=True, reason=one_line(error))
        except _UnreadError as error:
            return failed(peer=None, is_fatal=False, reason=str(error), unread=error.version)
        except _DonorFailedError as error:
            return failed(peer=error.peer, is_fatal=False, reason=str(error))
        except (LocalError, RemoteError, OSError, MemoryError, RuntimeError) as error:
            return failed(peer=None, is_fatal=False, reason=one_line(error))
        self.is_installing = True
        try:
            await self._on_torch(partial(self._executor.compute.hold, holding))
        finally:
            self.is_installing = False
        dataset = None if holding.batches is None else holding.batches.dataset
        return Built(
            generation=assign.generation,
            num_train_samples=0 if dataset is None else dataset.num_train_samples,
            num_validation_samples=0 if dataset is None else dataset.num_validation_samples,
            data_fingerprint="" if dataset is None else dataset.fingerprint,
        )

    async def _prepare(self, assign: Assign, members: tuple[Member, ...]) -> Holding:
        job = read_spec(assign.job_spec)
        self._admit(job, assign.chunks)
        if assign.version == 0:
            await self._check_archive(job)
        is_origin = bool(assign.origins or assign.evaluation_origins)
        dataset = await self._datasets.open(job) if is_origin else None
        saved = await self._saved(assign, job)
        chunks = {
            wanted.stage.index: await self._chunk(assign, wanted, job, members, saved)
            for wanted in assign.chunks
        }
        num_walkers = max(1, assign.num_evaluation_paths)
        # Stage 0 is the first hop of every path, so this is the order in which batches are wanted.
        begin = [x for x in assign.schedule.ops if x.stage == 0 and x.kind.row.takes is Direction.FORWARD]
        microbatches = [op.microbatch for op in begin]
        return Holding(
            job_id=assign.job,
            job=job,
            worker=self._worker,
            chunks=chunks,
            groups=assign.groups,
            batches=None
            if dataset is None
            else BatchReader(dataset, job, microbatches, num_walkers=num_walkers),
            resumption=assign.resumption,
        )

    def _admit(self, job: JobSpec, wanted: tuple[ChunkAssignment, ...]) -> None:
        loads = stage_loads(job, [chunk.stage for chunk in wanted])
        needed = sum(load.memory_bytes(chunk.slots) for load, chunk in zip(loads, wanted, strict=True))
        if needed > self._memory_bytes:
            hint = f"the chunks of {self._worker} need {format_bytes(needed)}: raise the limit, or parallel.stages"
            raise UserError("worker memory", format_bytes(self._memory_bytes), hint)

    async def _check_archive(self, job: JobSpec) -> None:
        """Better now than when there is something to lose."""
        url = job.checkpoint.url
        if url is not None and url != self._checked_url:
            try:
                await self._outside.answer(
                    partial(check_url, url, places=self.places), f"checkpoint.url {url}"
                )
            except (SilentError, OSError) as error:
                raise _UnreadError(Step(0), f"checkpoint.url: {one_line(error)}") from error
            self._checked_url = url

    # --- one chunk ---

    async def _chunk(
        self,
        assign: Assign,
        wanted: ChunkAssignment,
        job: JobSpec,
        members: tuple[Member, ...],
        saved: Mapping[int, _Saved],
    ) -> Chunk:
        stage, source = wanted.stage, wanted.source
        if source.kind is SourceKind.KEEP:
            held = await self._on_torch(
                partial(self._executor.compute.chunk_of, assign.job, stage, source.version)
            )
            if held is not None:
                return held
        chunk = await self._on_torch(
            partial(Chunk.drawn, job, stage, version=source.version, device=self._device)
        )
        match source.kind:
            case SourceKind.INITIAL:
                if assign.begins is not None:
                    await self._begin_from(assign.begins, chunk)
                elif job.model.begins_from is not None:
                    begin = partial(load_huggingface, Path(job.model.begins_from), roots=self.places.data)
                    await self._begun_from(job.model.begins_from, partial(begin, chunk.module))
                    await self._on_torch(chunk.begin_with_parameters)
            case SourceKind.CHECKPOINT:
                await self._on_torch(partial(saved[wanted.walker].load_into, chunk))
            case SourceKind.KEEP:
                own = self._own(assign.job, wanted, state_names(job, stage))
                await self._on_torch(partial(chunk.load_state, own, version=source.version))
            case SourceKind.PEER:
                state = await self._given(assign.job, wanted, members, state_names(job, stage))
                await self._on_torch(partial(chunk.load_state, state, version=source.version))
                await self._on_torch(chunk.begin_as_newcomer)
            case SourceKind.NEIGHBOURS:
                state = await self._averaged(assign.job, job, wanted, members)
                await self._on_torch(partial(chunk.load_state, state, version=source.version))
            case _:
                assert_never(source.kind)
        return chunk

    async def _begun_from(self, directory: str, load: Callable[[], None]) -> None:
        """Fill a chunk that nobody else has yet, from files that may never be read."""
        try:
            await self._outside.answer(load, "its file system")
        except SilentError as error:
            raise UnfitError("model.init_from", directory, str(error)) from error

    def _own(self, job: JobId, wanted: ChunkAssignment, names: frozenset[str]) -> Mapping[str, Tensor]:
        """A snapshot or a backup that this worker keeps."""
        version = wanted.source.version
        state = self._copies.kept(job, wanted.stage.index, version)
        if state is None or not state.keys() >= names:
            raise LocalError(f"{wanted.stage} at version {version} is not here to be kept")
        return state

    async def _given(
        self, job: JobId, wanted: ChunkAssignment, members: tuple[Member, ...], names: frozenset[str]
    ) -> Mapping[str, Tensor]:
        """The chunk's state: a copy of it that was fetched before and lacks little, else a peer's."""
        source = wanted.source
        if source.peer == self._worker:
            return self._own(job, wanted, names)
        # The donor first: it is known to have come as far as the version that is wanted.
        nearest = sorted(members, key=lambda member: member.worker != source.peer)
        others = [member for member in nearest if member.worker != self._worker]
        if not source.was_averaged:
            followed = await self._copies.caught_up(job, wanted.stage, source.version, others)
            if followed is not None:
                return followed
        return await self._fetched(job, wanted.stage, source.version, source.peer, members, names)

    async def _fetched(
        self,
        job: JobId,
        stage: StageSpec,
        version: Step,
        peer: WorkerId | None,
        members: tuple[Member, ...],
        names: frozenset[str],
    ) -> Mapping[str, Tensor]:
        donor = next((member for member in members if member.worker == peer), None)
        if donor is None:
            raise LocalError(f"{peer}, which should give stage {stage.index}, is not a member")
        try:
            state = await self._donors.fetch_state(donor, job, stage.index, version, names)
        except RemoteError as error:
            raise _DonorFailedError(donor.worker, one_line(error)) from error
        return {name: to_torch(tensor) for name, tensor in state.items()}

    async def _averaged(
        self, job_id: JobId, job: JobSpec, wanted: ChunkAssignment, members: tuple[Member, ...]
    ) -> Mapping[str, Tensor]:
        """The chunk's state, made of parameters of the stages beside it."""
        sides = []
        for neighbour in wanted.source.neighbours:
            names = names_wanted(job, wanted.stage, neighbour.stage)
            tensors = await self._beside(job_id, neighbour, wanted.source.version, members, names)
            sides.append(Side(stage=neighbour.stage, weight=neighbour.weight, tensors=tensors))
        return await self._on_torch(partial(averaged_state, job, wanted.stage, sides))

    async def _beside(
        self,
        job: JobId,
        neighbour: Neighbour,
        version: Step,
        members: tuple[Member, ...],
        names: frozenset[str],
    ) -> Mapping[str, Tensor]:
        """Parameters of a neighbouring stage, which may be held here too."""
        if neighbour.peer != self._worker:
            return await self._fetched(job, neighbour.stage, version, neighbour.peer, members, names)
        held = await self._on_torch(
            partial(self._executor.compute.copy_state, job, neighbour.stage.index, version, names)
        )
        if held is None:
            raise LocalError(f"{neighbour.stage} at version {version} is not here to make another of it")
        return held

    async def _saved(self, assign: Assign, job: JobSpec) -> dict[int, _Saved]:
        """State that all chunks from the checkpoint need of it, by walker; of each walker, every file is read once."""
        wanted = [chunk for chunk in assign.chunks if chunk.source.kind is SourceKind.CHECKPOINT]
        if not wanted:
            return {}
        manifest = await self._files.manifest(assign.job, wanted[0].source.version)
        archive = archive_of(manifest.url, self._files, assign.job, manifest.version, self.places)
        found = {}
        for walker in sorted({chunk.walker for chunk in wanted}):
            stages = [chunk.stage for chunk in wanted if chunk.walker == walker]
            try:
                found[walker] = await self._outside.answer(
                    partial(_read_walker, job, stages, walker, manifest, archive),
                    f"checkpoint {manifest.version} at {manifest.url or 'the coordinator'}",
                )
            except (SkeinError, OSError) as error:
                # Whether that is its fault or this worker's is for the coordinator to find out.
                raise _UnreadError(manifest.version, one_line(error)) from error
        return found

    async def _begin_from(self, begins: Beginning, chunk: Chunk) -> None:
        """Take over the parameters of another job's main walker; all else of the chunk begins anew."""
        names = frozenset(name for name, _ in chunk.module.named_parameters())
        which = f"{begins.job}@{begins.version}"
        try:
            manifest = await self._files.manifest(begins.job, begins.version)
            archive = archive_of(manifest.url, self._files, begins.job, manifest.version, self.places)
            tensors = await self._outside.answer(
                partial(read_state, manifest.stages, names, archive),
                f"the checkpoint at {manifest.url or 'the coordinator'}",
            )
        except (SkeinError, OSError) as error:
            raise UnfitError("from", which, f"cannot be read on this worker: {one_line(error)}") from error
        await self._on_torch(partial(load_parameters, tensors, chunk.module))
        await self._on_torch(chunk.begin_with_parameters)

    async def _on_torch(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._executor.call(function))


def _read_walker(
    job: JobSpec, stages: Sequence[StageSpec], walker: int, manifest: ManifestReply, archive: Archive
) -> _Saved:
    """A walker's state of `stages`, or that of another which a walker the checkpoint lacks begins as a copy of."""
    available = num_walkers(manifest.stages)
    own = job.aggregation.walkers if walker < available else Walkers.ONE
    tensors = read_state(
        manifest.stages,
        saved_names(job, stages),
        archive,
        if_there=saved_names(job, stages, own),
        walker=walker % available,
    )
    place = (available, walker) if job.aggregation.walkers.are_lines else None
    return _Saved(tensors=tensors, version=manifest.version, place=place)
