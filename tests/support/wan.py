"""Small emulated networks, and packets to send over them."""

import struct
from collections.abc import Sequence

from client.lab.network.links import Access, DirectionSpec, LabNetwork, TimeSpan

ADDRESSES = (bytes([10, 77, 0, 1]), bytes([10, 77, 0, 2]), bytes([10, 77, 0, 3]))


def make_network(
    spec: DirectionSpec, num_endpoints: int = 2, *, seed: int = 0, accesses: Sequence[Access] | None = None
) -> LabNetwork:
    """Endpoints e0, e1, ... with the same link between each two."""
    count = range(num_endpoints)
    links = {(a, b): spec for a in count for b in count if a != b}
    return LabNetwork([f"e{i}" for i in count], links, accesses=accesses, seed=seed)


def sent_at(now: float) -> TimeSpan:
    """What is sent all at once."""
    return TimeSpan(now, now)


def make_frame(receiver: int, num_bytes: int = 100, *, mark: int = 0, segment_bytes: int = 0) -> bytes:
    """A TUN frame with a TCP packet of so many bytes, headers included, for the endpoint."""
    header = struct.pack("=BBHHHH", 1, 1 if segment_bytes else 0, 40, segment_bytes, 20, 16)
    ip = bytes([0x45, 0]) + struct.pack(">H", num_bytes) + bytes(12) + ADDRESSES[receiver]
    tcp = bytes(12) + bytes([5 << 4]) + bytes(7)
    return header + (ip + tcp + bytes([mark]) * num_bytes)[:num_bytes]
