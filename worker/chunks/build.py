"""Makes the chunks of an assignment present: kept, drawn, read, fetched or averaged, then put in place all at once.

Rules of this file
- What is held changes in `hold` alone, at the end. A build that fails or is cancelled before has changed nothing.
- Tensors are made and filled on the torch thread, but for weights that a job begins from; files are read on others,
  peers are asked on the event loop.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from skein.config.job import JobSpec, read_spec
from skein.config.rule import Walkers
from skein.config.sweep.rows import RowOrigin
from skein.errors import SkeinError, UnfitError, UserError
from skein.model.rows import made_of
from skein.plan.load import stage_loads, together_bytes
from skein.plan.ops import Direction
from skein.protocol.log.records import num_walkers, walker_prefix
from skein.protocol.messages.directives import (
    Assign,
    Beginning,
    CheckpointFile,
    ChunkAssignment,
    Member,
    SourceKind,
)
from skein.protocol.worker.keeping.search import StateLook, StatePlace, StateSearch
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
from worker.compute.holding import Holding
from worker.compute.state import STEP, saved_names, state_names
from worker.data.dataset import Dataset
from worker.data.opening import Datasets
from worker.executor import Executor, one_line
from worker.mesh.mesh import Mesh
from worker.model.weights import load_huggingface, load_parameters
from worker.sweep.choosing import PassChoices
from worker.sweep.chunk import ArrayChunk
from worker.sweep.drawing import drawn_chunk

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
    """State that chunks need of a walker in a checkpoint, whose number of walkers it has only where each is its own."""

    tensors: Mapping[str, Tensor]
    version: Step
    walker: int
    num_walkers: int | None

    def load_into(self, chunk: Chunk) -> None:
        """Make it the chunk's."""
        if self.num_walkers is None:
            chunk.load_state(self.tensors, version=self.version)
        else:
            chunk.load_walker(
                self.tensors, version=self.version, walker=self.walker, num_walkers=self.num_walkers
            )


_Found = Chunk | _Saved | Mapping[str, Tensor]
_Search = StateSearch[_Found]


