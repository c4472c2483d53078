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


def announce(number: int, envelope: Envelope, bundle: Bundle) -> TensorStart:
    """Message that precedes a bundle's parts on a stream; `number` grows from one bundle to the next."""
    metas = tuple(tensor.meta for tensor in bundle)
    return TensorStart(tensor=number, envelope=envelope, tensors=metas, num_bytes=bundle_bytes(bundle))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A part of a bundle, still where it lies."""

    offset: int
    pieces: list[memoryview]

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(len(piece) for piece in self.pieces)

    def data(self) -> bytes:
        """A copy of its bytes."""
        return b"".join(self.pieces)

    def message(self, number: int, *, has_checksum: bool = True) -> bytes:
        """The part as it travels."""
        data = self.pieces[0] if len(self.pieces) == 1 else memoryview(self.data())
        told = checksum(data) if has_checksum else 0
        return write_part(tensor=number, offset=self.offset, data=data, checksum=told)


def outgoing(bundle: Bundle, part_bytes: SizeOfNext = lambda: PART_BYTES) -> Iterator[Outgoing]:
    """The bytes of all tensors, one after the other, in parts of `part_bytes`, the last one shorter.

    Nothing is copied before `data` or `message`.
    """
    offset, pieces, room = 0, list[memoryview](), part_bytes()
    for tensor in bundle:
        rest = memoryview(tensor.data)
        while rest:
            pieces.append(rest[:room])
            rest = rest[room:]
            room -= len(pieces[-1])
            if not room:
                part = Outgoing(offset=offset, pieces=pieces)
                yield part
                offset, pieces, room = offset + part.num_bytes, [], part_bytes()
    if pieces:
        yield Outgoing(offset=offset, pieces=pieces)
