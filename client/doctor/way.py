"""Checks of the way to another machine: name, route, port, what speaks there, and packets that vanish.

Rules: nothing needs the other side's help beyond what any TCP port does, so each check also works where a service is of
another release, or is no service of ours at all. The first that fails is the cause; those behind it would repeat it.
"""

import fcntl
import socket
import struct
import termios
import time
from collections.abc import Iterator
from contextlib import closing

from client.doctor.certificates import shake_hands, speaks_tls
from client.doctor.finding import DoctorFinding, fine, wrong
from skein.wire.channel import is_loopback, join_address
from skein.wire.identity.passport import Passport

Address = tuple[str, int]
"""Numeric host and port."""

CONNECT_S = 3.0
_ANSWER_S = 3.0
_DELIVERED_S = 2.5
"""In which the other system acknowledges a packet; three times it may be lost and is sent again."""
_OTHER_PORT = 1
"""Port at which nothing listens: a system that is there says so at once, unless it drops that too."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""HTTP/2's first words, with settings that set nothing."""
_FILLER_BYTES = 8192
_FILLER = struct.pack(">I", _FILLER_BYTES)[1:] + bytes((0xBE, 0, 0, 0, 0, 0)) + bytes(_FILLER_BYTES)
"""A frame of a kind that HTTP/2 does not know and so ignores."""
_SETTINGS = 4
WANTS_TLS = "wants TLS"
_PACKET_BYTES = (1400, 1280, 1000, 576)
"""Sizes that are tried once full packets have vanished."""
_HEADER_BYTES = 40
_LOOK_S = 0.02
_IP_MTU, _IPV6_MTU = 14, 24


def look_along(host: str, port: int, passport: Passport | None = None) -> Iterator[DoctorFinding]:
    """Findings on the way to host:port, up to the first that fails.

    Args:
        passport: by which we are known there; None: connections are not encrypted.
    """
    try:
        family, _, _, _, numeric = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        cause = error.strerror if isinstance(error, socket.gaierror) else "no name"
        cure = "check its spelling, and that DNS or /etc/hosts of this machine knows it"
        yield wrong("name", f"{host} does not resolve ({cause})", cure)
        return
    address = (str(numeric[0]), port)
    yield fine("name", host if host == address[0] else f"{host} is {address[0]}")
    for finding in (_route(family, address), reach(address)):
        yield finding
        if finding.is_failed:
            return
    yield _service(address) if passport is None else shake_hands(address, passport, _PREFACE)


