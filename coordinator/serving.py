"""A whole coordinator on one event loop: run log, machine, driver, gRPC, metrics. Whoever hosts it needs no more.

Rules of this file
- Order at the start: own the log, replay it, serve. Order at the end: the other way round. One that stood by has
  listened and replayed before it owns the log.
- What ends a coordinator is one line for people; anything unforeseen is raised to the host, for it may be a crash
  that a restart mends.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from coordinator.checkpoints import CheckpointStore
from coordinator.driver import (
    AnswerChoice,
    AnswerPlan,
    AppendLog,
    check_wall_clock,
    choose_beside,
    wall_clock,
)
from coordinator.identity.office import FOLDER as AUTHORITY_FOLDER
from coordinator.identity.office import IdentityOffice
from coordinator.identity.page_tls import PageTls, hosts_of_this_machine
from coordinator.lead.addresses import FOLDER as ADDRESSES_FOLDER
from coordinator.lead.addresses import SharedAddresses
from coordinator.lead.lease import AGAIN_S, Lead, PatientLog
from coordinator.page.board import Audience, Board
from coordinator.page.looks import Looks
from coordinator.records.audit import AuditLog
from coordinator.records.logfile import Holder, LogFull
from coordinator.records.store import SOMEBODY, LeaseHeld, LogHeld, Lookout, RunLog
from coordinator.replayed import SNAPSHOT_ENTRIES, UNREADABLE, ReplayedLog, SnapshotMaker
from coordinator.service.server import Service, listen
from coordinator.telling.exposition import Exposition
from coordinator.telling.metrics import CoordinatorMetrics
from coordinator.telling.status import Roster
from skein.config.quota import UNBOUNDED, QuotasSpec
from skein.errors import LocalError, SkeinError
from skein.protocol.log.records import EpochOpened
from skein.protocol.membership.membership import LEASE_S
from skein.storage.chain import FOLDER as AUDIT_FOLDER
from skein.storage.places import ANYWHERE, Places
from skein.types import Epoch
from skein.wire.channel import is_loopback, split_address
from skein.wire.credentials import NO_CREDENTIALS
from skein.wire.greeting import Coordinators
from skein.wire.identity.authority import Authority
from skein.wire.identity.names import Caller
from skein.wire.process.files import raise_open_files
from skein.wire.serving.pages import Pages, on_thread

LOCK_WAIT_S = 5.0
"""Seconds that a successor waits for the process before it to be gone."""
_LOCK_POLL_S = 0.05
SAMPLE_S = 1.0
SNAPSHOT_AGAIN_S = 60.0
"""Seconds until a snapshot is tried again that the disk did not take."""
MAX_OPENINGS = 10
OPENINGS_S = 60.0
"""A coordinator that was opened so often in so short a time would only crash again."""
CHECKPOINTS = "checkpoints"
_log = logging.getLogger("coordinator")

WrapLog = Callable[[AppendLog], AppendLog]
"""Puts something between a driver and its run log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """Options of one coordinator: where it serves, and what it owns.

    `state_dir`: run log and checkpoints; whoever has it is the coordinator.
    `advertise`: host:port by which others reach it; None: where it listens.
    `has_certificates`: everybody needs one; who has none gets it at `enrol_port`, for a token.
    `metrics_port` None: no metrics. `lease_s`: silence after which a worker is lost; raise it if workers are stopped
    for longer than that by their machines. `name`: shared by the coordinators that one launcher starts, one after the
    other, and by no more. `takeover_s`: silence after which a standby leads; raise it if disks stall for longer.
    `accepts_lost_log`: go on with a log that has lost its end.
    `places`: what jobs may name. `quotas`: what namespaces may take.
    """

    state_dir: Path
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    has_certificates: bool = False
    enrol_port: int = 0
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    lease_s: float = LEASE_S
    name: str = SOMEBODY.name
    takeover_s: float = 3.0
    accepts_lost_log: bool = False
    places: Places = ANYWHERE
    quotas: QuotasSpec = UNBOUNDED


@dataclass(frozen=True, slots=True, kw_only=True)
class Serves:
    """A coordinator is up: where, and in which epoch."""

    address: str
    metrics_address: str | None
    epoch: Epoch


