"""Lets the C library keep the buffers that messages come and go in, instead of returning their pages each time."""

import ctypes

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
