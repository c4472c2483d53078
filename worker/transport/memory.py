"""Lets the buffers that messages come and go in be kept, instead of returning their pages to the system each time.

Blocks of up to 32 MiB are kept by the C library, if it is told to; it can be told of no larger ones. Those are kept by
a `BufferPool`.
"""

import ctypes
import weakref
from typing import TypeAlias

import numpy as np

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Options of glibc's mallopt (malloc.h)."""
_LARGEST_KEPT = 32 << 20
_MOST_KEPT = 512 << 20
_GROWTH = 16 << 20


def keep_message_buffers() -> bool:
    """Make malloc reuse blocks of up to 32 MiB; call once, before the first message. False: no glibc, nothing done.

    By default each message of a megabyte is mapped and unmapped, and its pages are faulted in again: the transport
    then spends most of its time in the kernel. The price is up to 512 MiB that stay with the process once used.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    options = ((_MMAP_THRESHOLD, _LARGEST_KEPT), (_TRIM_THRESHOLD, _MOST_KEPT), (_TOP_PAD, _GROWTH))
    is_set = [mallopt(option, value) == 1 for option, value in options]
    return all(is_set)


Block: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"


class BufferPool:
    """Large blocks of memory that are used again once nobody refers to them any more; for any thread.

    A step asks for blocks of the same few sizes again and again. Fresh pages cost more than all else that is done with
    them: 64 MiB take 25 ms, or where huge pages must be made free first, 100 ms.

    Args:
        least_bytes: below this the C library does as well.
        most_bytes: of blocks that nobody uses; beyond that the oldest are given back to the system.
    """

    def __init__(self, *, least_bytes: int = _LARGEST_KEPT, most_bytes: int = _MOST_KEPT) -> None:
        self._least_bytes = least_bytes
        self._most_bytes = most_bytes
        # Each operation on it is one of the interpreter's, for a last reference may go at any time, in any thread.
        self._spare: dict[int, Block] = {}

    @property
    def spare_bytes(self) -> int:
        """Bytes of blocks that wait for use."""
        return sum(len(block) for block in tuple(self._spare.values()))

    def allocate(self, num_bytes: int) -> memoryview:
        """Writable memory of undefined content, aligned for every dtype. It comes back with its last reference."""
        if num_bytes < self._least_bytes:
            return np.empty(num_bytes, dtype=np.uint8).data
        block = self._take(num_bytes)
        lent = block.view()
        weakref.finalize(lent, self._take_back, block).atexit = False
        return lent.data

    def release(self) -> None:
        """Give all blocks that nobody uses back to the system: something else needs the memory now."""
        for key in tuple(self._spare):
            self._spare.pop(key, None)

    def _take(self, num_bytes: int) -> Block:
        for key, block in tuple(self._spare.items()):
            if len(block) == num_bytes and self._spare.pop(key, None) is not None:
                return block
        return np.empty(num_bytes, dtype=np.uint8)

    def _take_back(self, block: Block) -> None:
        self._spare[id(block)] = block
        for key in tuple(self._spare):
            if self.spare_bytes <= self._most_bytes:
                return
            self._spare.pop(key, None)
