"""A router for packets as Linux hands them out at a TUN device. No I/O: frames in, and frames out when they are due.

A frame is a virtio-net header of `HEADER_BYTES` and an IPv4 packet. With segmentation left to us, one frame may stand
for many packets of one TCP connection: the header says so, and such a batch is handed on whole.

Source: struct virtio_net_hdr of linux/virtio_net.h; RFC 791 for the packet.
"""

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from client.lab.network.links import Drop, LabNetwork, TimeSpan

HEADER_BYTES = 10
_SEGMENT_BYTES = struct.Struct(
    "=4xH"
)  # past flags, kind and a hint that Linux does not mean as bytes of headers
_IPV4 = 4
_TO = slice(HEADER_BYTES + 16, HEADER_BYTES + 20)
_TCP_WORDS = 12
"""Offset at which a TCP header says how many 4-byte words it has."""
_MIN_FRAME_BYTES = HEADER_BYTES + 20


def destination(frame: bytes) -> bytes | None:
    """The IPv4 address that a frame is for, 4 bytes; None if it holds no IPv4 packet."""
    if len(frame) < _MIN_FRAME_BYTES or frame[HEADER_BYTES] >> 4 != _IPV4:
        return None
    return frame[_TO]


def wire_bytes(frame: bytes) -> int:
    """Bytes that the packets of a frame have together: those of a batch each have headers of their own."""
    num_bytes = len(frame) - HEADER_BYTES
    segment_bytes = int(_SEGMENT_BYTES.unpack_from(frame)[0])
    if segment_bytes == 0:
        return num_bytes
    ip_bytes = (frame[HEADER_BYTES] & 0xF) * 4
    headers_bytes = ip_bytes + (frame[HEADER_BYTES + ip_bytes + _TCP_WORDS] >> 4) * 4
    num_segments = -(-(num_bytes - headers_bytes) // segment_bytes)
    return num_bytes + max(0, num_segments - 1) * headers_bytes


@dataclass(slots=True)
class DirectionTraffic:
    """Traffic from one endpoint towards another."""

    num_frames: int = 0
    num_bytes: int = 0
    num_dropped: Counter[Drop] = field(default_factory=Counter)


class _UnderWay(NamedTuple):
    due_s: float
    number: int
    pair: tuple[int, int]
    frame: bytes
    num_bytes: int
    span: TimeSpan
    is_through: bool
    """The receiver's downlink included."""


class Router:
    """Holds frames until they are due.

    Args:
        network: its endpoints and links; it may change at any time.
        endpoint_by_address: IPv4 addresses, 4 bytes each.
    """

    def __init__(self, network: LabNetwork, endpoint_by_address: Mapping[bytes, int]) -> None:
        self.traffic = {pair: DirectionTraffic() for pair in network.lines}
        self.num_unroutable = 0
        self._network = network
        self._endpoint_by_address = dict(endpoint_by_address)
        self._under_way: list[_UnderWay] = []
        self._num_taken = 0

    def push(self, sender: int, frame: bytes, *, now: float) -> None:
        """Take what `sender` sends; it is dropped if it is for nobody here, or its way is cut, full or unlucky."""
        to = destination(frame)
        receiver = None if to is None else self._endpoint_by_address.get(to)
        pair = (sender, -1 if receiver is None else receiver)
        line = self._network.lines.get(pair)
        if line is None:
            self.num_unroutable += 1
            return
        traffic, num_bytes = self.traffic[pair], wire_bytes(frame)
        up = self._network.ups[sender]
        if up.is_full(now):
            traffic.num_dropped[Drop.QUEUE] += 1
            return
        sent = line.send(up.carry(TimeSpan(now, now), num_bytes), num_bytes)
        if isinstance(sent, Drop):
            traffic.num_dropped[sent] += 1
            return
        is_through = self._network.downs[pair[1]].bytes_per_s == inf
        self._put(pair, frame, num_bytes, sent, is_through=is_through)

    def deadline(self) -> float | None:
        """Time at which `pop` has something to do; None while nothing is under way."""
        return self._under_way[0].due_s if self._under_way else None

    def pop(self, *, now: float) -> list[tuple[int, bytes]]:
        """Frames that are due by now and whom each is for, in the order in which they arrive."""
        arrived = []
        while self._under_way and self._under_way[0].due_s <= now:
            first = heappop(self._under_way)
            receiver = first.pair[1]
            if first.is_through:
                traffic = self.traffic[first.pair]
                traffic.num_frames += 1
                traffic.num_bytes += first.num_bytes
                arrived.append((receiver, first.frame))
                continue
            down = self._network.downs[receiver]
            if down.is_full(first.due_s):
                self.traffic[first.pair].num_dropped[Drop.QUEUE] += 1
                continue
            span = down.carry(first.span, first.num_bytes)
            self._put(first.pair, first.frame, first.num_bytes, span, is_through=True)
        return arrived

    def _put(
        self, pair: tuple[int, int], frame: bytes, num_bytes: int, span: TimeSpan, *, is_through: bool
    ) -> None:
        self._num_taken += 1
        # The downlink serves by who comes first, which is known when the last byte is there.
        entry = _UnderWay(span.last_s, self._num_taken, pair, frame, num_bytes, span, is_through)
        heappush(self._under_way, entry)
