"""Checkpoint files of jobs that name no URL: uploads from workers, downloads to workers and clients."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from threading import Lock, Thread
from weakref import WeakValueDictionary

from coordinator.checkpoints import CheckpointStore, Upload
from coordinator.driver import Driver
from coordinator.service.calls import NotFoundError
from coordinator.service.tenants import job_of
from skein.errors import RemoteError
from skein.protocol.coordinator.coordinator_io import DeleteAsked
from skein.protocol.coordinator.lifecycle import deletable
from skein.protocol.log.history import JobHistory
from skein.protocol.log.records import CheckpointCommitted
from skein.protocol.messages.directives import CheckpointFile
from skein.storage.outside import Outside, SilentError
from skein.types import Condition, JobId, Step, WorkerId
from skein.wire import codec
from skein.wire.channel import PART_BYTES
from skein.wire.context import Context
from skein.wire.extra import FileData, FileEnd, GetStart, ManifestReply, PutPart, PutReply, PutStart
from skein.wire.identity.names import LOCAL, CallerRole, caller_of
from skein.wire.mapping import check_request
from skein.wire.v1 import checkpoint_pb2, checkpoint_pb2_grpc
from skein.wire.views import CheckpointView

PART_S = 60.0
"""Silence after which an upload is given up."""
START_S = 10.0
"""Seconds within which an upload has to say what it is of; until then it takes no place."""
LEAST_BYTES_PER_S = 128 << 10
"""Pace below which an upload is given up, whatever it sends meanwhile."""
MAX_UPLOADS, MAX_OF_ONE = 32, 8
"""Uploads that are written at once, in all and of one worker; more wait for their turn."""
_DISK = "the coordinator's checkpoints"


class Checkpoint(checkpoint_pb2_grpc.CheckpointServicer):
    """Takes files of versions that are committed steps, gives files of checkpoints that exist.

    Args:
        outside: asks the store's disk, which may never answer.
    """

    def __init__(self, driver: Driver, store: CheckpointStore, outside: Outside | None = None) -> None:
        self._driver = driver
        self._store = store
        self._outside = Outside() if outside is None else outside
        self._uploads = asyncio.Semaphore(MAX_UPLOADS)
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Turns of workers that upload, by what their certificates say."""

    async def Put(
        self, request_iterator: AsyncIterator[checkpoint_pb2.PutPart], context: Context
    ) -> checkpoint_pb2.PutReply:
        start = await _next(request_iterator, START_S)
        if not isinstance(start, PutStart):
            raise RemoteError(f"{type(start).__name__} before PutStart")
        # Before it takes a place: a worker that is to save nothing keeps no other from saving.
        self._require_saver(start, context)
        async with self._turn(context), self._uploads:
            self._require_saver(start, context)
            seconds = PART_S + start.num_bytes / LEAST_BYTES_PER_S
            try:
                async with asyncio.timeout(seconds):
                    reply = await self._take(start, context, request_iterator)
            except TimeoutError as error:
                reason = f"{start.num_bytes} bytes were not there after {seconds:.0f} s"
                raise RemoteError(f"{start.name}: {reason}") from error
        return codec.PUT_REPLY.encode(reply)

    def _existing(self, start: PutStart, context: Context) -> CheckpointCommitted | None:
        """Checkpoint of the version that an upload is of, as it is now; what is damaged is written anew."""
        job = self._job(start.job, context)
        return None if start.version in job.damaged else _checkpoint(job, start.version)

    def _require_saver(self, start: PutStart, context: Context) -> None:
        """Returns if the job takes files of that version, from this worker if callers have names.

        Raises:
            RemoteError: it does not.
        """
        job, caller = self._job(start.job, context), caller_of(context)
        if job.end is not None or start.version > job.version:
            raise RemoteError(f"{start.job} takes no checkpoint of version {start.version}")
        if caller is None or caller == LOCAL:
            return
        run = self._driver.machine.view.runs.get(job.job)
        if run is None or (WorkerId(caller.name), start.version) not in run.savers:
            raise RemoteError(
                f"{caller.role} {caller.name} was not asked to save version {start.version} of {start.job}"
            )

    def _turn(self, context: Context) -> asyncio.Semaphore:
        """Turn of one worker among its own uploads, so that it cannot hold up all others'."""
        caller = caller_of(context)
        if caller is None or caller == LOCAL:
            return asyncio.Semaphore(MAX_OF_ONE)
        return self._turns.setdefault(caller.host, asyncio.Semaphore(MAX_OF_ONE))

    async def _take(
        self,
        start: PutStart,
        context: Context,
        parts: AsyncIterator[checkpoint_pb2.PutPart],
    ) -> PutReply:
        """Write a file. A checkpoint that exists at the end stays, and a file of it must be the same."""
        async with self._opened(start) as upload:
            sha256 = await self._receive(upload, parts)
            if upload.num_missing or upload.sha256 != sha256:
                raise RemoteError(f"{start.name}: {upload.num_missing} bytes missing, or not what was sent")
            # The checkpoint may have been committed while the file was on its way, or be about to be.
            async with self._driver.files.completing():
                self._require_saver(start, context)
                existing = self._existing(start, context)
                committed = _file_of(existing, start.name)
                if committed is None:
                    await self._outside.answer(partial(upload.finish, replaces=existing is None), _DISK)
                elif committed.sha256 != sha256:
                    raise RemoteError(f"{start.name} of version {start.version} exists with other content")
        return PutReply(num_bytes=start.num_bytes, sha256=sha256)

    @asynccontextmanager
    async def _opened(self, start: PutStart) -> AsyncIterator[Upload]:
        """A file to write to, which is gone in the end if it was not finished."""
        make = partial(self._store.upload, start.job, start.version, start.name, start.num_bytes)
        file = _Opened(make)
        # Not one of those that may be left behind: these are refused when there are many.
        closing = Thread(target=file.close, name="upload-end", daemon=True)
        is_silent = False
        try:
            yield await self._outside.answer(file.open, _DISK)
        except SilentError:
            is_silent = True
            raise
        finally:
            closing.start()
            # A thread that was left behind may have the file for as long as the disk takes: nobody waits for that.
            if not is_silent:
                with suppress(SilentError):
                    await self._outside.answer(closing.join, _DISK)

    async def _receive(self, upload: Upload, parts: AsyncIterator[checkpoint_pb2.PutPart]) -> str:
        """Write data until FileEnd; gives the hash that was announced with it."""
        while True:
            match await _next(parts):
                case FileData(data=b""):
                    raise RemoteError("a part of an upload without data")
                case FileData(data=data):
                    await self._outside.answer(partial(upload.write, data), _DISK)
                case FileEnd(sha256=sha256):
                    return sha256
                case PutStart():
                    raise RemoteError("a second PutStart in one upload")

    async def Get(
        self, request: checkpoint_pb2.GetRequest, context: Context
    ) -> AsyncIterator[checkpoint_pb2.GetPart]:
        asked = codec.GET_REQUEST.decode(request)
        self._require_reader(asked.job, context)
        file = _file_of(_checkpoint(self._job(asked.job, context), asked.version), asked.name)
        if file is None or asked.offset > file.num_bytes:
            raise NotFoundError("file", f"{asked.job}/{asked.version}/{asked.name}", "no such file there")
        yield codec.GET_PART.encode(GetStart(num_bytes=file.num_bytes))
        pieces = self._store.pieces(asked.job, asked.version, asked.name, asked.offset, PART_BYTES)
        try:
            while piece := await self._outside.answer(partial(next, pieces, b""), _DISK):
                yield codec.GET_PART.encode(FileData(data=piece))
        except (OSError, SilentError) as error:
            where = f"{asked.job}/{asked.version}/{asked.name}"
            reason = getattr(error, "strerror", None) or error
            raise NotFoundError("file", where, f"cannot be read: {reason}") from error
        yield codec.GET_PART.encode(FileEnd(sha256=file.sha256))

    def _require_reader(self, job: JobId, context: Context) -> None:
        """Returns if a caller may read a job's files: of workers, those that the job, or one that begins with it, has.

        Raises:
            RemoteError: it may not.
        """
        caller = caller_of(context)
        if caller is None or caller.role is not CallerRole.WORKER:
            return
        run = self._driver.machine.view.run_of(WorkerId(caller.name))
        begins = None if run is None else run.job.begins
        if run is None or job not in (run.job.job, None if begins is None else begins.job):
            raise RemoteError(f"worker {caller.name} is with no job that reads checkpoints of {job}")

    async def Manifest(
        self, request: checkpoint_pb2.ManifestRequest, context: Context
    ) -> checkpoint_pb2.ManifestReply:
        asked = codec.MANIFEST_REQUEST.decode(request)
        job = self._job(asked.job, context)
        found = job.newest_checkpoint if asked.version is None else _checkpoint(job, asked.version)
        if found is None:
            which = "it has none yet" if not job.checkpoints else f"it has {_versions(job)}"
            raise NotFoundError("checkpoint", f"{asked.job} version {asked.version or 'newest'}", which)
        reply = ManifestReply(
            job=job.job,
            version=found.version,
            spec=job.spec.canonical_json(),
            url=found.url,
            stages=found.stages,
            wall_s=found.wall_s,
            data_fingerprint=found.data_fingerprint,
        )
        await self._driver.settled()
        return codec.MANIFEST_REPLY.encode(reply)

    async def List(
        self, request: checkpoint_pb2.ListCheckpointsRequest, context: Context
    ) -> checkpoint_pb2.ListCheckpointsReply:
        return await self._kept(self._job(request.job, context))

    async def _kept(self, job: JobHistory) -> checkpoint_pb2.ListCheckpointsReply:
        found = [_view(job, checkpoint) for checkpoint in job.checkpoints]
        _ = await self._driver.settled()
        return checkpoint_pb2.ListCheckpointsReply(
            checkpoints=[codec.CHECKPOINT_VIEW.encode(view) for view in found]
        )

    async def Delete(
        self, request: checkpoint_pb2.DeleteCheckpointRequest, context: Context
    ) -> checkpoint_pb2.ListCheckpointsReply:
        check_request(request)
        job, version = self._job(request.job, context), Step(request.version)
        _ = deletable(job, version, self._driver.machine.view.history)
        _ = await self._driver.ask(DeleteAsked(job=job.job, version=version))
        return await self._kept(job)

    async def Verify(
        self, request: checkpoint_pb2.VerifyRequest, context: Context
    ) -> checkpoint_pb2.CheckpointView:
        job = self._job(request.job, context)
        checkpoint = _checkpoint(job, Step(request.version))
        if checkpoint is None:
            raise NotFoundError(
                "checkpoint", f"{job.job} version {request.version}", f"it has {_versions(job)}"
            )
        found = await self._driver.files.verify(checkpoint)
        _ = await self._driver.ask(found)
        view = replace(_view(job, checkpoint), condition=found.condition, reason=found.reason)
        return codec.CHECKPOINT_VIEW.encode(view)

    def _job(self, name: str, context: Context) -> JobHistory:
        return job_of(self._driver.machine.view.history, context, name)


