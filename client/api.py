"""The SDK: a coordinator, and its jobs.

    with Client("127.0.0.1:7411") as client:
        job = client.submit(Path("job.yaml"))
        print(job.wait().evaluation_loss)

The same as `client.aio`, which it drives on a loop of its own; use that one inside asyncio. Statuses and events are
the dataclasses of `skein.wire.views`, errors those of `client.errors`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, Self, TypeVar

from client.aio import TIMEOUT_S, AsyncClient, AsyncJob
from client.connection import DEFAULT_TARGET, PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

    from skein.config.job import JobSpec
    from skein.wire.identity.passport import Passport
    from skein.wire.views import JobEvent, Key

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")

_END_S = 2.0
"""Time that interrupted work may take to end."""


class _Blocking(Generic[A]):
    """An asyncio client or job, and the loop that it is driven on."""

    def __init__(self, loop: _Loop, driven: A) -> None:
        self._loop = loop
        self._driven = driven


def _blocks(
    call: Callable[Concatenate[A, P], Coroutine[object, object, T]],
) -> Callable[Concatenate[_Blocking[A], P], T]:
    """The same call, which waits for the answer."""

    @wraps(call)
    def blocking(self: _Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.run(call(self._driven, *args, **kwargs))

    return blocking


class Client(_Blocking[AsyncClient]):
    """A coordinator. Connects at the first call; use it as a context manager, or `close` it.

    Calls block; Ctrl-C ends the call and leaves the client usable. Arguments and errors are those of
    `client.aio.AsyncClient`.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        passport: Passport | None = None,
        timeout_s: float = TIMEOUT_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        with ExitStack() as undo:
            loop = _Loop()
            undo.callback(loop.stop)
            super().__init__(loop, loop.run(_opened(target, passport, timeout_s, patience_s)))
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all calls. Closing twice is harmless."""
        if self._loop.is_running:
            self._loop.run(self._driven.close())
            self._loop.stop()

    @property
    def target(self) -> str:
        """host:port of the coordinator."""
        return self._driven.target

    def submit(
        self,
        job: JobSpec | Path | str,
        *,
        key: str | None = None,
        from_job: str | None = None,
        from_version: int | None = None,
    ) -> Job:
        """Hands a job in: a specification, the path of a job file, or YAML text; perhaps to begin from another job."""
        submitted = self._driven.submit(job, key=key, from_job=from_job, from_version=from_version)
        return Job(self._loop, self._loop.run(submitted))

    def job(self, job: str) -> Job:
        """The job of that id; nobody is asked whether it exists."""
        return Job(self._loop, self._driven.job(job))

    version = _blocks(AsyncClient.version)
    weigh = _blocks(AsyncClient.weigh)
    jobs = _blocks(AsyncClient.jobs)
    job_page = _blocks(AsyncClient.job_page)
    job_rows = _blocks(AsyncClient.job_rows)
    workers = _blocks(AsyncClient.workers)
    num_known_workers = _blocks(AsyncClient.num_known_workers)
    links = _blocks(AsyncClient.links)
    create_token = _blocks(AsyncClient.create_token)
    identities = _blocks(AsyncClient.identities)
    revoke = _blocks(AsyncClient.revoke)
    page = _blocks(AsyncClient.page)
    drain = _blocks(AsyncClient.drain)
    measure = _blocks(AsyncClient.measure)
    incidents = _blocks(AsyncClient.incidents)
    checkpoints = _blocks(AsyncClient.checkpoints)
    verify = _blocks(AsyncClient.verify)
    delete = _blocks(AsyncClient.delete)
    export = _blocks(AsyncClient.export)


class Job(_Blocking[AsyncJob]):
    """A job at its coordinator."""

    @property
    def id(self) -> str:
        """By which all calls know it."""
        return self._driven.id

    @property
    def is_new(self) -> bool:
        """Whether the call that gave this made the job."""
        return self._driven.is_new

    def events(self, *, since: int | Key = 0) -> Generator[JobEvent, None, None]:
        """Events after the one of that key or number, past ones and then new ones, through restarts, until the end."""
        events = self._driven.events(since=since)
        try:
            while (event := self._loop.run(_next(events))) is not None:
                yield event
        finally:
            self._loop.run(_close(events))

    status = _blocks(AsyncJob.status)
    history = _blocks(AsyncJob.history)
    wait = _blocks(AsyncJob.wait)
    cancel = _blocks(AsyncJob.cancel)
    pause = _blocks(AsyncJob.pause)
    resume = _blocks(AsyncJob.resume)
    metrics = _blocks(AsyncJob.metrics)


async def _opened(target: str, passport: Passport | None, timeout_s: float, patience_s: float) -> AsyncClient:
    """A client that belongs to the running loop."""
    return AsyncClient(target, passport=passport, timeout_s=timeout_s, patience_s=patience_s)


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
        """Result of `work`. A signal that interrupts the wait ends the work first."""
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
