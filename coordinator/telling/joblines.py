"""Passing happenings of a running job (lines, changes of state), kept with it: one file each, and none grows for ever.

One thread writes, so that a slow disk holds nobody up, and one that does not answer keeps neither readers nor the end
of the process. A line that cannot be written is lost to those who ask after a restart, and that is said; training never
waits for it.
"""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Thread

from google.protobuf import json_format

from skein.storage.outside import Outside, SilentError, call_moved
from skein.types import JobId
from skein.wire import codec
from skein.wire.v1 import jobs_pb2
from skein.wire.views import JobEvent

FOLDER = "job-logs"
MAX_BYTES = 2 << 20
"""Limit on the lines of one job; the older half goes when there is more."""
MAX_TOTAL_BYTES = 256 << 20
"""Limit on the lines of all jobs; files that were written to the longest ago go."""
MAX_WAITING = 10_000
"""Lines that may wait to be written. More come only where the disk stands still; those are not kept."""
_log = logging.getLogger("coordinator")


class JobLines:
    """Files in `folder`, one JSON object a line.

    Args:
        folder: made when there is something to keep.
        max_bytes: see `MAX_BYTES`.
        max_total_bytes: see `MAX_TOTAL_BYTES`.
        outside: asks the disk, which may never answer.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int = MAX_BYTES,
        max_total_bytes: int = MAX_TOTAL_BYTES,
        outside: Outside | None = None,
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._outside = Outside() if outside is None else outside
        self._waiting: SimpleQueue[tuple[JobId, JobEvent] | None] = SimpleQueue()
        self._writer: Thread | None = None
        self._num_given = 0
        self._num_written = 0
        self._has_written = Condition()
        self._is_failing = False

    def append(self, job: JobId, event: JobEvent) -> None:
        """Keep an event; never waits."""
        if self._num_given - self._num_written >= MAX_WAITING:
            self._failed("the disk stands still")
            return
        if self._writer is None:
            self._writer = Thread(target=self._write_all, name="job-lines", daemon=True)
            self._writer.start()
        self._num_given += 1
        self._waiting.put((job, event))

    async def read(self, job: JobId) -> list[JobEvent]:
        """All events of a job that are kept, those given to `append` before this included, oldest first.

        None where the disk does not answer.
        """
        try:
            return await self._outside.answer(
                partial(self._read, job, self._num_given), f"the lines of {job}"
            )
        except SilentError as error:
            self._failed(str(error))
            return []

    async def close(self) -> None:
        """Write what waits, as far as the disk takes it, and end."""
        try:
            await self._outside.answer(partial(self._await_written, self._num_given), "the lines of jobs")
        except SilentError as error:
            self._failed(str(error))
        self._waiting.put(None)

    def _await_written(self, num_lines: int) -> None:
        """Until so many are; each is a sign of life."""
        with self._has_written:
            while self._num_written < num_lines:
                self._has_written.wait()
                call_moved()

    def _read(self, job: JobId, num_lines: int) -> list[JobEvent]:
        self._await_written(num_lines)
        return list(self._events(job))

    def _write_all(self) -> None:
        """On a thread of its own, until it is closed."""
        while (given := self._waiting.get()) is not None:
            try:
                self._write(*given)
            finally:
                # Readers wait for those before them, whatever became of each.
                with self._has_written:
                    self._num_written += 1
                    self._has_written.notify_all()

    def _write(self, job: JobId, event: JobEvent) -> None:
        path = self._path(job)
        try:
            text = json_format.MessageToJson(codec.JOB_EVENT.encode(event), indent=None)
            is_new = not path.exists()
            if is_new:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._make_room()
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")
                num_bytes = file.tell()
            if num_bytes > self._max_bytes:
                self._halve(path)
        except OSError as error:
            self._failed(error.strerror or str(error))
        else:
            self._is_failing = False

    def _failed(self, reason: str) -> None:
        if not self._is_failing:
            _log.warning("lines of jobs are not kept in %s: %s", self._folder, reason)
        self._is_failing = True

    def _halve(self, path: Path) -> None:
        """Keeps the newer half."""
        content = path.read_bytes()
        start = content.find(b"\n", len(content) // 2) + 1
        shorter = path.with_suffix(".new")
        shorter.write_bytes(content[start:])
        shorter.replace(path)

    def _make_room(self) -> None:
        """Deletes the files that were written to the longest ago, until there is room for another."""
        sizes = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in self._folder.iterdir())
        total = sum(size for _, size, _ in sizes) + self._max_bytes
        for _, size, path in sizes:
            if total <= self._max_total_bytes:
                return
            path.unlink()
            total -= size

    def _events(self, job: JobId) -> Iterator[JobEvent]:
        try:
            lines = self._path(job).read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return
        except OSError as error:
            self._failed(error.strerror or str(error))
            return
        for line in lines:
            try:
                yield codec.JOB_EVENT.decode(json_format.Parse(line, jobs_pb2.JobEvent()))
            except (json_format.ParseError, ValueError):
                continue  # torn by a crash, or written by another release

    def _path(self, job: JobId) -> Path:
        return self._folder / f"{job}.jsonl"
