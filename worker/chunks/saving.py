"""Writes stages of checkpoints beside training, and tells that bytes move while something is written or built."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from skein.errors import SkeinError
from skein.protocol.messages.reports import CheckpointUnwritten, CheckpointWritten
from skein.protocol.worker.worker_io import BytesMoved, WorkerEvent
from skein.storage.outside import NoRoomError, Outside, SilentError
from skein.storage.places import Places
from skein.units import format_bytes
from worker.chunks.build import Files, archive_of
from worker.chunks.checkpoint import write_stage
from worker.compute.state import Saved
from worker.executor import one_line
from worker.telling.metrics import WorkerMetrics
from worker.transport.coordinator import FullError

_log = logging.getLogger(__name__)

_PAUSES_S = (0.5, 2.0, 8.0)
"""Between tries."""
_TOLD_AT_ONCE = (NoRoomError, FullError, SilentError)
"""A full or silent place is not tried again here: whoever needs the checkpoint asks again, later."""
_MOVED_S = 1.0
"""Seconds between two `BytesMoved` events, at least."""


class MovingBytes:
    """Tells the machine that bytes move, as often as `num_moved` has grown.

    Args:
        post: hands the machine an event.
        num_moved: grows while files are read or written and while state comes in.
    """

    def __init__(self, post: Callable[[WorkerEvent], None], num_moved: Callable[[], int]) -> None:
        self._post = post
        self._num_moved = num_moved

    @contextmanager
    def told(self) -> Iterator[None]:
        """Post `BytesMoved` as bytes move, while this context is entered."""
        telling = asyncio.get_running_loop().create_task(self._tell())
        try:
            yield
        finally:
            telling.cancel()

    async def _tell(self) -> None:
        seen = self._num_moved()
        while True:
            await asyncio.sleep(_MOVED_S)
            before, seen = seen, self._num_moved()
            if seen != before:
                self._post(BytesMoved())


class Saver:
    """Writes what was copied of chunks to where checkpoints lie, if `places` takes that."""

    def __init__(
        self, files: Files, outside: Outside, moves: MovingBytes, metrics: WorkerMetrics, *, places: Places
    ) -> None:
        self._files = files
        self._places = places
        self._outside = outside
        self._moves = moves
        self._metrics = metrics

    async def save(self, saved: Saved) -> CheckpointWritten | CheckpointUnwritten:
        """Write a stage of a checkpoint, trying again if that fails for what may pass quickly."""
        with self._moves.told():
            for pause_s in (*_PAUSES_S, None):
                try:
                    return await self._write(saved)
                except (OSError, SkeinError) as error:
                    if pause_s is None or isinstance(error, _TOLD_AT_ONCE):
                        return _not_written(saved, error)
                await asyncio.sleep(pause_s)
        raise AssertionError("the last try returns")

    async def _write(self, saved: Saved) -> CheckpointWritten:
        """Write it once.

        Raises:
            OSError | SkeinError: it could not be.
        """
        generation, version, stage = saved.generation, saved.version, saved.stage
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        archive = archive_of(saved.url, self._files, saved.job_id, version, self._places)
        write = partial(
            write_stage,
            stage,
            generation,
            archive,
            params=saved.params,
            state=saved.state,
            walker=saved.walker,
        )
        files = await self._outside.answer(write, saved.url or "the coordinator")
        num_bytes = sum(file.num_bytes for file in files)
        elapsed_s = loop.time() - began_s
        self._metrics.checkpoint_written(elapsed_s, num_bytes)
        _log.info(
            "checkpoint=%d stage=%d written: %s in %.1f s",
            version,
            stage,
            format_bytes(num_bytes),
            elapsed_s,
        )
        return CheckpointWritten(
            generation=generation, version=version, stage=stage, files=files, walker=saved.walker
        )


def _not_written(saved: Saved, error: OSError | SkeinError) -> CheckpointUnwritten:
    reason = str(error) if isinstance(error, _TOLD_AT_ONCE) else one_line(error)
    _log.warning("checkpoint=%d stage=%d not written: %s", saved.version, saved.stage, reason)
    return CheckpointUnwritten(
        generation=saved.generation,
        version=saved.version,
        stage=saved.stage,
        reason=reason,
        walker=saved.walker,
    )