class Builder:
    """Builds assignments, one at a time.

    Args:
        memory_bytes: what chunks and their activations may take together.
        places: what a job may name.
        outside: asks file systems, which may never answer.
        datasets: opens data, for whoever may ask for them before.
        mesh: the devices that compute what chunks do, if there are several.
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
        mesh: Mesh | None = None,
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
        self._mesh = mesh
        self.places = places
        self._checked_url: str | None = None
        self._choices = PassChoices(memory_bytes)
        self.is_installing = False
        """Whether the build has come to where it succeeds, and is no longer to be cancelled."""

    def forget(self) -> None:
        """The job is over: close its data."""
        self._datasets.forget()

    async def build(self, assign: Assign, donors: tuple[Member, ...]) -> Built | BuildFailed:
        """Make the assignment's chunks what is held."""
        search = _Search(assign, self._worker, donors)
        try:
            holding = await self._prepare(assign, search)
        except (SkeinError, OSError, MemoryError, RuntimeError) as error:
            return search.failed(error, one_line(error))
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

    async def _prepare(self, assign: Assign, search: _Search) -> Holding:
        job = read_spec(assign.job_spec)
        self._admit(job, assign.chunks)
        dataset: Dataset | None = None
        saved: Mapping[int, _Saved] = {}
        version = search.checkpoint
        manifest = None if version is None else await self._files.manifest(assign.job, version)
        for need in search.needs():
            match need:
                case StatePlace.ARCHIVE:
                    await self._check_archive(job)
                case StatePlace.DATA:
                    dataset = await self._datasets.open(job, trained_on=assign.data_fingerprint)
                case _:
                    assert manifest is not None
                    saved = await self._saved(assign, job, manifest)
        chunks: dict[StageIndex, Chunk] = {}
        for wanted in assign.chunks:
            chunks[wanted.stage.index] = await self._chunk(assign, wanted, job, search, saved, chunks)
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
            else BatchReader(dataset, job, microbatches, num_walkers=num_walkers, choices=assign.choices),
            resumption=assign.resumption,
        )

    def _admit(self, job: JobSpec, wanted: tuple[ChunkAssignment, ...]) -> None:
        loads = stage_loads(job, [chunk.stage for chunk in wanted])
        needed = together_bytes(loads, [chunk.slots for chunk in wanted])
        if needed > self._memory_bytes:
            hint = f"the chunks of {self._worker} need {format_bytes(needed)}: raise the limit, or parallel.stages"
            raise UserError("worker memory", format_bytes(self._memory_bytes), hint)

    async def _check_archive(self, job: JobSpec) -> None:
        """Better now than when there is something to lose."""
        url = job.checkpoint.url
        if url is not None and url != self._checked_url:
            await self._outside.answer(partial(check_url, url, places=self.places), f"checkpoint.url {url}")
            self._checked_url = url

    # --- one chunk ---

    async def _chunk(
        self,
        assign: Assign,
        wanted: ChunkAssignment,
        job: JobSpec,
        search: _Search,
        saved: Mapping[int, _Saved],
        built: Mapping[StageIndex, Chunk],
    ) -> Chunk:
        source = wanted.source
        draw = partial(
            drawn_chunk,
            job,
            wanted.stage,
            version=source.version,
            device=self._device,
            mesh=self._mesh,
            slots=wanted.slots,
            choices=self._choices,
        )
        # Before anything is found: what a copy that follows gives is good only till its next step.
        drawn = None if source.kind is SourceKind.KEEP else await self._on_torch(draw)
        for look in search.looks(wanted):
            match look.place:
                case StatePlace.INITIAL:
                    look.found = {}
                case StatePlace.CHECKPOINT:
                    look.found = saved[wanted.walker]
                case _:
                    look.found = await self._found(assign.job, job, wanted, look, built)
        first = search.parts[0].found
        if isinstance(first, Chunk):
            return first
        chunk = await self._on_torch(draw) if drawn is None else drawn
        if source.kind is SourceKind.INITIAL:
            await self._begin(assign, job, chunk)
        elif isinstance(first, _Saved):
            await self._on_torch(partial(first.load_into, chunk))
        else:
            await self._on_torch(partial(self._load, job, chunk, wanted, search))
        return chunk

    def _load(self, job: JobSpec, chunk: Chunk, wanted: ChunkAssignment, search: _Search) -> None:
        """On the torch thread: make what was found the chunk's state."""
        source, found = wanted.source, [(part, part.found) for part in search.parts]
        states = [(part, state) for part, state in found if isinstance(state, Mapping)]
        if source.kind is SourceKind.NEIGHBOURS:
            sides = [Side(stage=part.stage, weight=part.weight, tensors=state) for part, state in states]
            chunk.load_state(averaged_state(job, wanted.stage, sides), version=source.version)
        else:
            chunk.load_state(states[0][1], version=source.version)
        if source.kind is SourceKind.PEER:
            chunk.begin_as_newcomer()

    async def _found(
        self,
        job_id: JobId,
        job: JobSpec,
        wanted: ChunkAssignment,
        look: StateLook[_Found],
        built: Mapping[StageIndex, Chunk],
    ) -> _Found | None:
        """State that a place has: the chunk itself, or all tensors that are wanted of it."""
        stage, index, version = look.stage, look.stage.index, look.version
        is_beside = wanted.source.kind is SourceKind.NEIGHBOURS
        names = names_wanted(job, wanted.stage, stage) if is_beside else state_names(job, stage)
        compute = self._executor.compute
        match look.place:
            case StatePlace.CHUNK if is_beside:
                return await self._on_torch(partial(compute.copy_state, job_id, index, version, names))
            case StatePlace.CHUNK:
                return await self._on_torch(partial(compute.chunk_of, job_id, stage, version))
            case StatePlace.COPY:
                kept = self._copies.kept(job_id, index, version)
                return kept if kept is not None and kept.keys() >= names else None
            case StatePlace.FOLLOWED:
                return await self._copies.caught_up(job_id, stage, version, look.peers)
            case _:
                here = await self._on_torch(partial(_state_of, built.values(), names - {STEP}))
                away = names - here.keys()
                state = await self._donors.fetch_state(look.peers[0], job_id, index, version, away)
                return here | {name: to_torch(tensor) for name, tensor in state.items()}

    async def _begin(self, assign: Assign, job: JobSpec, chunk: Chunk) -> None:
        """Begin with the parameters that the job says, if it says any; rows of an array go on from others."""
        if assign.begins is not None:
            await self._begin_from(assign.begins, chunk)
        elif job.model.begins_from is not None:
            directory = job.model.begins_from
            begin = partial(load_huggingface, directory, roots=self.places.data)
            try:
                await self._outside.answer(partial(begin, chunk.module), "its file system")
            except SilentError as error:
                raise UnfitError("model.init_from", directory, str(error)) from error
            await self._on_torch(chunk.begin_with_parameters)
        if isinstance(chunk, ArrayChunk):
            for place, row in enumerate(chunk.job.rows):
                if row.origin is not None:
                    await self._go_on_from(row.origin, chunk, place)

    async def _go_on_from(self, origin: RowOrigin, chunk: ArrayChunk, place: int) -> None:
        """Have a row be what a row of another array's checkpoint is."""
        which = f"{origin.job}@{origin.version} row {origin.row}"
        try:
            manifest = await self._files.manifest(JobId(origin.job), Step(origin.version))
            archive = archive_of(manifest.url, self._files, JobId(origin.job), manifest.version, self.places)
            names = saved_names(chunk.job, [chunk.stage])
            tensors = await self._outside.answer(
                partial(read_state, manifest.stages, names, archive, walker=origin.row),
                f"the checkpoint at {manifest.url or 'the coordinator'}",
            )
        except (SkeinError, OSError) as error:
            raise UnfitError("from", which, f"cannot be read on this worker: {one_line(error)}") from error
        await self._on_torch(partial(chunk.load_row, place, tensors))

    async def _saved(self, assign: Assign, job: JobSpec, manifest: ManifestReply) -> dict[int, _Saved]:
        """State that all chunks from the checkpoint need of it, by walker; of each walker, every file is read once."""
        wanted = [chunk for chunk in assign.chunks if chunk.source.kind is SourceKind.CHECKPOINT]
        archive = archive_of(manifest.url, self._files, assign.job, manifest.version, self.places)
        found = {}
        if job.rows and wanted:
            tensors = await self._outside.answer(
                partial(_read_rows, job, wanted[0].stage, manifest, archive),
                f"checkpoint {manifest.version} at {manifest.url or 'the coordinator'}",
            )
            return {0: _Saved(tensors=tensors, version=manifest.version, walker=0, num_walkers=None)}
        for walker in sorted({chunk.walker for chunk in wanted}):
            stages = [chunk.stage for chunk in wanted if chunk.walker == walker]
            found[walker] = await self._outside.answer(
                partial(_read_walker, job, stages, walker, manifest, archive),
                f"checkpoint {manifest.version} at {manifest.url or 'the coordinator'}",
            )
        return found

    async def _begin_from(self, begins: Beginning, chunk: Chunk) -> None:
        """Take over the parameters of another job's main walker; all else of the chunk begins anew."""
        names = frozenset(name for name, _ in chunk.module.named_parameters())
        which = f"{begins.job}@{begins.version}"
        try:
            manifest = await self._files.manifest(begins.job, begins.version)
            archive = archive_of(manifest.url, self._files, begins.job, manifest.version, self.places)
            tensors = await self._outside.answer(
                partial(read_state, manifest.stages, _held_for(names, manifest), archive),
                f"the checkpoint at {manifest.url or 'the coordinator'}",
            )
        except (SkeinError, OSError) as error:
            raise UnfitError("from", which, f"cannot be read on this worker: {one_line(error)}") from error
        await self._on_torch(partial(load_parameters, tensors, chunk.module))
        await self._on_torch(chunk.begin_with_parameters)

    async def _on_torch(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._executor.call(function))


def _state_of(chunks: Iterable[Chunk], names: Collection[str]) -> dict[str, Tensor]:
    """Tensors called `names` that chunks have, as they are: what is tied need not travel twice."""
    return {name: x for chunk in chunks for name, x in chunk.state().items() if name in names}


def _held_for(names: Iterable[str], manifest: ManifestReply) -> frozenset[str]:
    """Names of the tensors of a checkpoint that those of a chunk are made of."""
    held = {name for stage in manifest.stages for file in stage.files for name in file.tensors}
    return frozenset(x for name in names for x in made_of(name, held) or (name,))


def _read_rows(
    job: JobSpec, stage: StageSpec, manifest: ManifestReply, archive: Archive
) -> dict[str, Tensor]:
    """State of all rows of an array, each row's tensors named after it."""
    rows = range(len(job.rows))
    names = [f"{walker_prefix(row)}{name}" for row in rows for name in saved_names(job, [stage])]
    return read_state(manifest.stages, names, archive)


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
    told = available if job.aggregation.walkers.are_lines else None
    return _Saved(tensors=tensors, version=manifest.version, walker=walker, num_walkers=told)
