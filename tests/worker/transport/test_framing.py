"""Parts written and read by hand are the messages of the proto."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skein.errors import RemoteError
from skein.wire.codec import TENSOR_PART
from skein.wire.extra import TensorData, TensorStart
from skein.wire.v1 import peer_pb2
from tests.worker.transport.loopback import hop_envelope
from worker.transport.framing import FramedPart, read_part, write_part

NUMBERS = st.integers(0, 2**63 - 1)
OFFSETS = st.integers(0, 2**60)
CHECKSUMS = st.integers(0, 2**32 - 1)


@given(tensor=NUMBERS, offset=OFFSETS, data=st.binary(max_size=300), checksum=CHECKSUMS)
def test_what_is_written_reads_the_same_by_hand_and_by_protobuf(
    tensor: int, offset: int, data: bytes, checksum: int
) -> None:
    message = write_part(tensor=tensor, offset=offset, data=memoryview(data), checksum=checksum)
    part = read_part(message)
    assert part == FramedPart(tensor=tensor, offset=offset, data=memoryview(data), checksum=checksum)
    assert TENSOR_PART.decode(peer_pb2.TensorPart.FromString(message)) == TensorData(
        tensor=tensor, offset=offset, data=data, checksum=checksum
    )


@given(tensor=NUMBERS, offset=OFFSETS, data=st.binary(max_size=300), checksum=CHECKSUMS)
def test_what_protobuf_writes_is_read_too(tensor: int, offset: int, data: bytes, checksum: int) -> None:
    sent = TensorData(tensor=tensor, offset=offset, data=data, checksum=checksum)
    part = read_part(TENSOR_PART.encode(sent).SerializeToString())
    assert isinstance(part, TensorData | FramedPart)
    found = (part.tensor, part.offset, bytes(part.data), part.checksum)
    assert found == (tensor, offset, data, checksum)


def test_an_announcement_is_left_to_protobuf() -> None:
    start = TensorStart(tensor=3, envelope=hop_envelope(), tensors=(), num_bytes=0)
    assert read_part(TENSOR_PART.encode(start).SerializeToString()) == start


@given(data=st.binary(max_size=40))
def test_no_bytes_at_all_raise_anything_but_the_peers_fault(data: bytes) -> None:
    try:
        read_part(data)
    except RemoteError:
        return


@given(cut=st.integers(0, 60), spoilt=st.integers(0, 60), value=st.integers(0, 255))
def test_a_spoilt_head_never_reaches_beyond_the_message(cut: int, spoilt: int, value: int) -> None:
    message = bytearray(write_part(tensor=300, offset=1 << 20, data=memoryview(bytes(40)), checksum=2**31))
    message[spoilt % len(message)] = value
    try:
        part = read_part(bytes(message[: len(message) - cut % 20]))
    except RemoteError:
        return
    assert not isinstance(part, FramedPart) or len(part.data) <= 40


def test_an_integer_that_others_could_not_hold_is_refused() -> None:
    with pytest.raises(RemoteError, match=r"TensorData\.tensor"):
        read_part(write_part(tensor=2**63, offset=0, data=memoryview(b"x"), checksum=0))
