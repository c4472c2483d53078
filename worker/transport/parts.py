"""Cuts a bundle's bytes into parts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from skein.protocol.messages.tensors import Envelope
from skein.wire.channel import PART_BYTES
from skein.wire.extra import TensorStart
from worker.bundle import Bundle, bundle_bytes
from worker.transport.checksum import checksum
from worker.transport.framing import write_part

SizeOfNext = Callable[[], int]
"""Says how many bytes the next part is to have; asked for each."""


def full_size() -> int:
    """For whoever sends parts as large as they may be."""
    return PART_BYTES


def parts_of(bundle: Bundle, part_bytes: SizeOfNext = full_size) -> Iterator[bytes]:
    """The bytes of all tensors, one after the other, in parts of `part_bytes`, the last one shorter.

    Nothing is copied before its part is asked for.
    """
    return (b"".join(pieces) for pieces in pieces_of(bundle, part_bytes))


def pieces_of(bundle: Bundle, part_bytes: SizeOfNext = full_size) -> Iterator[list[memoryview]]:
    """Parts as of `parts_of`, but each as the pieces of memory that it consists of, not copied at all."""
    pieces: list[memoryview] = []
    room = part_bytes()
    for tensor in bundle:
        rest = memoryview(tensor.data)
        while rest:
            pieces.append(rest[:room])
            rest = rest[room:]
            room -= len(pieces[-1])
            if not room:
                yield pieces
                pieces, room = [], part_bytes()
    if pieces:
        yield pieces


def announce(number: int, envelope: Envelope, bundle: Bundle) -> TensorStart:
    """Message that precedes a bundle's parts on a stream; `number` grows from one bundle to the next."""
    metas = tuple(tensor.meta for tensor in bundle)
    return TensorStart(tensor=number, envelope=envelope, tensors=metas, num_bytes=bundle_bytes(bundle))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A part of a bundle, still where it lies."""

    offset: int
    pieces: list[memoryview]
    num_bytes: int

    def message(self, number: int) -> bytes:
        """The part as it travels, with its checksum."""
        pieces = self.pieces if len(self.pieces) == 1 else [memoryview(b"".join(self.pieces))]
        return write_part(tensor=number, offset=self.offset, data=pieces[0], checksum=checksum(pieces[0]))


def outgoing(bundle: Bundle, part_bytes: SizeOfNext = full_size) -> Iterator[Outgoing]:
    """A bundle's bytes in parts, one after the other; nothing is copied before `message`."""
    offset = 0
    for pieces in pieces_of(bundle, part_bytes):
        num_bytes = sum(len(piece) for piece in pieces)
        yield Outgoing(offset=offset, pieces=pieces, num_bytes=num_bytes)
        offset += num_bytes
