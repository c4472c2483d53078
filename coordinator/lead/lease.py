"""Duties of a leader: renew its lease, say nothing while that is in doubt, and outlast a full disk."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from coordinator.driver import AppendLog
from coordinator.records.logfile import LogBusy, LogFull
from coordinator.records.mirror import MIRROR_FILE
from coordinator.records.store import RunLog
from skein.errors import LocalError
from skein.protocol.log.records import Record
from skein.storage.outside import obstacle_to_writing
from skein.types import JobId

RENEWALS = 6
"""In the time after which a standby takes over; several may be late before it matters."""
AGAIN_S = 0.5
"""Between two tries of what the disk refused."""
_log = logging.getLogger("coordinator")


def _seconds_awake_or_not() -> float:
    """Monotonic, and goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lead:
    """The lease of a coordinator that leads, for as long as `keep` runs.

    It is no proof, for this process may be frozen between any two of its instructions: appends are fenced by their
    epoch, and so are directives. But one that wakes up learns here that its time is over before it says anything.

    Args:
        log: whose lease it is.
        address: host:port at which whoever reads the lease finds this coordinator.
        takeover_s: silence after which a standby takes over.
        clock: seconds that do not stand still while this process is frozen.
    """

    def __init__(
        self,
        log: RunLog,
        address: str,
        *,
        takeover_s: float,
        clock: Callable[[], float] = _seconds_awake_or_not,
    ) -> None:
        self._log = log
        self.address = address
        self._takeover_s = takeover_s
        self._clock = clock
        self._renewed_at = self._answered_at = clock()
        self._renewed = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lease")

    async def keep(self) -> NoReturn:
        """Renew for ever.

        Raises:
            Fenced: another coordinator leads.
            LocalError: the disk failed.
        """
        loop = asyncio.get_running_loop()
        is_mirrored = True
        while True:
            began = self._clock()
            try:
                await loop.run_in_executor(self._thread, self._log.renew, self.address)
                self._renewed_at = self._answered_at = began
                self._renewed.set()
                is_mirrored = await self._mirror(was_mirrored=is_mirrored)
            except LogFull:
                # Nobody else leads, and whoever appends says so.
                self._answered_at = began
            except LogBusy:
                _log.warning("the run log is busy, so the lease was not renewed")
            await asyncio.sleep(self._takeover_s / RENEWALS)

    async def _mirror(self, *, was_mirrored: bool) -> bool:
        """Let the file beside the log follow it; it may be behind, and says so once."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._log.mirror)
        except OSError as error:
            if was_mirrored:
                _log.warning("%s is behind the run log: %s", MIRROR_FILE, error)
            return False
        return True

    async def certain(self) -> None:
        """Returns at once if no standby can have taken over, as far as this process knows; else when that is known."""
        while self._clock() - self._renewed_at > self._takeover_s:
            self._renewed.clear()
            await self._renewed.wait()

    async def lost(self) -> None:
        """Returns once the log has not answered for twice the time that a standby waits."""
        while (left_s := self._answered_at + 2 * self._takeover_s - self._clock()) > 0:  # noqa: ASYNC110 - by itself
            await asyncio.sleep(left_s)

    def close(self) -> None:
        """Wait for a renewal that is under way."""
        self._thread.shutdown(wait=True)


class PatientLog:
    """A run log that waits where the disk takes nothing instead of failing: its coordinator pauses for so long.

    Nothing that is not durable is announced meanwhile, for `append` does not return; what workers and clients say
    waits in their streams.

    Args:
        log: the `RunLog`.
        directory: the state directory, which is asked why it takes nothing; None: disks are taken to be full.
    """

    def __init__(self, log: AppendLog, directory: Path | None = None) -> None:
        self._log = log
        self._directory = directory
        self._stopping = threading.Event()
        self.obstacle = ""
        """Reason for which the newest append waits, with the cure; "" while the log takes entries."""

    def append(self, records: Sequence[Record]) -> None:
        """Append to the `RunLog`, waiting while it takes nothing.

        Raises:
            LogFull: there was no room until `stop`.
        """
        waits = False
        while True:
            try:
                self._log.append(records)
            except (LogFull, LogBusy) as error:
                self.obstacle = self._obstacle_of(error)
                if not waits:
                    _log.error("the run log takes nothing: %s; waiting: %s", error, self.obstacle)
                waits = True
                if self._stopping.wait(AGAIN_S):
                    raise
            else:
                if waits:
                    self.obstacle = ""
                    _log.info("the run log takes entries again")
                return

    def _obstacle_of(self, error: LocalError) -> str:
        """Reason of a failed append, asked anew each time: a full disk may become a read-only one."""
        if isinstance(error, LogBusy):
            return "another process writes to the run log and does not end"
        return "make room" if self._directory is None else obstacle_to_writing(self._directory)

    def read(self, job: JobId | None = None) -> Iterator[Record]:
        """Records of the `RunLog`, in order; of one job alone where it is named."""
        return self._log.read(job)

    def stop(self) -> None:
        """Wait for no room any more."""
        self._stopping.set()
