"""gRPC channels and servers as everybody here opens them: options and addresses.

Rules: a channel is opened for one purpose (`Lane`), for a small message behind bulk on the same connection waits
seconds; sender and receiver notice a silent connection by pings; off loopback nothing listens without credentials.
With an identity both ends of every connection show a certificate, by TLS 1.3, and who dials says whom it expects: a
peer is known by its name and not by its address.
"""

import ipaddress
import socket
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, cast

import grpc
from grpc import aio

from skein.errors import UserError
from skein.types import WorkerId
from skein.wire.credentials import NO_CREDENTIALS, Credentials, Wallet
from skein.wire.identity.callers import NamedCallers
from skein.wire.identity.names import COORDINATOR, Caller, worker_caller
from skein.wire.process.files import max_connections
from skein.wire.serving.reading import Readable

if TYPE_CHECKING:
    from skein.wire.identity.passport import Passport

Option = tuple[str, int]

PART_BYTES = 1 << 20
"""Size of the parts that bulk travels in; messages above 2 MiB collapse on page faults."""
MAX_MESSAGE_BYTES = 4 << 20


class Lane(StrEnum):
    """Purpose of a channel; each has a connection of its own."""

    CONTROL = "control"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    STATE = "state"
    """State transfer, checkpoints and probes."""
    WATCH = "watch"
    """Carries nothing: whether a peer can still be reached shows by the connection itself."""


_KEEPALIVE_MS, _WATCH_KEEPALIVE_MS = 1000, 800
_UNACKNOWLEDGED_MS = 2000
"""After which the system gives a connection up: gRPC hands its keepalive timeout to TCP_USER_TIMEOUT. Bytes that move,
however slowly, are acknowledged in time; a black hole shows within 3 s, on idle connections too."""
_BULK_PING_TIMEOUT_MS = 20_000
"""A ping queues behind the bulk that was written before it, seconds of it on a slow uplink. Who waits for tensors
counts silence by the answers to them (`worker.transport.pace`), so this is for what nobody waits for."""
_PING_TIMEOUT_MS = {Lane.CONTROL: 2000, Lane.WATCH: 1400}
"""Ping timeouts where little or nothing else is sent: a frozen process, whose system still acknowledges, shows
within 3 s, and within 2.2 s to its peers."""


_HANDSHAKE_MS = 5000
"""In which whoever connects has to speak HTTP/2; half-open connections go."""


def client_options(lane: Lane) -> list[Option]:
    """Options of a channel. A dead link shows within 3 s; so does a frozen process on CONTROL and WATCH."""
    ping_timeout_ms = _PING_TIMEOUT_MS.get(lane, _BULK_PING_TIMEOUT_MS)
    return [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.keepalive_time_ms", _WATCH_KEEPALIVE_MS if lane is Lane.WATCH else _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", min(ping_timeout_ms, _UNACKNOWLEDGED_MS)),
        ("grpc.http2.ping_timeout_ms", ping_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 3000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # A proxy set for HTTP would be asked to carry tensors, even those for this machine.
        ("grpc.enable_http_proxy", 0),
    ]


def server_options() -> list[Option]:
    """Options of a server: lets clients ping each second, and notices links that died in 3 s itself.

    It takes as many connections as leave this process some files for everything else.
    """
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _UNACKNOWLEDGED_MS),
        ("grpc.http2.ping_timeout_ms", _BULK_PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 300),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_concurrent_streams", 256),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_allowed_incoming_connections", max_connections()),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]


def open_channel(
    target: str, lane: Lane, *, credentials: Credentials, expected: Caller = COORDINATOR
) -> aio.Channel:
    """A channel to `target` (host:port), and to nobody but `expected`. Connects at the first call."""
    options: list[tuple[str, int | str]] = [*client_options(lane)]
    if credentials.wallet is None:
        return aio.insecure_channel(target, options=options)
    passport = credentials.wallet.passport
    shown = grpc.ssl_channel_credentials(
        passport.authority.encode(), passport.key.encode(), passport.certificate.encode()
    )
    named = ("grpc.ssl_target_name_override", expected.host)
    return aio.secure_channel(target, shown, options=[*options, named])


def open_channel_to(
    worker: WorkerId, *, credentials: Credentials, way_to: Callable[[str], str] = str
) -> Callable[[str, Lane], aio.Channel]:
    """Opens channels to a worker; `way_to` gives the address to dial for the one that it advertises."""

    def dial(address: str, lane: Lane) -> aio.Channel:
        return open_channel(way_to(address), lane, credentials=credentials, expected=worker_caller(worker))

    return dial


def open_enrolment_channel(target: str, authority: str) -> aio.Channel:
    """A channel of somebody who has no certificate yet to a coordinator that this authority, in PEM, vouches for."""
    options = [*client_options(Lane.CONTROL), ("grpc.ssl_target_name_override", COORDINATOR.host)]
    return aio.secure_channel(target, grpc.ssl_channel_credentials(authority.encode()), options=options)


