"""A whole coordinator on one event loop: run log, machine, driver, gRPC, metrics. Whoever hosts it needs no more.

Rules of this file
- Order at the start: own the log, replay it, serve. Order at the end: the other way round.
- What ends a coordinator is one line for people; anything unforeseen is raised to the host, for it may be a crash
  that a restart mends.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coordinator.checkpoints import CheckpointStore
from coordinator.driver import AnswerPlan, Driver, wall_clock
from coordinator.exposition import Exposition
from coordinator.journal import Journal
from coordinator.metrics import Metrics
from coordinator.service.server import Service, serve
from coordinator.status import Roster
from coordinator.store import LogHeld, RunLog
from skein.errors import LocalError, SkeinError
from skein.protocol.coordinator import Coordinator
from skein.protocol.membership import LEASE_S
from skein.protocol.records import EpochOpened, Record
from skein.types import Epoch

LOCK_WAIT_S = 5.0
"""How long a successor waits for the process before it to be gone."""
_LOCK_POLL_S = 0.05
SAMPLE_S = 1.0
MAX_OPENINGS = 10
OPENINGS_S = 60.0
"""A coordinator that was opened so often in so short a time would only crash again."""
CHECKPOINTS = "checkpoints"
_log = logging.getLogger("coordinator")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """Where one coordinator serves, and what it owns.

    `token` None: no call needs one. `metrics_port` None: no metrics. `lease_s`: silence after which a worker is lost;
    raise it if workers are stopped for longer than that by their machines.
    """

    state_dir: Path
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    lease_s: float = LEASE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Serves:
    """A coordinator is up: where, and in which epoch."""

    address: str
    metrics_address: str | None
    epoch: Epoch


class Serving:
    """A coordinator that is up. Made by `start`."""

    def __init__(
        self,
        log: RunLog,
        driver: Driver,
        roster: Roster,
        service: Service,
        exposition: Exposition | None,
        metrics: Metrics,
    ) -> None:
        self.driver = driver
        self.metrics = metrics
        self._roster = roster
        self._log = log
        self._service = service
        self._exposition = exposition
        self._running = asyncio.create_task(self._run())

    @classmethod
    async def start(cls, options: ServingOptions, plan: AnswerPlan) -> "Serving":
        """Take over the state directory and serve.

        Raises:
            UserError: the directory or an address cannot be had; the line says why.
            LocalError: the run log does not fit this release, or it was opened too often.
        """
        clock = wall_clock()
        log = await _open_log(options.state_dir, clock)
        try:
            return await cls._serve(log, options, plan, clock)
        except BaseException:
            log.close()
            raise

    @classmethod
    async def _serve(
        cls, log: RunLog, options: ServingOptions, plan: AnswerPlan, clock: Callable[[], float]
    ) -> "Serving":
        machine, metrics = Coordinator(lease_s=options.lease_s), Metrics()
        # A watcher that wants what is no longer kept reads it by way of the driver.
        journal = Journal(lambda: driver.read_records())
        records = await asyncio.to_thread(list, log.read())
        _refuse_crash_loop(records, now=clock())
        machine.replay(records)
        journal.recorded(records)
        metrics.recorded(records)
        store = CheckpointStore(options.state_dir / CHECKPOINTS)
        driver = Driver(
            machine, log, plan=plan, checkpoints=store, clock=clock, journal=journal, meter=metrics
        )
        roster = Roster(machine)
        exposition = None
        if options.metrics_port is not None:
            exposition = Exposition(options.metrics_host, options.metrics_port, metrics.render)
        try:
            service = await serve(
                driver,
                store,
                roster,
                host=options.host,
                port=options.port,
                token=options.token,
                count_refusal=metrics.refused,
            )
        except BaseException:
            if exposition is not None:
                exposition.close()
            raise
        if log.warning is not None:
            _log.warning(log.warning)
        _log.info("epoch=%d serving on %s, %d records replayed", log.epoch, service.address, len(records))
        return cls(log, driver, roster, service, exposition, metrics)

    def where(self) -> Serves:
        """How to reach it."""
        return Serves(
            address=self._service.address,
            metrics_address=None if self._exposition is None else self._exposition.address,
            epoch=self._log.epoch,
        )

    async def ended(self) -> str:
        """Waits for the end; "" after `stop`, else what went wrong.

        Raises:
            BaseException: whatever nobody foresaw.
        """
        try:
            await asyncio.shield(self._running)
        except SkeinError as error:
            _log.critical("stops: %s", error)
            await self._close()
            return str(error)
        return ""

    async def stop(self) -> None:
        """Say no more to anybody, and give the log back. Idempotent."""
        self.driver.stop()
        await self._service.stop()
        await asyncio.wait({self._running})
        await self._close()

    async def _close(self) -> None:
        await self._service.stop()
        if self._exposition is not None:
            await asyncio.to_thread(self._exposition.close)
            self._exposition = None
        self._log.close()

    async def _run(self) -> None:
        """The driver, with samples beside it; what fails first ends both."""
        running, sampling = asyncio.create_task(self.driver.run()), asyncio.create_task(self._sample())
        try:
            done, _ = await asyncio.wait({running, sampling}, return_when=asyncio.FIRST_COMPLETED)
            self.driver.stop()
            await running
            if sampling in done:
                await sampling
        finally:
            sampling.cancel()

    async def _sample(self) -> None:
        """Every second or so, put what is into the metrics; the loop's lag is how late that second was."""
        driver = self.driver
        while True:
            began = time.monotonic()
            await asyncio.sleep(SAMPLE_S)
            lag_s = time.monotonic() - began - SAMPLE_S
            now = driver.now()
            workers = self._roster.workers(now=now)
            self.metrics.sample(
                driver.machine, workers, num_streams=driver.num_streams, lag_s=max(0.0, lag_s), now=now
            )
            if self._exposition is not None:
                self._exposition.show({worker.worker: worker for worker in workers})


async def _open_log(directory: Path, clock: Callable[[], float]) -> RunLog:
    """The run log, waiting a little for whoever has it to be gone."""
    give_up = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return await asyncio.to_thread(RunLog.open, directory, wall_s=clock())
        except LogHeld:
            if time.monotonic() >= give_up:
                raise
        await asyncio.sleep(_LOCK_POLL_S)


def _refuse_crash_loop(records: list[Record], *, now: float) -> None:
    # What lies ahead was written before the clock was set back, nobody knows how long ago.
    recent = [r for r in records if isinstance(r, EpochOpened) and now - OPENINGS_S < r.wall_s <= now]
    if len(recent) > MAX_OPENINGS:
        raise LocalError(
            f"opened {len(recent)} times within {OPENINGS_S:.0f} s, so it crashes again and again: the log says why; "
            f"wait a minute before the next start"
        )
