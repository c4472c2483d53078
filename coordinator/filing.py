"""Asks where checkpoints lie, one question after the other, and makes of what comes back what the machine hears."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from coordinator.checkpoints import CheckpointStore, DamagedError
from skein.config.job import JobSpec
from skein.errors import SkeinError
from skein.protocol.coordinator.coordinator_io import CheckpointVerified, ManifestWritten, PruneCheckpoints
from skein.protocol.log.records import CheckpointCommitted
from skein.storage.outside import Outside
from skein.types import Condition

_log = logging.getLogger("coordinator")


class Filing:
    """The files of all jobs' checkpoints. A place that does not answer holds the next question up for so long only."""

    def __init__(self, files: CheckpointStore) -> None:
        self._files = files
        self._turn = asyncio.Lock()
        self._completing = asyncio.Lock()
        self._outside = Outside()

    @asynccontextmanager
    async def completing(self) -> AsyncIterator[None]:
        """While this lasts, no other checkpoint is completed, and no other file of one is put in place."""
        async with self._completing:
            yield

    async def write_manifest(self, checkpoint: CheckpointCommitted, spec: JobSpec) -> ManifestWritten:
        """Make a checkpoint exist, if its files are what was written."""
        error = None
        try:
            async with self._completing:
                await self._ask(checkpoint.url, partial(self._files.write_manifest, checkpoint, spec))
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
        where = "the coordinator's checkpoints" if url is None else f"checkpoint.url {url}"
        async with self._turn:
            await self._outside.answer(function, where)
