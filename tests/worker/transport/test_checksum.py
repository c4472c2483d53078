"""What the checksum sees, by an oracle that adds words one by one, and by spoiling bytes."""

import random
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.transport.checksum import checksum

ROW = 1024


def by_hand(data: bytes) -> int:
    """As the proto describes it, word by word."""
    num_rows = len(data) // (8 * ROW)
    whole = data[: 8 * ROW * num_rows]
    words = struct.unpack(f"<{ROW * num_rows}Q", whole)
    rows = [words[ROW * i : ROW * (i + 1)] for i in range(num_rows)]
    sums = [sum(row) for row in rows] + ([sum(column) for column in zip(*rows, strict=True)] if rows else [])
    packed = b"".join(struct.pack("<Q", value % 2**64) for value in sums)
    return zlib.crc32(packed + data[len(whole) :])


@pytest.mark.parametrize("num_bytes", [0, 1, 8191, 8192, 8193, 3 * 8192 + 5, 1 << 18])
def test_sums_are_those_of_the_words(num_bytes: int) -> None:
    data = random.Random(num_bytes).randbytes(num_bytes)
    assert checksum(data) == checksum(memoryview(data)) == by_hand(data)


def test_where_the_bytes_lie_does_not_matter() -> None:
    data = random.Random(1).randbytes(1 << 16)
    assert checksum(memoryview(b"abc" + data)[3:]) == checksum(data)


@given(seed=st.integers(0, 2**32), num_words=st.integers(1, 3))
def test_a_fault_of_up_to_three_words_is_seen(seed: int, num_words: int) -> None:
    draw = random.Random(seed)
    data = bytearray(draw.randbytes(1 << 15))
    expected = checksum(bytes(data))
    for word in draw.sample(range(len(data) // 8), num_words):
        data[8 * word + draw.randrange(8)] ^= 1 << draw.randrange(8)
    assert checksum(bytes(data)) != expected


@given(seed=st.integers(0, 2**32))
def test_opposite_faults_in_one_row_or_one_column_are_seen(seed: int) -> None:
    draw = random.Random(seed)
    words = [draw.randrange(1, 2**63) for _ in range(4 * ROW)]
    expected = checksum(struct.pack(f"<{len(words)}Q", *words))
    here, there = draw.choice([(5, 9), (5, 5 + ROW)])
    words[here] += 1
    words[there] -= 1
    assert checksum(struct.pack(f"<{len(words)}Q", *words)) != expected


@pytest.mark.parametrize("num_bytes", [8, 8 * ROW, 2 * 8 * ROW], ids=["words", "rows", "pairs of rows"])
def test_what_has_changed_places_is_seen(num_bytes: int) -> None:
    data = random.Random(7).randbytes(8 * 8 * ROW)
    swapped = data[num_bytes : 2 * num_bytes] + data[:num_bytes] + data[2 * num_bytes :]
    assert checksum(swapped) != checksum(data)


def test_a_burst_is_seen() -> None:
    data = bytearray(random.Random(3).randbytes(1 << 16))
    expected = checksum(bytes(data))
    data[4000:20000] = bytes(16000)
    assert checksum(bytes(data)) != expected
