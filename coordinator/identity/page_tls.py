"""Certificate by which browsers know the coordinator's page, made out by the cluster's authority."""

import os
import socket
import ssl
import time
from collections.abc import Callable, Iterable

import psutil

from skein.wire.identity.authority import Authority
from skein.wire.identity.passport import RENEW_BELOW, key_text, new_key

_ADDRESSES = (socket.AF_INET, socket.AF_INET6)


class PageTls:
    """TLS of the page: a certificate with a key of its own, made anew when a third of its life is left.

    Args:
        hosts: names and addresses by which it may be reached.
        clock: gives Unix time.
    """

    def __init__(
        self, authority: Authority, hosts: Iterable[str], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._authority = authority
        self._hosts = frozenset(hosts)
        self._clock = clock
        self._renewal_s = 0.0
        self._context = self.context()

    def context(self) -> ssl.SSLContext:
        """Context by which a connection of now is to be encrypted."""
        now_s = self._clock()
        if now_s >= self._renewal_s:
            key = new_key()
            certificate, life_s = self._authority.certify_site(key.public_key(), self._hosts, now_s=now_s)
            self._context = _context(key_text(key) + certificate)
            self._renewal_s = now_s + (1 - RENEW_BELOW) * life_s
        return self._context


def hosts_of_this_machine() -> frozenset[str]:
    """Names and addresses of this machine, those of its loopback included."""
    of_interfaces = (
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in _ADDRESSES
    )
    return frozenset({"localhost", socket.gethostname().lower(), *of_interfaces})


def _context(pem: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The key is not to lie on a disk, and OpenSSL reads it from files only.
    held = os.memfd_create("skein-page", os.MFD_CLOEXEC)
    try:
        os.write(held, pem.encode())
        context.load_cert_chain(f"/proc/self/fd/{held}")
    finally:
        os.close(held)
    return context