def memory_of(options: ServingOptions) -> ReplayedLog:
    """The state of a log of which nothing was read yet."""
    return ReplayedLog(options.state_dir, lease_s=options.lease_s, quotas=options.quotas)


@dataclass(slots=True, kw_only=True)
class Doors:
    """Servers by which a coordinator is reached, whether it leads or stands by."""

    service: Service
    audit: AuditLog
    exposition: Exposition
    board: Board
    pages: Pages | None
    shared: SharedAddresses
    address: str
    """host:port by which others reach this coordinator."""

    @classmethod
    async def open(cls, options: ServingOptions, metrics: CoordinatorMetrics) -> "Doors":
        """Listen, standing by.

        Raises:
            UserError: an address cannot be had.
        """
        # Before anybody can come: strangers must not use up what the run log and checkpoints need.
        raise_open_files()
        metrics.watch_disk(options.state_dir)
        exposition, pages = Exposition(metrics.render), None
        shared = SharedAddresses(options.state_dir / ADDRESSES_FOLDER)
        async with AsyncExitStack() as undo:
            office, tls, credentials = None, None, NO_CREDENTIALS
            is_revoked: Callable[[Caller], bool] = _nobody
            if options.has_certificates:
                folder = options.state_dir / AUTHORITY_FOLDER
                office = await asyncio.to_thread(IdentityOffice, folder, shared)
                undo.callback(office.close)
                credentials, is_revoked = office.credentials, office.register.is_revoked
                tls = page_tls_of(options, office.authority)
            audience = audience_of(options, is_encrypted=tls is not None)
            board = Board(on_thread(exposition.answer), audience, wall_clock(), is_revoked)
            if (port := options.metrics_port) is not None:
                pages = await Pages.open(
                    "metrics_port",
                    options.metrics_host,
                    port,
                    board.answer,
                    tls=None if tls is None else tls.context,
                )
                exposition.address = board.address = pages.address
                undo.push_async_callback(pages.close)
            audit = AuditLog(options.state_dir / AUDIT_FOLDER)
            undo.push_async_callback(audit.close)
            service = await listen(
                options.host,
                options.port,
                credentials=credentials,
                count_refusal=metrics.refused,
                audit=audit,
                office=office,
                enrol_port=options.enrol_port,
            )
            undo.push_async_callback(service.stop)
            doors = cls(
                service=service,
                audit=audit,
                exposition=exposition,
                board=board,
                pages=pages,
                shared=shared,
                address=options.advertise or service.address,
            )
            await doors.announce()
            undo.pop_all()
        return doors

    async def announce(self) -> None:
        """Let the other coordinators with this state directory know the address of this one; wanted now and then."""
        await asyncio.to_thread(self.shared.announce, self.service.by(self.address))

    async def close(self) -> None:
        """Answer nobody any more. Idempotent."""
        await asyncio.to_thread(self.shared.withdraw)
        if self.pages is not None:
            await self.pages.close()
        await self.service.stop()
        await self.audit.close()


def _nobody(_caller: Caller) -> bool:
    return False


def page_tls_of(options: ServingOptions, authority: Authority) -> PageTls | None:
    """TLS of the page; None where its port is open to this machine alone."""
    if is_loopback(options.metrics_host):
        return None
    return PageTls(authority, hosts_of_this_machine() | _names(options))


def audience_of(options: ServingOptions, *, is_encrypted: bool) -> Audience:
    """Audience of the page: on this machine everybody, where a coordinator asks nobody for a certificate."""
    return Audience(
        is_open=not options.has_certificates and is_loopback(options.metrics_host),
        names=_names(options),
        is_encrypted=is_encrypted,
    )


def _names(options: ServingOptions) -> frozenset[str]:
    """Names, or addresses, by which options say that the page is reached."""
    advertised = () if options.advertise is None else (split_address("advertise", options.advertise)[0],)
    return frozenset(name.lower() for name in (*advertised, options.metrics_host))


