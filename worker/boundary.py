"""The boundary log: what this worker's stages have made of the running step, as it travels, until the step commits.

Rules of this file
- It is a cache: what it lacks is computed again. So it never refuses, and never grows beyond its budgets: above the one
  for memory the oldest entries go to an unnamed file, above the one for the disk they are forgotten. Where the disk is
  slower than what is to go there, as much again as the budget for memory waits for it, and what is more is forgotten.
- Entries are written by a thread of their own; what is being written is still read from memory.
"""

import logging
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from skein.protocol.worker.ops import HopKey
from skein.types import Step
from skein.wire.extra import TensorMeta
from worker.bundle import Bundle, WireTensor, bundle_bytes
from worker.compute.payload import Payload, pack

_log = logging.getLogger(__name__)

MEMORY_BYTES = 2 << 30
DISK_BYTES = 16 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spilled:
    """A bundle in the file: what it consists of, and where it begins."""

    metas: tuple[TensorMeta, ...]
    offset: int
    num_bytes: int


class TemporaryFile:
    """A file without a name in the folder for temporary files: it is gone with the process."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="skein-boundary-")  # noqa: SIM115 - as long as the process lives

    def write(self, offset: int, bundle: Bundle) -> None:
        """Put all bytes at `offset`; raises OSError if that fails."""
        for tensor in bundle:
            data = memoryview(tensor.data)
            while data:
                written = os.pwrite(self._file.fileno(), data, offset)
                data, offset = data[written:], offset + written

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Exactly `num_bytes` bytes at `offset`; raises OSError if they are not there."""
        data = os.pread(self._file.fileno(), num_bytes, offset)
        if len(data) < num_bytes:
            raise OSError(f"{len(data)} of {num_bytes} bytes are there")
        return data

    def truncate(self) -> None:
        """Forget everything."""
        os.ftruncate(self._file.fileno(), 0)


class BoundaryLog:
    """Boundary tensors by key. Belongs to the event loop's thread.

    Args:
        memory_bytes: budget of what is kept in memory.
        disk_bytes: budget of what is kept on disk.
        disk: made when the first entry goes there.
    """

    def __init__(
        self,
        *,
        memory_bytes: int = MEMORY_BYTES,
        disk_bytes: int = DISK_BYTES,
        disk: TemporaryFile | None = None,
    ) -> None:
        self.num_bytes = 0
        """In memory."""
        self.num_spilled_bytes = 0
        self._memory_bytes = memory_bytes
        self._disk_bytes = disk_bytes
        self._disk = disk
        self._in_memory: dict[HopKey, Bundle] = {}
        self._on_disk: dict[HopKey, _Spilled] = {}
        self._writing: dict[HopKey, tuple[Bundle, Future[None]]] = {}
        self._end = 0
        self._writer: ThreadPoolExecutor | None = None

    def put(self, key: HopKey, payload: Payload) -> tuple[HopKey, ...]:
        """Keep a payload, whose bytes do not change from now on; gives the keys that are forgotten for it."""
        bundle = pack(payload) if isinstance(payload, Mapping) else payload
        self._remove(key)
        self._in_memory[key] = bundle
        self.num_bytes += bundle_bytes(bundle)
        forgotten = self._settle()
        while self.num_bytes > self._memory_bytes and len(self._in_memory) > 1:
            oldest = next(iter(self._in_memory))
            if not self._spill(oldest):
                self._remove(oldest)
                forgotten.append(oldest)
        return tuple(forgotten)

    def add(self, key: HopKey, payload: Payload) -> tuple[HopKey, ...]:
        """Keep more tensors with a bundle, if it is kept, in the place of those of the same names."""
        kept = self.get(key)
        if kept is None:
            return ()
        more = pack(payload) if isinstance(payload, Mapping) else payload
        names = {tensor.name for tensor in more}
        return self.put(key, (*(tensor for tensor in kept if tensor.name not in names), *more))

    def get(self, key: HopKey) -> Bundle | None:
        """Bundle kept under a key; None if it is not kept."""
        if key in self._writing:
            return self._writing[key][0]
        if key in self._in_memory:
            return self._in_memory[key]
        return self._read(key) if key in self._on_disk else None

    def drop_steps(self, step: Step) -> None:
        """`step` is committed: what belongs to it or to one before goes."""
        self._settle()
        for key in [key for key in (*self._in_memory, *self._on_disk) if key.step <= step]:
            self._remove(key)
        if self._disk is not None and not self._on_disk and not self._writing:
            self._end = 0
            self._disk.truncate()

    def clear(self) -> None:
        """Forget everything."""
        for key in (*self._in_memory, *self._on_disk):
            self._remove(key)

    def close(self) -> None:
        """Write no more."""
        if self._writer is not None:
            self._writer.shutdown(wait=False, cancel_futures=True)

    # --- the disk ---

    def _spill(self, key: HopKey) -> bool:
        """Send an entry to the disk; False if there is no room, or too much waits for it."""
        bundle = self._in_memory[key]
        num_bytes = bundle_bytes(bundle)
        if self.num_spilled_bytes + num_bytes > self._disk_bytes:
            return False
        num_waiting = sum(bundle_bytes(waiting) for waiting, _ in self._writing.values())
        if self._writing and num_waiting + num_bytes > self._memory_bytes:
            return False
        if self._disk is None:
            self._disk = TemporaryFile()
        if self._writer is None:
            self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="boundary")
        del self._in_memory[key]
        self.num_bytes -= num_bytes
        metas = tuple(tensor.meta for tensor in bundle)
        self._on_disk[key] = _Spilled(metas=metas, offset=self._end, num_bytes=num_bytes)
        self._writing[key] = bundle, self._writer.submit(self._disk.write, self._end, bundle)
        self._end += num_bytes
        self.num_spilled_bytes += num_bytes
        return True

    def _settle(self) -> list[HopKey]:
        """Let go of what has been written; gives what could not be."""
        lost: list[HopKey] = []
        for key in [key for key, (_, future) in self._writing.items() if future.done()]:
            _, future = self._writing.pop(key)
            error = None if future.cancelled() else future.exception()
            if error is not None:
                _log.warning("boundary log: an entry could not be written, and is forgotten: %s", error)
                self._remove(key)
                lost.append(key)
        return lost

    def _read(self, key: HopKey) -> Bundle | None:
        spilled = self._on_disk[key]
        assert self._disk is not None
        try:
            data = memoryview(self._disk.read(spilled.offset, spilled.num_bytes))
        except OSError as error:
            _log.warning("boundary log: an entry could not be read: %s", error)
            return None
        bundle, start = [], 0
        for meta in spilled.metas:
            # Copied, for a tensor shares its bytes, and these must be aligned and writable.
            piece = memoryview(bytearray(data[start : start + meta.num_bytes]))
            bundle.append(WireTensor(name=meta.name, dtype=meta.dtype, shape=meta.shape, data=piece))
            start += meta.num_bytes
        return tuple(bundle)

    def _remove(self, key: HopKey) -> None:
        bundle = self._in_memory.pop(key, None)
        if bundle is not None:
            self.num_bytes -= bundle_bytes(bundle)
        spilled = self._on_disk.pop(key, None)
        if spilled is not None:
            self.num_spilled_bytes -= spilled.num_bytes
            self._writing.pop(key, None)
