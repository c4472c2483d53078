"""A worker's data, opened once for each job and beside whatever else it does."""

import asyncio
import logging
import os
import threading
from functools import partial
from pathlib import Path

from skein.config.job import JobSpec
from skein.data.agreement import other_data
from skein.errors import UnfitError
from skein.storage.outside import Outside, SilentError
from skein.storage.roots import EVERYTHING, Roots
from worker.data.cache import TokenCache
from worker.data.dataset import Dataset, open_dataset

_log = logging.getLogger(__name__)

_NICENESS = 10
"""Niceness of opening data that nobody waits for: other workers of the machine train meanwhile."""


class Datasets:
    """The data of one job at a time.

    Args:
        outside: asks file systems, which may never answer.
        roots: where files may lie.
        cache: folder of tokens; None: they are not kept.
    """

    def __init__(
        self, outside: Outside | None = None, *, roots: Roots = EVERYTHING, cache: Path | None = None
    ) -> None:
        self._outside = Outside() if outside is None else outside
        self._roots = roots
        self._cache = TokenCache(cache)
        self._opening: tuple[JobSpec, asyncio.Task[Dataset]] | None = None

    async def open(self, job: JobSpec, *, trained_on: str = "", is_awaited: bool = True) -> Dataset:
        """The data of a job; all who ask while they are being opened get the same.

        Data that are open already, and are not those that the job was trained on, are opened once more: their files may
        have been put back meanwhile.

        Args:
            trained_on: fingerprint of the data that the job was trained on; "": any data will do.
            is_awaited: others stand still until they are here.

        Raises:
            UnfitError: they cannot be had here, or are other data than the job was trained on.
            UserError: they are not what the job says.
        """
        opened = self._opened_before(job)
        if opened is None or opened.has_changed or (trained_on and opened.fingerprint != trained_on):
            opened = await self._joined(job, is_anew=opened is not None, is_awaited=is_awaited)
        if trained_on and opened.fingerprint != trained_on:
            # The next question is about the files of that time.
            self.forget()
            raise other_data(opened.fingerprint, trained_on)
        return opened

    def _opened_before(self, job: JobSpec) -> Dataset | None:
        """Data of this job that are open; None where they are not, or not yet."""
        if self._opening is None or self._opening[0] != job or not self._opening[1].done():
            return None
        return None if _has_failed(self._opening[1]) else self._opening[1].result()

    async def _joined(self, job: JobSpec, *, is_anew: bool, is_awaited: bool) -> Dataset:
        """Data of an opening that is under way, or that begins now."""
        if is_anew or self._opening is None or self._opening[0] != job or _has_failed(self._opening[1]):
            self.forget()
            self._opening = (job, asyncio.create_task(self._open(job, is_awaited=is_awaited)))
        return await asyncio.shield(self._opening[1])

    def forget(self) -> None:
        """The job is over: close its data."""
        if self._opening is not None:
            self._opening[1].cancel()
        self._opening = None

    async def _open(self, job: JobSpec, *, is_awaited: bool) -> Dataset:
        began_s = asyncio.get_running_loop().time()
        try:
            dataset = await self._outside.answer(partial(self._read, job, is_awaited=is_awaited), "data")
        except SilentError as error:
            raise UnfitError("data", job.name, f"cannot be read on this worker: {error}") from error
        except OSError as error:
            reason = error.strerror or error
            raise UnfitError("data", job.name, f"cannot be opened on this worker: {reason}") from error
        elapsed_s = asyncio.get_running_loop().time() - began_s
        _log.info("data=%s opened in %.1f s: %s", dataset.fingerprint[:12], elapsed_s, dataset.shown)
        return dataset

    def _read(self, job: JobSpec, *, is_awaited: bool) -> Dataset:
        """On a thread of its own."""
        if not is_awaited:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        return open_dataset(
            job.data, job.model, seed=job.seed, batch=job.step_batch, roots=self._roots, cache=self._cache
        )


def _has_failed(task: asyncio.Task[Dataset]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