class Serving:
    """A coordinator that leads. Made by `start`, or by a standby's `lead`."""

    def __init__(
        self,
        log: RunLog,
        patient: PatientLog,
        lead: Lead,
        memory: ReplayedLog,
        maker: SnapshotMaker,
        roster: Roster,
        doors: Doors,
    ) -> None:
        self.driver = memory.driver
        self.metrics = memory.metrics
        self._lines = memory.lines
        self._memory = memory
        self._maker = maker
        self._snapshots = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._roster = roster
        self._log = log
        self._patient = patient
        self._lead = lead
        self._doors = doors
        self._running = asyncio.create_task(self._run())

    @classmethod
    async def start(
        cls,
        options: ServingOptions,
        plan: AnswerPlan,
        *,
        choose: AnswerChoice = choose_beside,
        wrap: WrapLog = lambda log: log,
    ) -> "Serving":
        """Take over the state directory and serve; `wrap` is put around the run log.

        Raises:
            UserError: the directory or an address cannot be had; the line says why.
            LocalError: the run log does not fit this release, or it was opened too often.
        """
        clock, memory = wall_clock(), memory_of(options)
        log = await _open_log(options, clock)
        with ExitStack() as undo:
            undo.callback(log.close)
            doors = await Doors.open(options, memory.metrics)
            undo.pop_all()
        return await cls.begin(log, options, plan, memory, doors, choose=choose, wrap=wrap, clock=clock)

    @classmethod
    async def begin(
        cls,
        log: RunLog,
        options: ServingOptions,
        plan: AnswerPlan,
        memory: ReplayedLog,
        doors: Doors,
        *,
        choose: AnswerChoice,
        wrap: WrapLog,
        clock: Callable[[], float],
    ) -> "Serving":
        """Serve with a log that is owned: replay what is left of it, and admit callers. Closes all if it cannot."""
        async with AsyncExitStack() as undo:
            undo.callback(log.close)
            undo.push_async_callback(doors.close)
            maker = SnapshotMaker(options.state_dir, lambda: memory_of(options))
            if not memory.num_records:
                await asyncio.to_thread(_recall, memory, maker, options.state_dir)
            rest = await asyncio.to_thread(list, log.read(after=memory.num_records))
            memory.replay(rest)
            memory.machine.sign_with(log.key)
            _refuse_crash_loop(memory.openings, now=clock())
            patient = PatientLog(wrap(log), options.state_dir)
            store = CheckpointStore(options.state_dir / CHECKPOINTS, places=options.places)
            driver = memory.drive(patient, store, plan, choose, clock, doors.audit)
            lead, roster = Lead(log, doors.address, takeover_s=options.takeover_s), Roster(memory.machine)
            doors.board.lead(Looks(driver, roster, memory.metrics))
            await doors.service.admit(driver, store, roster, lead, doors.board)
            memory.metrics.led()
            undo.pop_all()
        for line in log.warnings:
            _log.warning(line)
        _log.info(
            "epoch=%d serving on %s, %d records replayed",
            log.epoch,
            doors.service.address,
            memory.num_records,
        )
        return cls(log, patient, lead, memory, maker, roster, doors)

    def where(self) -> Serves:
        """Addresses by which the coordinator is reached, and its epoch."""
        return Serves(
            address=self._doors.service.address,
            metrics_address=self._doors.exposition.address or None,
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
        self._patient.stop()
        self.driver.stop()
        await self._doors.service.stop()
        await asyncio.wait({self._running})
        if self._running.exception() is not None:
            _log.warning("stops with what could not be recorded: %s", self._running.exception())
        await self._close()

    async def _close(self) -> None:
        await self._doors.close()
        await asyncio.to_thread(self._lead.close)
        await asyncio.to_thread(self._snapshots.shutdown)
        await self._lines.close()
        self._memory.close()
        self._log.close()

    async def _run(self) -> None:
        """The driver, with samples and the lease beside it; what fails first ends all."""
        driving = asyncio.create_task(self.driver.run())
        beside = {
            asyncio.create_task(self._sample()),
            asyncio.create_task(self._lead.keep()),
            asyncio.create_task(self._make_snapshots()),
        }
        try:
            done, _ = await asyncio.wait({driving, *beside}, return_when=asyncio.FIRST_COMPLETED)
            self._patient.stop()
            self.driver.stop()
            for failed in done & beside:
                await failed
            await driving
        finally:
            for other in beside:
                other.cancel()
            await asyncio.wait({driving, *beside})

    async def _make_snapshots(self) -> None:
        """Have the snapshot beside the log follow it; where the disk takes none only the next start is slower."""
        loop, is_failing = asyncio.get_running_loop(), False
        while True:
            await asyncio.sleep(SNAPSHOT_AGAIN_S if is_failing else SAMPLE_S)
            if self._memory.num_records - self._memory.num_covered < SNAPSHOT_ENTRIES:
                continue
            try:
                await loop.run_in_executor(self._snapshots, self._maker.follow)
                with closing(Lookout(self._maker.state_dir)) as lookout:
                    self._memory.let_go(lookout)
                is_failing = False
            except (*UNREADABLE, SkeinError) as error:
                _log.warning("no snapshot of the run log is written, so a start will take longer: %s", error)
                is_failing = True

    async def _sample(self) -> None:
        """Every second or so, put what is into the metrics; the loop's lag is how late that second was."""
        driver, is_behind = self.driver, False
        while True:
            began = time.monotonic()
            await asyncio.sleep(SAMPLE_S)
            is_behind = check_wall_clock(driver.now(), wall_s=time.time(), was_behind=is_behind)
            lag_s = time.monotonic() - began - SAMPLE_S
            now = driver.now()
            workers = self._roster.workers(now=now)
            self.metrics.sample(
                driver.machine.view,
                workers,
                relay=self._doors.service.relay,
                num_streams=driver.num_streams,
                num_unaware=driver.num_unaware,
                lag_s=max(0.0, lag_s),
                now=now,
            )
            if (office := self._doors.service.office) is not None:
                self.metrics.show_certificates(office.left_s(driver.machine.view.live.keys()))
            self._doors.exposition.show({worker.worker: worker for worker in workers})
            self._doors.board.tell()
            await self._name_coordinators()

    async def _name_coordinators(self) -> None:
        """Have workers and clients know all coordinators, so that they find the next leader."""
        await self._doors.announce()
        known = await asyncio.to_thread(self._doors.shared.known)
        named = Coordinators(
            addresses=tuple(one.address for one in known),
            enrol_addresses=tuple(one.enrol_address for one in known if one.enrol_address),
        )
        self.driver.name_coordinators(named if len(known) > 1 else None)


def _recall(memory: ReplayedLog, maker: SnapshotMaker, state_dir: Path) -> None:
    """Begin with the snapshot beside the log, brought near the log's end first if it is far from it."""
    maker.catch_up()
    with closing(Lookout(state_dir)) as lookout:
        reason = memory.recall(lookout)
    if reason is not None:
        _log.warning("the snapshot of the run log is ignored, and all of the log replayed: %s", reason)


async def _open_log(options: ServingOptions, clock: Callable[[], float]) -> RunLog:
    """The run log, waiting a little for whoever has it to be gone, and without end for room on a full disk."""
    is_told = False
    began = since = time.monotonic()
    seen = lapsed = None
    holder = Holder(name=options.name, address=options.advertise or "")
    while True:
        now = time.monotonic()
        try:
            return await asyncio.to_thread(
                RunLog.open,
                options.state_dir,
                wall_s=clock(),
                holder=holder,
                lapsed=lapsed,
                accepts_loss=options.accepts_lost_log,
            )
        except LeaseHeld as held:
            if held.lease != seen:
                seen, since = held.lease, now
            lapsed = seen if now - since > options.takeover_s else None
            if now - began > options.takeover_s + LOCK_WAIT_S:
                raise
        except LogHeld:
            if now - began > LOCK_WAIT_S:
                raise
        except LogFull as full:
            if not is_told:
                _log.error("cannot open the run log: %s; waiting, make room", full)
            is_told, began = True, now
            await asyncio.sleep(AGAIN_S)
        await asyncio.sleep(_LOCK_POLL_S)


def _refuse_crash_loop(openings: Sequence[EpochOpened], *, now: float) -> None:
    # What lies ahead was written before the clock was set back, nobody knows how long ago.
    recent = [opening for opening in openings if now - OPENINGS_S < opening.wall_s <= now]
    if len(recent) > MAX_OPENINGS:
        raise LocalError(
            f"opened {len(recent)} times within {OPENINGS_S:.0f} s, so it crashes again and again: the log says why; "
            f"wait a minute before the next start"
        )
