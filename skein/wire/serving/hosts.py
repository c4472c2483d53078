"""Hosts that addresses count as, where what one host may have is bounded.

Whoever has one IPv6 address mostly has all 2^64 of its network, so these count as one. An IPv4 address that comes
through an IPv6 socket is that IPv4 address.
"""

from ipaddress import IPv6Address, ip_address
from urllib.parse import unquote

_NETWORK_BYTES = 8


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
    """Whether a connection, by gRPC's name, comes from this machine.

    >>> [is_from_here(x) for x in ("ipv4:127.0.0.1:1", "ipv6:%5B::1%5D:1", "unix:", "ipv4:10.0.0.1:1")]
    [True, True, True, False]
    """
    return host_of(peer) in ("127.0.0.1", counted_as("::1"), "unix", "")
