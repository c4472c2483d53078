"""Measurement of an emulated link: round trips and bytes through TCP, from one namespace to another."""

import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from math import inf
from statistics import median
from threading import Thread

from client.lab.control import EndpointStatus, LabStatus, LinkStatus
from client.lab.network.namespaces import inside
from skein.errors import SkeinError, UserError

_NUM_PINGS = 21
_PATIENCE_S = 20.0
_PIECE_BYTES = 1 << 18
_WARM_SHARE = 0.4
"""Share of the time, at its beginning, in which TCP finds out the bandwidth and nothing counts."""


class NotMeasured(SkeinError):
    """A connection could not be opened, or broke."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDirection:
    """A direction, as the preset has it or it was changed to, and as TCP finds it.

    Args:
        round_trip_s: that the latencies of both directions make, without jitter.
        measured_round_trip_s: the median of one byte there and back.
        measured_bytes_per_s: received once TCP has found its pace.
    """

    sender: str
    receiver: str
    round_trip_s: float
    bytes_per_s: float
    measured_round_trip_s: float
    measured_bytes_per_s: float


def measure_direction(status: LabStatus, sender: str, receiver: str, *, seconds: float) -> MeasuredDirection:
    """Measure the link from one endpoint to another; takes `seconds` and a bit.

    Raises:
        UserError: there is no such link, or it is no lab in namespaces.
        NotMeasured: nothing came through.
    """
    there, back = _link(status, sender, receiver), _link(status, receiver, sender)
    here, far = (_endpoint(status, name) for name in (sender, receiver))
    try:
        with _connected(here, far) as (near_end, far_end):
            round_trip_s = median(_ping(near_end, far_end) for _ in range(_NUM_PINGS))
            bytes_per_s = _rate(near_end, far_end, seconds)
    except OSError as error:
        raise NotMeasured(f"{sender} to {receiver}: {error}") from error
    return MeasuredDirection(
        sender=sender,
        receiver=receiver,
        round_trip_s=there.latency_s + back.latency_s,
        bytes_per_s=min(there.bytes_per_s, here.up_bytes_per_s or inf, far.down_bytes_per_s or inf),
        measured_round_trip_s=round_trip_s,
        measured_bytes_per_s=bytes_per_s,
    )


def _endpoint(status: LabStatus, name: str) -> EndpointStatus:
    found = [x for x in status.endpoints if x.name == name]
    if not found:
        raise UserError("endpoint", name, f"give one of {', '.join(x.name for x in status.endpoints)}")
    if found[0].namespace is None:
        raise UserError("mode", status.mode, "only a lab in namespaces can be measured from outside")
    return found[0]


def _link(status: LabStatus, sender: str, receiver: str) -> LinkStatus:
    found = [x for x in status.links if (x.sender, x.receiver) == (sender, receiver)]
    if not found:
        raise UserError("link", f"{sender} {receiver}", "give two different endpoints")
    return found[0]


@contextmanager
def _connected(here: EndpointStatus, far: EndpointStatus) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection."""
    with closing(_socket(far)) as server, closing(_socket(here)) as near_end:
        # Only the forwarded port leads behind NAT.
        server.bind(("", far.port if far.is_behind_nat else 0))
        server.listen()
        near_end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        near_end.connect((far.address, server.getsockname()[1]))
        far_end, _ = server.accept()
        with closing(far_end):
            far_end.settimeout(_PATIENCE_S)
            far_end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield near_end, far_end


def _socket(endpoint: EndpointStatus) -> socket.socket:
    assert endpoint.namespace is not None
    with inside(endpoint.namespace):
        made = socket.socket()
    made.settimeout(_PATIENCE_S)
    return made


def _ping(near_end: socket.socket, far_end: socket.socket) -> float:
    began_s = time.perf_counter()
    near_end.sendall(b".")
    far_end.sendall(far_end.recv(1))
    near_end.recv(1)
    return time.perf_counter() - began_s


def _rate(near_end: socket.socket, far_end: socket.socket, seconds: float) -> float:
    """Bytes per second that arrive, the beginning left out."""
    until_s = time.perf_counter() + seconds
    sending = Thread(target=_send_until, args=(near_end, until_s), daemon=True)
    sending.start()
    warm_s = until_s - seconds * (1 - _WARM_SHARE)
    began_s, num_bytes = 0.0, 0
    while (now := time.perf_counter()) < until_s:
        received = len(far_end.recv(_PIECE_BYTES))
        if now < warm_s:
            began_s = time.perf_counter()
        else:
            num_bytes += received
    ended_s = time.perf_counter()
    far_end.close()
    sending.join()
    return num_bytes / (ended_s - began_s)


def _send_until(near_end: socket.socket, until_s: float) -> None:
    piece = bytes(_PIECE_BYTES)
    try:
        while time.perf_counter() < until_s:
            near_end.send(piece)
    except OSError:
        pass  # the far end has heard enough
