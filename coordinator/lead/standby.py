"""A warm standby: it listens and refuses, replays as another coordinator goes on, and leads when that one is silent."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

from coordinator.driver import AnswerChoice, AnswerPlan, choose_beside, wall_clock
from coordinator.lead.lease import AGAIN_S
from coordinator.records.logfile import Holder, Lease, LogBusy, LogFull
from coordinator.records.store import Lookout, RunLog
from coordinator.replayed import SNAPSHOT_ENTRIES, ReplayedLog
from coordinator.serving import Doors, Serving, ServingOptions, WrapLog, memory_of

POLL_S = 0.2
"""Seconds between two looks of a standby: a fraction of `takeover_s`."""
_log = logging.getLogger("coordinator")


class Standby:
    """A coordinator that stands by. Made by `start`; ends by `lead` or `close`."""

    def __init__(self, options: ServingOptions, memory: ReplayedLog, doors: Doors) -> None:
        self._options = options
        self._memory = memory
        self._doors = doors

    @classmethod
    async def start(cls, options: ServingOptions) -> "Standby":
        """Listen and refuse.

        Raises:
            UserError: an address cannot be had; the line says why.
        """
        memory = memory_of(options)
        return cls(options, memory, await Doors.open(options, memory.metrics))

    @property
    def address(self) -> str:
        """host:port where it listens."""
        return self._doors.service.address

    @property
    def leader(self) -> str:
        """Address of the leader, by its lease; "" where there is none."""
        return self._doors.service.gate.leader

    @property
    def num_replayed(self) -> int:
        """Records of the log that it knows."""
        return self._memory.num_records

    async def lead(
        self,
        plan: AnswerPlan,
        *,
        choose: AnswerChoice = choose_beside,
        wrap: WrapLog = lambda log: log,
    ) -> Serving:
        """Wait until the leader has been silent for `takeover_s`, then serve in its place; `wrap` as of `Serving`.

        Raises:
            UserError: the directory cannot be had, or its log is damaged.
            LocalError: the run log does not fit this release, or it was opened too often.
        """
        options, clock = self._options, wall_clock()
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            lookout = await asyncio.to_thread(Lookout, options.state_dir)
            reason = await asyncio.to_thread(self._memory.recall, lookout)
            if reason is not None:
                _log.warning(
                    "the snapshot of the run log is ignored, and all of the log replayed: %s", reason
                )
            log = await self._watch(lookout, clock)
            undo.pop_all()
        return await Serving.begin(
            log, options, plan, self._memory, self._doors, choose=choose, wrap=wrap, clock=clock
        )

    async def close(self) -> None:
        """Stand by no more."""
        await self._doors.close()

    async def _watch(self, lookout: Lookout, clock: Callable[[], float]) -> RunLog:
        """Follow the log until it is this one's."""
        holder = Holder(name=self._options.name, address=self._doors.address)
        seen, since_s = await self._look(lookout), time.monotonic()
        while True:
            is_own = seen.holder is not None and seen.holder.name == holder.name
            if is_own or time.monotonic() - since_s > self._options.takeover_s:
                log = await self._take(lookout, seen, holder, clock)
                if log is not None:
                    return log
            await asyncio.sleep(POLL_S)
            # By this clock alone: what the leader's shows does not matter.
            now = await self._look(lookout)
            if now != seen:
                seen, since_s = now, time.monotonic()

    async def _look(self, lookout: Lookout) -> Lease:
        """Lease as it is now; new records are replayed, and callers are told the leader."""
        lease = await asyncio.to_thread(lookout.lease)
        while records := await asyncio.to_thread(lookout.news):
            self._memory.replay(records)
        if self._memory.num_records - self._memory.num_covered > SNAPSHOT_ENTRIES:
            self._memory.let_go(lookout)
        self._doors.service.gate.leader = "" if lease.holder is None else lease.holder.address
        await self._doors.announce()
        return lease

    async def _take(
        self, lookout: Lookout, seen: Lease, holder: Holder, clock: Callable[[], float]
    ) -> RunLog | None:
        try:
            log = await asyncio.to_thread(lookout.take, seen, wall_s=clock(), holder=holder)
        except (LogFull, LogBusy) as error:
            _log.error("cannot take over: %s", error)
            await asyncio.sleep(AGAIN_S)
            return None
        if log is not None:
            silent = "nobody" if seen.holder is None else seen.holder.address or seen.holder.name
            _log.warning("epoch=%d takes over: %s led in epoch %d", log.epoch, silent, seen.epoch)
        return log
