"""Hosts that addresses count as, where what one host may have is bounded.

Whoever has one IPv6 address mostly has all 2^64 of its network, so these count as one. An IPv4 address that comes
through an IPv6 socket is that IPv4 address.
"""

import socket
from ipaddress import IPv6Address, ip_address
from urllib.parse import unquote

_NETWORK_BYTES = 8
_ANY_PORT = 9


def counted_as(address: str) -> str:
    """Host that an IP address counts as; anything else counts as itself.

    >>> counted_as("10.0.0.1"), counted_as("::ffff:10.0.0.1"), counted_as("unix")
    ('10.0.0.1', '10.0.0.1', 'unix')
    >>> counted_as("2001:db8:0:7:1::9"), counted_as("fe80::2%eth0")
    ('2001:db8:0:7::/64', 'fe80::/64')
    """
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if isinstance(found, IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return f"{IPv6Address(found.packed[:_NETWORK_BYTES].ljust(16, bytes(1)))}/{8 * _NETWORK_BYTES}"
    return str(found)


def host_of(peer: str) -> str:
    """Host that a caller counts as, by gRPC's name for the connection.

    >>> host_of("ipv4:10.0.0.1:5000"), host_of("ipv6:%5B::ffff:10.0.0.1%5D:5000"), host_of("unix:")
    ('10.0.0.1', '10.0.0.1', 'unix')
    >>> host_of("ipv6:%5B2001:db8::1%5D:5000"), host_of("ipv6:%5Bfe80::1%25eth0%5D:5000")
    ('2001:db8::/64', 'fe80::/64')
    """
    host = unquote(peer).rpartition(":")[0]
    return counted_as(host.removeprefix("ipv4:").removeprefix("ipv6:").strip("[]"))


def is_from_here(peer: str) -> bool:
    """Whether a connection, by gRPC's name, comes from this machine: by loopback, or from an address of its own.

    A process that dials a server of its machine at one of the machine's addresses comes from that address.

    >>> [is_from_here(x) for x in ("ipv4:127.0.0.1:1", "ipv6:%5B::1%5D:1", "unix:", "ipv4:192.0.2.1:1")]
    [True, True, True, False]
    """
    host = unquote(peer).rpartition(":")[0]
    host = host.removeprefix("ipv4:").removeprefix("ipv6:").strip("[]")
    return host in ("unix", "") or _is_of_this_machine(host)


def _is_of_this_machine(host: str) -> bool:
    """Whether an IP address belongs to this machine.

    The system answers: towards an address of the machine itself it would send from that same address. Connecting a UDP
    socket makes it choose, and sends no packet.
    """
    try:
        address = ip_address(host)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return True
    family = socket.AF_INET6 if isinstance(address, IPv6Address) else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), _ANY_PORT))
            return ip_address(probe.getsockname()[0]).packed == address.packed
    except OSError:
        return False
