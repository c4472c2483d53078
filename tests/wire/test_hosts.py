"""One host has one share of what is bounded, whatever addresses it has."""

from itertools import pairwise
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skein.wire.serving.doorway import _host
from skein.wire.serving.hosts import counted_as, host_of, is_from_here
from tests.support.addresses import own_addresses
from worker.transport.receiving.slots import peer_of

HALF = st.integers(0, 2**64 - 1)


def text(network: int, host: int) -> str:
    """An IPv6 address in full, as eight words."""
    whole = f"{network:016x}{host:016x}"
    return ":".join(whole[i : i + 4] for i in range(0, 32, 4))


@given(network=HALF.filter(lambda half: half > 0), hosts=st.lists(HALF, min_size=2, max_size=2))
def test_addresses_of_one_ipv6_network_count_as_one_and_others_apart(network: int, hosts: list[int]) -> None:
    ways = [
        *(host_of(f"ipv6:%5B{text(network, host)}%5D:{4711 + host % 9}") for host in hosts),
        *(peer_of(f"ipv6:[{text(network, host)}]:5000") for host in hosts),
        *(counted_as(text(network, host)) for host in hosts),
    ]
    assert all(a == b for a, b in pairwise(ways))
    assert ways[0] != counted_as(text(network ^ 1, hosts[0]))


@given(address=st.ip_addresses(v=4))
def test_an_ipv4_address_counts_as_itself_by_whatever_socket_it_comes(address: object) -> None:
    mapped = (f"ipv6:%5B::ffff:{address}%5D:1", f"ipv6:[::ffff:{address}]:1", f"ipv4:{address}:1")
    assert {host_of(peer) for peer in mapped} == {str(address)}


def test_the_systems_table_and_grpc_name_a_host_alike() -> None:
    assert _host("B80D0120000000000000000001000000") == host_of("ipv6:%5B2001:db8::1%5D:1")
    assert _host("0000000000000000FFFF00000100007F") == host_of("ipv4:127.0.0.1:1")


def test_connections_of_this_machine_are_each_a_peer_of_their_own() -> None:
    for peer in ("ipv4:127.0.0.1:4711", "ipv6:%5B::1%5D:4711", "unix:"):
        assert is_from_here(peer)
        assert peer_of(peer) == peer
    assert not is_from_here("ipv6:%5B::ffff:10.0.0.1%5D:1")


@pytest.mark.parametrize("address", own_addresses())
def test_a_connection_from_an_own_address_of_this_machine_comes_from_here(address: str) -> None:
    peer = f"ipv6:{quote(f'[{address}]', safe=':')}:4711" if ":" in address else f"ipv4:{address}:4711"
    assert is_from_here(peer)
    assert peer_of(peer) == peer


@pytest.mark.parametrize(
    "peer",
    [
        "ipv4:192.0.2.77:1",
        "ipv4:0.0.0.0:1",
        "ipv4:255.255.255.255:1",
        "ipv6:%5B::2%5D:1",
        "ipv6:%5B2001:db8::1%5D:1",
        "ipv6:%5B::ffff:192.0.2.77%5D:1",
    ],
)
def test_a_connection_from_another_machine_does_not_come_from_here(peer: str) -> None:
    """`::2` is of the /64 that loopback has, and belongs to nobody."""
    assert not is_from_here(peer)
