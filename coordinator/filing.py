"""Reads and writes checkpoints for the driver, one call at a time per place, and turns results into events.

A place is a checkpoint URL, or the coordinator's own store. A place that hangs delays its own jobs only. After one call
was given up there, further calls fail at once for a while: a queue of calls does not wait for one after another.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from coordinator.checkpoints import CheckpointStore, DamagedError
from skein.config.job import JobSpec
from skein.errors import SkeinError
from skein.protocol.coordinator.coordinator_io import CheckpointVerified, ManifestWritten, PruneCheckpoints
from skein.protocol.log.records import CheckpointCommitted
from skein.storage.outside import Outside, SilentError
from skein.types import Condition

_log = logging.getLogger("coordinator")


REFUSES_S = 15.0
"""Seconds after a call was given up in which its place is not called again."""


class _Place:
    """Calls to one place of checkpoints, in turn; they fail at once for a while after one was given up."""

    def __init__(self, outside: Outside, name: str) -> None:
        self._outside = outside
        self._name = name
        self._turn = asyncio.Lock()
        self._silent_at: float | None = None

    async def ask(self, function: Callable[[], None]) -> None:
        """Call `function` when all earlier calls to this place are over.

        Raises:
            SilentError: it hangs, or an earlier call hung within the last `REFUSES_S`.
        """
        async with self._turn:
            if self._silent_at is not None and time.monotonic() < self._silent_at + REFUSES_S:
                raise SilentError(f"{self._name} did not answer a moment ago: is it mounted, and reachable?")
            try:
                await self._outside.answer(function, self._name)
            except SilentError:
                self._silent_at = time.monotonic()
                raise
            self._silent_at = None


class Filing:
    """The files of all jobs' checkpoints.

    Args:
        files: all jobs' checkpoints.
        outside: calls the places, which may hang.
    """

    def __init__(self, files: CheckpointStore, outside: Outside | None = None) -> None:
        self._files = files
        self._completing = asyncio.Lock()
        self._outside = Outside() if outside is None else outside
        self._place_by_url: dict[str | None, _Place] = {}

    @asynccontextmanager
    async def completing(self) -> AsyncIterator[None]:
        """While this lasts, no other checkpoint is completed, and no other file of one is put in place."""
        async with self._completing:
            yield

    async def write_manifest(self, checkpoint: CheckpointCommitted, spec: JobSpec) -> ManifestWritten:
        """Make a checkpoint exist, if its files are what was written."""
        error = None
        write = partial(self._files.write_manifest, checkpoint, spec)
        try:
            if checkpoint.url is None:
                async with self._completing:
                    await self._ask(checkpoint.url, write)
            else:  # Uploads go to the coordinator's own store alone, and must not wait for another place.
                await self._ask(checkpoint.url, write)
        except (SkeinError, OSError) as cause:
            error = str(cause)
        return ManifestWritten(checkpoint=checkpoint, error=error)

    async def verify(self, checkpoint: CheckpointCommitted) -> CheckpointVerified:
        """Condition of a checkpoint, found by reading all of it."""
        found = partial(CheckpointVerified, checkpoint=checkpoint)
        try:
            await self._ask(checkpoint.url, partial(self._files.verify, checkpoint))
        except DamagedError as cause:
            return found(condition=Condition.DAMAGED, reason=str(cause))
        except (SkeinError, OSError) as cause:
            return found(condition=Condition.UNKNOWN, reason=str(cause))
        return found(condition=Condition.WHOLE)

    async def prune(self, command: PruneCheckpoints) -> None:
        """Delete what is not kept; what cannot be deleted stays, and is told."""
        try:
            prune = partial(self._files.prune, command.job, command.url, command.keep, command.drop)
            await self._ask(command.url, prune)
        except (SkeinError, OSError) as cause:
            _log.warning("job=%s old checkpoints stay: %s", command.job, cause)

    async def _ask(self, url: str | None, function: Callable[[], None]) -> None:
        if (place := self._place_by_url.get(url)) is None:
            name = "the coordinator's checkpoints" if url is None else f"checkpoint.url {url}"
            place = self._place_by_url[url] = _Place(self._outside, name)
        await place.ask(function)
