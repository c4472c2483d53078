"""Checks of certificates: one's own, by this machine's clock, and who is at the other end of a TLS connection."""

import socket
import ssl
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from client.doctor.finding import DoctorFinding, doubtful, fine, wrong
from skein.errors import UserError
from skein.wire.identity.names import COORDINATOR
from skein.wire.identity.passport import Passport, utc_text

_SECONDS = 3.0
_LEFT_SHARE = 0.1
"""Share of a life below which renewing must have failed: it begins at a third."""
_AGAIN = "join anew with a line from skein token create"
_EARLY, _LATE, _OTHER_NAME = 9, 10, 62
"""OpenSSL's numbers for a certificate that does not count yet, has ended, or is somebody else's."""


def look_at_identity(
    path: Path | None, *, now: Callable[[], float] = time.time
) -> tuple[DoctorFinding, Passport | None]:
    """Finding on the identity in a file, None for no file, and the identity unless it is of no use."""
    if path is None:
        cure = "fine on one machine; beyond it join with a line from skein token create"
        return doubtful("identity", "none", cure), None
    try:
        passport = Passport.load(path)
    except UserError as error:
        return wrong("identity", str(error.value), error.hint), None
    now_s = now()
    if (fault := passport.fault(now_s=now_s)) is not None:
        what, _, cure = fault.partition(": ")
        return wrong("identity", what, cure), None
    shown = f"{passport.caller.role} {passport.caller.name}, until {utc_text(passport.ends_s)}"
    if passport.ends_s - now_s < _LEFT_SHARE * (passport.ends_s - passport.begins_s):
        cure = f"it should have been renewed by now: see whether the coordinator can be reached, or {_AGAIN}"
        return doubtful("identity", shown, cure), passport
    return fine("identity", shown), passport


def shake_hands(address: tuple[str, int], passport: Passport, words: bytes) -> DoctorFinding:
    """Whether the coordinator is there, by its certificate, and takes ours.

    Args:
        words: said after the handshake; whoever refuses our certificate does so in the place of an answer.
    """
    try:
        with (
            socket.create_connection(address, timeout=_SECONDS) as raw,
            _context(passport).wrap_socket(raw, server_hostname=COORDINATOR.host) as link,
        ):
            version, ends = link.version(), link.getpeercert()
            link.sendall(words)
            said = link.recv(64)
    except ssl.SSLCertVerificationError as error:
        return _their_fault(error)
    except ssl.SSLError as error:
        if "WRONG_VERSION" in (error.reason or ""):
            cure = "another service, or a coordinator without certificates: check the port, or leave --identity out"
            return wrong("tls", "what listens there does not speak TLS", cure)
        return _refused(error.reason or str(error))
    except OSError as error:
        return _refused(str(error))
    if not said:
        return _refused("it hung up")
    until = f", whose certificate ends {ends['notAfter']}" if ends and "notAfter" in ends else ""
    return fine("tls", f"{version} with the coordinator{until}")


def _refused(reason: str) -> DoctorFinding:
    cure = f"it may be revoked, or this clock be off (see that of the coordinator); {_AGAIN}"
    return wrong("tls", f"the coordinator does not take this identity ({reason})", cure)


def _their_fault(error: ssl.SSLCertVerificationError) -> DoctorFinding:
    match error.verify_code:
        case number if number in (_EARLY, _LATE):
            state = "has ended" if number == _LATE else "does not count yet"
            cure = "set this machine's clock and the coordinator's: it renews its own while it runs"
            return wrong("tls", f"the coordinator's certificate {state}, by this machine's clock", cure)
        case number if number == _OTHER_NAME:
            cure = "something else of the same cluster listens there, such as a worker: check host and port"
            return wrong("tls", "who answers there is not the coordinator", cure)
    cure = f"this identity is of another cluster, or the coordinator's folder was made anew: {_AGAIN}"
    return wrong("tls", f"another authority vouches for who answers there ({error.verify_message})", cure)


def speaks_tls(address: tuple[str, int]) -> bool:
    """Whether a TLS handshake begins there; nobody is trusted, and nothing said."""
    try:
        with (
            socket.create_connection(address, timeout=_SECONDS) as raw,
            ssl.create_default_context().wrap_socket(raw, server_hostname=COORDINATOR.host),
        ):
            return True
    except ssl.SSLCertVerificationError:
        return True
    except OSError:
        return False


def _context(passport: Passport) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(cadata=passport.authority)
    # The library takes these from a file only; it is ours alone and gone at once.
    with tempfile.NamedTemporaryFile("w", encoding="ascii") as file:
        file.write(passport.certificate + passport.key)
        file.flush()
        context.load_cert_chain(file.name)
    return context
