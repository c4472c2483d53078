"""Addresses of the machine that runs the tests."""

import socket

import psutil


def own_addresses() -> list[str]:
    """IP addresses that this machine can serve at: those of its interfaces, loopback among them, none of one link."""
    families = (socket.AF_INET, socket.AF_INET6)
    known = [x.address for xs in psutil.net_if_addrs().values() for x in xs if x.family in families]
    return [address for address in known if "%" not in address]