def _route(family: int, address: Address) -> DoctorFinding:
    """Whether the system knows where to send; no packet leaves."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError as error:
            cure = f"bring this machine's network or VPN up, then look at: ip route get {address[0]}"
            return wrong("route", f"none to {address[0]} ({error.strerror})", cure)
        return fine("route", f"from {probe.getsockname()[0]}")


def reach(address: Address) -> DoctorFinding:
    """Whether a connection can be opened there; if not, who is in the way."""
    shown, began_s = join_address(*address), time.monotonic()
    try:
        with socket.create_connection(address, timeout=CONNECT_S):
            took_s = time.monotonic() - began_s
    except ConnectionRefusedError:
        cure = "that machine answers: start the service there, have it listen beyond 127.0.0.1, or check the port"
        return wrong("port", f"nothing listens at {shown}", cure)
    except TimeoutError:
        return _dropped(address, shown)
    except OSError as error:
        cure = "a router or firewall on the way turns it away: check the address, then let TCP through"
        return wrong("port", f"{shown} cannot be reached ({error.strerror})", cure)
    return fine("port", f"{shown} is open, {1e3 * took_s:.1f} ms away")


def _dropped(address: Address, shown: str) -> DoctorFinding:
    if _is_up(address[0]):
        cure = f"let TCP {address[1]} in there, for instance: ufw allow {address[1]}/tcp"
        return wrong(
            "port", f"{shown} is silent though that machine answers: a firewall drops the port", cure
        )
    cure = "check the address and that the machine is on; if it is, a firewall on the way drops everything"
    return wrong("port", f"no answer at all from {address[0]} in {CONNECT_S:.0f} s", cure)


def _is_up(host: str) -> bool:
    try:
        socket.create_connection((host, _OTHER_PORT), timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def _service(address: Address) -> DoctorFinding:
    shown = join_address(*address)
    try:
        with socket.create_connection(address, timeout=_ANSWER_S) as probe:
            probe.sendall(_PREFACE)
            said = probe.recv(64)
    except TimeoutError:
        cure = "it is frozen or waits for other words: look at the process there, and check the port"
        return wrong("service", f"{shown} takes connections and says nothing", cure)
    except OSError as error:
        said, cause = b"", f" ({error.strerror})"
    else:
        cause = ""
    other = unlike_grpc(said)
    if other is None:
        return fine("service", "speaks HTTP/2, as gRPC does")
    if other == WANTS_TLS or (not said and speaks_tls(address)):
        cure = "it asks for certificates: join with a line from skein token create, or name yours with --identity"
        return wrong("service", f"{shown} {WANTS_TLS}", cure)
    cure = "check the port: a coordinator listens at 7411 unless told otherwise, its metrics at 7412"
    return wrong("service", f"{shown} {other}{cause}", cure)


def unlike_grpc(said: bytes) -> str | None:
    """Answer to HTTP/2's first words, described; None if it is HTTP/2.

    >>> unlike_grpc(bytes((0, 0, 18, 4, 0, 0, 0, 0, 0)))
    >>> unlike_grpc(b"HTTP/1.1 400 Bad Request")
    'speaks HTTP/1: a web page, perhaps of metrics, is no coordinator'
    """
    if len(said) > _SETTINGS - 1 and said[3] == _SETTINGS and said[0] == 0:
        return None
    if said.startswith(b"HTTP/1"):
        return "speaks HTTP/1: a web page, perhaps of metrics, is no coordinator"
    if said.startswith(b"SSH-"):
        return "speaks SSH"
    if said.startswith(b"\x15\x03"):
        return WANTS_TLS
    return f"speaks something else: {said[:16]!r}" if said else "closes the connection without a word"


def look_for_black_hole(host: str, port: int) -> DoctorFinding | None:
    """Whether full packets arrive at a port that can be reached; None on this machine, where none can vanish.

    Small packets pass a tunnel of a small MTU whose routers say nothing about it, so connections open, small calls
    work, and everything of size stands still.
    """
    family, _, _, _, numeric = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    address = (str(numeric[0]), port)
    if is_loopback(address[0]):
        return None
    try:
        arrived, packet_bytes = _delivers(family, address, None)
        if arrived:
            return fine("mtu", f"packets of {packet_bytes} bytes arrive")
        through = next((size for size in _PACKET_BYTES if _delivers(family, address, size)[0]), None)
        if through is not None and _delivers(family, address, None)[0]:
            # Nothing came through for a while, whatever its size: a link that others fill, or a machine that is busy.
            return fine("mtu", f"packets of {packet_bytes} bytes arrive, if not always at once")
    except OSError as error:
        cure = "the link is not steady: see whether it loses packets (ping)"
        return wrong("mtu", f"the connection broke ({error.strerror})", cure)
    if through is None:
        cure = "the link lost whatever was sent: look whether it drops packets, or whether the process there hangs"
        return wrong("mtu", f"nothing that is sent to {join_address(*address)} is acknowledged", cure)
    cure = f"ip link set DEV mtu {through}, here and there, or let ICMP 'fragmentation needed' through on the way"
    return wrong("mtu", f"packets of {packet_bytes} bytes vanish, those of {through} arrive", cure)


def _delivers(family: int, address: Address, packet_bytes: int | None) -> tuple[bool, int]:
    """Whether a packet of that size, None for a full one, is acknowledged; and the system's own size.

    One is enough: of a size that vanishes none ever arrives, while a link that others fill loses some of any size.

    Raises:
        OSError: no connection.
    """
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        if packet_bytes is not None:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, packet_bytes - _HEADER_BYTES)
        probe.settimeout(CONNECT_S)
        probe.connect(address)
        level, option = (
            (socket.IPPROTO_IPV6, _IPV6_MTU) if family == socket.AF_INET6 else (socket.IPPROTO_IP, _IP_MTU)
        )
        own_bytes = probe.getsockopt(level, option)
        sent = _PREFACE + _FILLER
        probe.sendall(sent)
        until_s = time.monotonic() + _DELIVERED_S
        while _unacknowledged(probe) == len(sent) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        return _unacknowledged(probe) < len(sent), own_bytes


def _unacknowledged(probe: socket.socket) -> int:
    """Bytes that were sent, and that the other system has not acknowledged; 0 too once it has broken off."""
    return int(struct.unpack("i", fcntl.ioctl(probe, termios.TIOCOUTQ, bytes(4)))[0])