class _Opened:
    """A file that one thread opens, and another closes: at once, or as soon as it is open."""

    def __init__(self, make: Callable[[], Upload]) -> None:
        self._make = make
        self._stack = ExitStack()
        self._is_over = False
        self._lock = Lock()

    def open(self) -> Upload:
        with self._lock:
            if self._is_over:
                raise SilentError("whoever wanted the file has gone")
            return self._stack.enter_context(self._make())

    def close(self) -> None:
        # Why there is to be no file was told already.
        with self._lock, suppress(OSError):
            self._is_over = True
            self._stack.close()


def _checkpoint(job: JobHistory, version: Step) -> CheckpointCommitted | None:
    return next((c for c in job.checkpoints if c.version == version), None)


def _file_of(checkpoint: CheckpointCommitted | None, name: str) -> CheckpointFile | None:
    stages = () if checkpoint is None or checkpoint.url is not None else checkpoint.stages
    return next((file for stage in stages for file in stage.files if file.name == name), None)


def _versions(job: JobHistory) -> str:
    return ", ".join(str(checkpoint.version) for checkpoint in job.checkpoints) or "none"


def _view(job: JobHistory, checkpoint: CheckpointCommitted) -> CheckpointView:
    """View of a checkpoint, as far as it is known."""
    files = [file for stage in checkpoint.stages for file in stage.files]
    reason = job.damaged.get(checkpoint.version)
    return CheckpointView(
        job=job.job,
        version=checkpoint.version,
        url=checkpoint.url,
        num_files=len(files),
        num_bytes=sum(file.num_bytes for file in files),
        wall_s=checkpoint.wall_s,
        condition=Condition.WHOLE if reason is None else Condition.DAMAGED,
        reason=reason or "",
    )


async def _next(parts: AsyncIterator[checkpoint_pb2.PutPart], seconds: float = PART_S) -> PutPart:
    limit: asyncio.Timeout | None = None
    try:
        async with asyncio.timeout(seconds) as limit:
            return codec.PUT_PART.decode(await anext(parts))
    except TimeoutError as error:
        if limit is None or not limit.expired():
            raise  # The bound of the whole upload.
        raise RemoteError(f"an upload was silent for {seconds:.0f} s") from error
    except StopAsyncIteration as error:
        raise RemoteError("an upload ended before FileEnd") from error
