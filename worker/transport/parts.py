"""Cuts a bundle's bytes into parts."""

import zlib
from collections.abc import Callable, Iterator

from skein.protocol.tensors import Envelope
from skein.wire.channel import PART_BYTES
from skein.wire.extra import TensorData, TensorStart
from worker.bundle import Bundle, num_bytes_of

SizeOfNext = Callable[[], int]
"""Says how many bytes the next part is to have; asked for each."""


def full_size() -> int:
    """For whoever sends parts as large as they may be."""
    return PART_BYTES


def cut(bundle: Bundle, part_bytes: SizeOfNext = full_size) -> Iterator[bytes]:
    """The bytes of all tensors, one after the other, in parts of `part_bytes`, the last one shorter.

    Nothing is copied before its part is asked for.
    """
    pieces: list[memoryview] = []
    room = part_bytes()
    for tensor in bundle:
        rest = memoryview(tensor.data)
        while rest:
            pieces.append(rest[:room])
            rest = rest[room:]
            room -= len(pieces[-1])
            if not room:
                yield b"".join(pieces)
                pieces, room = [], part_bytes()
    if pieces:
        yield b"".join(pieces)


def announce(number: int, envelope: Envelope, bundle: Bundle) -> TensorStart:
    """What precedes a bundle's parts on a stream; `number` grows from one to the next."""
    metas = tuple(tensor.meta for tensor in bundle)
    return TensorStart(tensor=number, envelope=envelope, tensors=metas, num_bytes=num_bytes_of(bundle))


def data_parts(number: int, bundle: Bundle, part_bytes: SizeOfNext = full_size) -> Iterator[TensorData]:
    """A bundle's bytes with offsets and checksums, each made when it is asked for."""
    offset = 0
    for data in cut(bundle, part_bytes):
        yield TensorData(tensor=number, offset=offset, data=data, crc32=zlib.crc32(data))
        offset += len(data)
