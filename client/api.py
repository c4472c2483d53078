"""The SDK: a coordinator, and its jobs.

    with Client("127.0.0.1:7411") as client:
        job = client.submit(Path("job.yaml"))
        print(job.wait().evaluation_loss)

The same as `client.aio`, which it drives on a loop of its own; use that one inside asyncio. Statuses and events are
the dataclasses of `skein.wire.views`, errors those of `client.errors`.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from client.aio import MAX_SHARD_BYTES, TIMEOUT_S, AsyncClient, AsyncJob, Exported, Metrics
from client.connection import DEFAULT_TARGET, PATIENCE_S
from client.exporting.download import OnBytes
from client.exporting.export import Dtype
from skein.config.job import JobSpec
from skein.protocol.log.records import Incident
from skein.topology.fleet import Link
from skein.wire.views import CheckpointView, JobEvent, JobStatus, Key, VersionReply, WorkerStatus

T = TypeVar("T")

_END_S = 2.0
"""What work that was interrupted may take to end."""


class Client:
    """A coordinator. Connects at the first call; use it as a context manager, or `close` it.

    Calls block; Ctrl-C ends the call and leaves the client usable. Arguments and errors are those of
    `client.aio.AsyncClient`.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        with ExitStack() as undo:
            self._loop = _Loop()
            undo.callback(self._loop.stop)
            self._client = self._loop.run(_opened(target, token, timeout_s, patience_s))
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all calls. Closing twice is harmless."""
        if self._loop.is_running:
            self._loop.run(self._client.close())
            self._loop.stop()

    @property
    def target(self) -> str:
        """host:port of the coordinator."""
        return self._client.target

    def version(self) -> VersionReply:
        """What the coordinator runs."""
        return self._loop.run(self._client.version())

    def submit(
        self,
        job: JobSpec | Path | str,
        *,
        key: str | None = None,
        from_job: str | None = None,
        from_version: int | None = None,
    ) -> "Job":
        """Hands a job in: a specification, the path of a job file, or YAML text; perhaps to begin from another job."""
        submitted = self._client.submit(job, key=key, from_job=from_job, from_version=from_version)
        return Job(self._loop, self._loop.run(submitted))

    def job(self, job: str) -> "Job":
        """The job of that id; nobody is asked whether it exists."""
        return Job(self._loop, self._client.job(job))

    def jobs(self) -> tuple[JobStatus, ...]:
        """All jobs, oldest first."""
        return self._loop.run(self._client.jobs())

    def workers(self) -> tuple[WorkerStatus, ...]:
        """All workers by id, those lost lately included."""
        return self._loop.run(self._client.workers())

    def links(self) -> tuple[Link, ...]:
        """What workers measured between each other."""
        return self._loop.run(self._client.links())

    def drain(self, worker: str) -> WorkerStatus:
        """Takes work away from a worker, step by step, and lets it exit."""
        return self._loop.run(self._client.drain(worker))

    def measure(self, worker: str = "") -> tuple[WorkerStatus, ...]:
        """Has a worker, or with no name every worker, measure its device again; gives those that were asked."""
        return self._loop.run(self._client.measure(worker))

    def incidents(self, job: str) -> tuple[Incident, ...]:
        """What failures there were in a job so far and what each cost, oldest first."""
        return self._loop.run(self._client.incidents(job))

    def checkpoints(self, job: str) -> tuple[CheckpointView, ...]:
        """The checkpoints of a job that are kept, oldest first, and whether one was found damaged."""
        return self._loop.run(self._client.checkpoints(job))

    def verify(self, job: str, version: int) -> CheckpointView:
        """One of them, after the coordinator has read all of it; a damaged one is set aside."""
        return self._loop.run(self._client.verify(job, version))

    def export(
        self,
        job: str,
        out: Path,
        *,
        version: int | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        dtype: Dtype = Dtype.FP32,
        on_bytes: OnBytes | None = None,
    ) -> Exported:
        """Writes a checkpoint's weights, by default the newest one's, as a Hugging Face directory."""
        return self._loop.run(
            self._client.export(
                job, out, version=version, max_shard_bytes=max_shard_bytes, dtype=dtype, on_bytes=on_bytes
            )
        )


class Job:
    """One job at its coordinator."""

    def __init__(self, loop: "_Loop", job: AsyncJob) -> None:
        self._loop = loop
        self._job = job

    @property
    def id(self) -> str:
        """By which all calls know it."""
        return self._job.id

    @property
    def is_new(self) -> bool:
        """Whether the call that gave this made the job."""
        return self._job.is_new

    def status(self) -> JobStatus:
        """The job now."""
        return self._loop.run(self._job.status())

    def events(self, *, since: int | Key = 0) -> Generator[JobEvent, None, None]:
        """What happened after the event of that key or number, then what happens, through restarts, until the end."""
        events = self._job.events(since=since)
        try:
            while (event := self._loop.run(_next(events))) is not None:
                yield event
        finally:
            self._loop.run(_close(events))

    def history(self, *, since: Key = (0, 0)) -> tuple[JobEvent, ...]:
        """All that has happened so far, after the event of that key: each event once and in order."""
        return self._loop.run(self._job.history(since=since))

    def wait(self) -> JobStatus:
        """The job when it has ended, well or not."""
        return self._loop.run(self._job.wait())

    def cancel(self, reason: str = "", *, discard: bool = False) -> JobStatus:
        """Ends the job, if it has not ended, once its newest step is saved; `discard` ends it now."""
        return self._loop.run(self._job.cancel(reason, discard=discard))

    def pause(self, reason: str = "") -> JobStatus:
        """Holds the job once its newest step is saved."""
        return self._loop.run(self._job.pause(reason))

    def resume(self, *, steps: int | None = None) -> JobStatus:
        """Has the job go on that was paused or has ended; perhaps to another number of steps in all."""
        return self._loop.run(self._job.resume(steps=steps))

    def metrics(self) -> Metrics:
        """Loss, gradient norm, rates and the like of every step and evaluation so far."""
        return self._loop.run(self._job.metrics())


async def _opened(target: str, token: str | None, timeout_s: float, patience_s: float) -> AsyncClient:
    """A client that belongs to the running loop."""
    return AsyncClient(target, token=token, timeout_s=timeout_s, patience_s=patience_s)


class _Loop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="skein-client", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def run(self, work: Coroutine[object, object, T]) -> T:
        """What `work` gives. A signal that interrupts the wait ends the work first."""
        is_over = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_until_over(work, is_over), self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # nothing to a future that is done
            is_over.wait(_END_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _until_over(work: Coroutine[object, object, T], is_over: threading.Event) -> T:
    try:
        return await work
    finally:
        is_over.set()


async def _next(events: AsyncGenerator[JobEvent, None]) -> JobEvent | None:
    return await anext(events, None)


async def _close(events: AsyncGenerator[JobEvent, None]) -> None:
    await events.aclose()
