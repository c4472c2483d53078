"""The Ray actor that is the coordinator: it serves from its constructor on, and again whenever Ray restarts it.

Rules of this file
- No torch in here: the process must be back within a second.
- Nothing but the state directory survives a restart; the actor is given where that is, and nothing else.
- A launcher that is gone takes the actor with it, at once and without ado: the run log is written for that.
"""

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from coordinator.lead.standby import Standby
from coordinator.planner import RayPlanner, choose_by_ray
from coordinator.serving import Serves, Serving, ServingOptions
from coordinator.telling.logs import begin_coordinator_log
from skein.errors import SkeinError
from skein.wire.process.logs import LogFormat

_log = logging.getLogger("coordinator")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The process that brought the actor up; its start time tells it from a later one with the same id."""

    pid: int
    started_s: float

    @classmethod
    def this_process(cls) -> "Launcher":
        return cls(pid=os.getpid(), started_s=psutil.Process().create_time())


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """Options that the actor is made with. `launcher` None: it outlives the process that brought it up."""

    serving: ServingOptions
    is_standby: bool
    log_file: Path
    launcher: Launcher | None
    log_format: LogFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The coordinator could not begin; one line for people."""

    line: str


class Host:
    """The actor. Ray calls its methods; gRPC is served beside them on the same event loop."""

    def __init__(self, options: HostOptions) -> None:
        loop = asyncio.get_event_loop()
        if options.launcher is not None:
            _leave_with(options.launcher, loop)
        begin_coordinator_log(options.log_file, options.log_format)
        self._options = options
        self._serving: Serving | None = None
        self._address: str | None = None
        self._listening = asyncio.Event()
        self._beginning = loop.create_task(self._begin())
        self._beginning.add_done_callback(lambda _: self._listening.set())
        self._running = loop.create_task(self._run())

    async def listens(self) -> str | Failed:
        """Address at which the coordinator listens, whether it serves or stands by; waits for it."""
        await self._listening.wait()
        if self._address is not None:
            return self._address
        began = self._beginning.result()
        return began if isinstance(began, Failed) else began.address

    async def alive(self) -> None:
        """A sign of life."""

    async def ready(self) -> Serves | Failed:
        """Addresses and epoch of the coordinator, once it serves."""
        return await asyncio.shield(self._beginning)

    async def ended(self) -> str:
        """Waits for the end; gives what went wrong, "" for nothing. Asked again after a restart."""
        return await asyncio.shield(self._running)

    async def stop(self) -> None:
        """An orderly end: the log is closed and nobody is served any more."""
        if self._serving is not None:
            await self._serving.stop()
        else:
            self._beginning.cancel()
            await asyncio.wait({self._beginning})

    async def _begin(self) -> Serves | Failed:
        options = self._options
        try:
            serving, planner = options.serving, RayPlanner()
            if options.is_standby:
                standby = await Standby.start(serving)
                self._address = standby.address
                self._listening.set()
                planner.warm_up()
                self._serving = await standby.lead(planner, choose=choose_by_ray)
            else:
                self._serving = await Serving.start(serving, planner, choose=choose_by_ray)
                planner.warm_up()
        except SkeinError as error:
            _log.critical("cannot serve: %s", error)
            return Failed(line=str(error))
        return self._serving.where()

    async def _run(self) -> str:
        began = await self._beginning
        if isinstance(began, Failed):
            return began.line
        assert self._serving is not None
        try:
            return await self._serving.ended()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - outermost: Ray starts a process that replays the run log
            _log.critical("crashed", exc_info=error)
            logging.shutdown()
            os._exit(1)


def _leave_with(launcher: Launcher, loop: asyncio.AbstractEventLoop) -> None:
    """End this process when the launcher's ends, or has ended."""
    try:
        descriptor = os.pidfd_open(launcher.pid)
        is_same = psutil.Process(launcher.pid).create_time() == launcher.started_s
    except (ProcessLookupError, psutil.NoSuchProcess):
        is_same = False
    if not is_same:
        os._exit(0)
    loop.add_reader(descriptor, os._exit, 0)