def open_server(
    *,
    credentials: Credentials,
    before: "Sequence[aio.ServerInterceptor[object, object]]" = (),
    options: Sequence[Option] = (),
    named: NamedCallers | None = None,
) -> aio.Server:
    """A server that knows its callers by name, where `credentials` have certificates; `bind` it with the same.

    Args:
        before: what sees calls before they are looked at.
        options: beyond those that every server here has.
        named: what looks at who calls, where certificates are; None: anybody with a name may.
    """
    by_name = [] if credentials.wallet is None else [named or NamedCallers()]
    return aio.server(interceptors=[*before, *by_name, Readable()], options=[*server_options(), *options])


def bind(
    server: aio.Server,
    host: str,
    port: int,
    *,
    credentials: Credentials = NO_CREDENTIALS,
    is_for_strangers: bool = False,
) -> int:
    """Makes `server` listen at host:port (0: any free port) and gives the port.

    Args:
        credentials: by which it says who it is, and callers have to.
        is_for_strangers: callers need not, so that they can come to have some.

    Raises:
        UserError: the port is taken, or the host is not this machine's, with the system's own words.
    """
    require_free(host, port)
    address = join_address(host, port)
    try:
        bound = _add_port(server, address, credentials.wallet, is_for_strangers=is_for_strangers)
    except RuntimeError as error:
        raise _taken(address, "cannot listen there") from error
    return int(bound)


def require_free(host: str, port: int) -> None:
    """Look whether a server can listen at host:port now (0: at any free port).

    Raises:
        UserError: as for `bind`.
    """
    address = join_address(host, port)
    if not 0 <= port < 2**16:
        raise UserError("listen", address, "give a port between 0 and 65535")
    try:
        try_address(host, port)
    except OSError as error:
        raise _taken(address, error.strerror or str(error)) from error


def _taken(address: str, reason: str) -> UserError:
    return UserError("listen", address, f"{reason}; give another host:port, or end what listens there")


def _add_port(server: aio.Server, address: str, wallet: Wallet | None, *, is_for_strangers: bool) -> int:
    if wallet is None:
        return server.add_insecure_port(address)
    # None is for no change, which its stubs do not know.
    news = cast("Callable[[], grpc.ServerCertificateConfiguration]", news_of(wallet))
    shown = grpc.dynamic_ssl_server_credentials(
        _shown_by(wallet.passport), news, require_client_authentication=not is_for_strangers
    )
    return server.add_secure_port(address, shown)


def news_of(wallet: Wallet) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
    """Question of a server at each handshake: the certificate to show from now on, None while it is the same.

    Never the same again: gRPC makes what it has anew then, in one thread, and may use it in another just when it is
    gone, which ends the process (a check in its sync.cc) where many connect at once.
    """
    shown = wallet.passport

    def news() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        if wallet.passport == shown:
            return None
        shown = wallet.passport
        return _shown_by(shown)

    return news


def _shown_by(passport: "Passport") -> grpc.ServerCertificateConfiguration:
    pair = (passport.key.encode(), passport.certificate.encode())
    return grpc.ssl_server_certificate_configuration([pair], passport.authority.encode())


def try_address(host: str, port: int) -> None:
    """Returns if a server can listen there; gRPC says neither which address failed nor why, a plain socket does.

    Raises:
        OSError | OverflowError: it cannot.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def join_address(host: str, port: int) -> str:
    """host:port, brackets around IPv6.

    >>> join_address("::1", 7100), join_address("lab.example", 7100)
    ('[::1]:7100', 'lab.example:7100')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(field: str, address: str) -> tuple[str, int]:
    """Host and port of host:port or [IPv6]:port.

    Raises:
        UserError: it is neither; the error names `field`.

    >>> split_address("join", "[::1]:7100")
    ('::1', 7100)
    """
    host, separator, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    if (
        not separator
        or not host
        or (":" in host) != is_bracketed
        or not port.isdecimal()
        or int(port) >= 2**16
    ):
        raise UserError(field, address, "give host:port, for example 127.0.0.1:7411")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Reaches this machine only.

    >>> is_loopback("localhost"), is_loopback("127.3.0.1"), is_loopback("0.0.0.0"), is_loopback("lab.example")
    (True, True, False, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_safe_bind(host: str, credentials: Credentials, *, allow_insecure: bool) -> None:
    """Returns if listening at `host` is safe: on loopback, with certificates, or because the operator said so.

    Raises:
        UserError: strangers could reach the service.
    """
    if credentials == NO_CREDENTIALS and not is_loopback(host) and not allow_insecure:
        hint = (
            "other machines could give orders: join with a line from skein token create, listen on 127.0.0.1, "
            "or pass --insecure"
        )
        raise UserError("listen", host, hint)
