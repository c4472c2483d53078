"""Identity as a process keeps it: its key, the certificate of it, and the authority's.

Rules of this file
- A key is made where it is used and never leaves; only a signing request does.
- Files that hold a key are readable by their owner alone, and replaced whole.
"""

import json
import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from skein.errors import UserError
from skein.wire.identity.names import Caller

RENEW_BELOW = 1 / 3
"""Share of a certificate's life that is left when it is renewed."""
_log = logging.getLogger(__name__)


class DamagedIdentityError(UserError):
    """A file of an identity is empty, cut short or overwritten."""


def new_key() -> ec.EllipticCurvePrivateKey:
    """A private key for signatures, on P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def key_text(key: ec.EllipticCurvePrivateKey) -> str:
    """`key` in PEM, unencrypted: the file's mode guards it."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def pem_of(certificate: x509.Certificate) -> str:
    """`certificate` in PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def callers_named(certificate: x509.Certificate) -> Sequence[Caller]:
    """Callers that a certificate names."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    found = (Caller.parse(uri) for uri in names.get_values_for_type(x509.UniformResourceIdentifier))
    return tuple(caller for caller in found if caller is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passport:
    """Identity of a process, in PEM; `addresses` and `enrol_addresses` are the coordinator's that made it out."""

    key: str = field(repr=False)
    certificate: str
    authority: str
    addresses: str = ""
    enrol_addresses: str = ""

    @property
    def _read(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate(self.certificate.encode())

    @property
    def caller(self) -> Caller:
        """Caller that this makes its process."""
        (caller,) = callers_named(self._read)
        return caller

    @property
    def begins_s(self) -> float:
        """Unix time from which on the certificate counts."""
        return self._read.not_valid_before_utc.timestamp()

    @property
    def ends_s(self) -> float:
        """Unix time at which the certificate ends."""
        return self._read.not_valid_after_utc.timestamp()

    def renewal_s(self) -> float:
        """Unix time from which on it should be renewed: a third of its life is left."""
        return self.ends_s - RENEW_BELOW * (self.ends_s - self.begins_s)

    def fault(self, *, now_s: float) -> str | None:
        """Fault of it by this machine's clock, and what to do; None: there is none."""
        if now_s >= self.ends_s:
            return (
                f"the certificate of {self.caller.role} {self.caller.name} ended at {utc_text(self.ends_s)}, "
                f"{_span(now_s - self.ends_s)} ago by this machine's clock: join anew with a line from "
                f"skein token create --role {self.caller.role}"
            )
        if now_s < self.begins_s:
            return (
                f"the certificate of {self.caller.role} {self.caller.name} counts from {utc_text(self.begins_s)} on, "
                f"in {_span(self.begins_s - now_s)} by this machine's clock: set that clock right"
            )
        return None

    def request(self) -> bytes:
        """A signing request for the key, in PEM: shows that the key is here."""
        return signing_request(load_key(self.key))

    def save(self, path: Path) -> None:
        """Keep it in a file that its owner alone can read."""
        write_private(path, json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> "Passport":
        """Read what `save` has kept.

        Raises:
            UserError: it cannot be read, others can read it, or it is none (`DamagedIdentityError`).
        """
        text = read_private(path)
        try:
            passport = cls(**json.loads(text))
            _ = passport.caller, load_key(passport.key)
        except (ValueError, TypeError) as error:
            raise DamagedIdentityError(
                "identity", str(path), f"is no identity ({error}); remove it and join anew"
            ) from error
        return passport

    @classmethod
    def load_if_whole(cls, path: Path) -> "Passport | None":
        """Read what `save` has kept, for a caller that can make another one.

        Returns:
            None where there is no file, or a damaged one: empty, cut short or overwritten. The latter is logged.

        Raises:
            UserError: it cannot be read, or others can read it.
        """
        if not path.exists():
            return None
        try:
            return cls.load(path)
        except DamagedIdentityError as error:
            _log.warning("the identity is made anew: %s", error)
            return None


def load_key(text: str) -> ec.EllipticCurvePrivateKey:
    """The private key in PEM.

    Raises:
        ValueError: it is none on a curve.
    """
    key = serialization.load_pem_private_key(text.encode(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("the key is not on an elliptic curve")
    return key


def signing_request(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A request in PEM to certify `key`; it says no name, for the authority decides that."""
    return (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )


def utc_text(wall_s: float) -> str:
    """Unix time for people.

    >>> utc_text(0.0)
    '1970-01-01 00:00:00 UTC'
    """
    return f"{datetime.fromtimestamp(wall_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 3600:.1f} h"


def write_private(path: Path, text: str) -> None:
    """Replace the file whole, durably, readable by its owner alone; folders it lacks are made likewise.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.unlink(missing_ok=True)
        with open(draft, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise UserError(
            "identity", str(path), f"{error.strerror}; give a folder that you can write"
        ) from error


def _sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: without it a new file may be gone, or empty, after a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_private(path: Path) -> str:
    """Text of a file that nobody else can read.

    Raises:
        UserError: it cannot be read, or others can.
    """
    try:
        mode, text = stat.S_IMODE(path.stat().st_mode), path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise UserError("identity", str(path), f"{error.strerror}; give a file that you can read") from error
    if mode & 0o077:
        raise UserError("identity", str(path), f"other users can read it; run: chmod 600 {path}")
    return text
