"""Data parts as they lie in a message, written and read without copying them through a message object.

A `TensorPart` with `TensorData` in it is nearly all bytes. protobuf would copy those into the message and out of it, at
both ends; here they are joined once to what precedes them, and read in place. What comes out is the message of the
proto, field by field, so either end may as well use protobuf; whatever does not look like what is written here is left
to protobuf to read.

Source: Protocol Buffers Encoding, "Base 128 Varints", "Length-Delimited Records" and "Field Order".
"""

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from skein.errors import RemoteError
from skein.protocol.messages.ranges import RANGES
from skein.wire.codec import TENSOR_PART
from skein.wire.extra import TensorPart
from skein.wire.v1 import peer_pb2

SERVICE = "skein.wire.v1.Peer"
DELIVER = f"/{SERVICE}/Deliver"
"""The method whose messages these are."""

_PART_TAG = 0x12  # TensorPart.tensor_data, field 2, length-delimited
_NUMBER_TAG, _OFFSET_TAG, _CHECKSUM_TAG, _DATA_TAG = 0x08, 0x10, 0x28, 0x1A
_LONGEST = 10
"""Bytes of a varint."""
_MAX_NUMBER, _MAX_OFFSET = RANGES["tensor"].most, RANGES["offset"].most


@dataclass(frozen=True, slots=True, kw_only=True)
class FramedPart:
    """`TensorData` whose bytes lie in the message it came in."""

    tensor: int
    offset: int
    data: memoryview
    checksum: int


def write_part(*, tensor: int, offset: int, data: memoryview, checksum: int) -> bytes:
    """The message of a part whose bytes are `data`."""
    head = bytearray((_NUMBER_TAG,))
    _put(head, tensor)
    head.append(_OFFSET_TAG)
    _put(head, offset)
    head.append(_CHECKSUM_TAG)
    _put(head, checksum)
    head.append(_DATA_TAG)
    _put(head, len(data))
    outer = bytearray((_PART_TAG,))
    _put(outer, len(head) + len(data))
    return b"".join((outer, head, data))


def read_part(message: bytes) -> TensorPart | FramedPart:
    """Part that a message on a Deliver stream carries.

    Raises:
        RemoteError: it is no message, or one that says nothing this release knows.
    """
    part = _read_data(message)
    if part is not None:
        return part
    try:
        return TENSOR_PART.decode(peer_pb2.TensorPart.FromString(message))
    except DecodeError as error:
        raise RemoteError(f"TensorPart: not a message: {error}") from error


def _read_data(message: bytes) -> FramedPart | None:
    """A part written by `write_part`; None if it is anything else."""
    fields = [0, 0, 0, 0, 0]
    at = 0
    for i, tag in enumerate((_PART_TAG, _NUMBER_TAG, _OFFSET_TAG, _CHECKSUM_TAG, _DATA_TAG)):
        if at >= len(message) or message[at] != tag:
            return None
        found = _get(message, at + 1)
        if found is None:
            return None
        fields[i], at = found
        if i == 0 and fields[0] != len(message) - at:
            return None
    _, tensor, offset, checksum, num_bytes = fields
    if num_bytes != len(message) - at or checksum >= 2**32 or tensor > _MAX_NUMBER or offset > _MAX_OFFSET:
        return None
    return FramedPart(tensor=tensor, offset=offset, data=memoryview(message)[at:], checksum=checksum)


def _put(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _get(message: bytes, at: int) -> tuple[int, int] | None:
    """A varint and where the next field begins."""
    value = 0
    for i, byte in enumerate(message[at : at + _LONGEST]):
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, at + i + 1
    return None
