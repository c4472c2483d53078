"""The authority of a cluster: its key says who everybody is. It lives where the coordinator's state does."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from skein.errors import UserError
from skein.wire.identity.names import Caller
from skein.wire.identity.passport import (
    Passport,
    callers_named,
    key_text,
    load_key,
    new_key,
    pem_of,
    read_private,
    signing_request,
    write_private,
)

LIFE_S = 12 * 3600.0
"""Seconds that a certificate counts; it is renewed when a third is left."""
MAX_REQUEST_BYTES = 4096
_AUTHORITY_DAYS = 3650
_EARLIER = timedelta(minutes=5)
"""So much earlier a certificate begins, for clocks that are a little behind."""
_CURE = (
    "restore it from a backup, or remove the folder to begin anew: all identities of this cluster end then"
)
KEY_FILE, CERTIFICATE_FILE = "authority.key", "authority.pem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """An authority: its key and its own certificate."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def new(cls, *, now_s: float) -> "Authority":
        """Another authority, of which nobody knows yet."""
        key, begins = new_key(), _time(now_s) - _EARLIER
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "skein")])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(begins + timedelta(days=_AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(key=key, certificate=certificate)

    @classmethod
    def kept_in(cls, folder: Path, *, now_s: float) -> "Authority":
        """The authority of a folder; it is made where there is none.

        Raises:
            UserError: the folder cannot be read or written, or what is there is none.
        """
        key_file, certificate_file = folder / KEY_FILE, folder / CERTIFICATE_FILE
        if not certificate_file.exists():
            made = cls.new(now_s=now_s)
            # The certificate last: where it is, the key of it is too.
            write_private(key_file, key_text(made.key))
            write_private(certificate_file, pem_of(made.certificate))
        try:
            key = load_key(read_private(key_file))
            certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        except ValueError as error:
            raise UserError("authority", str(folder), f"holds no authority ({error}); {_CURE}") from error
        if certificate.public_key() != key.public_key():
            raise UserError(
                "authority", str(folder), "key and certificate belong to different ones; restore them"
            )
        return cls(key=key, certificate=certificate)

    @property
    def pem(self) -> str:
        """Its certificate, by which everybody knows it."""
        return pem_of(self.certificate)

    def certify(self, request: bytes, caller: Caller, *, now_s: float, life_s: float = LIFE_S) -> str:
        """A certificate in PEM that says: whoever has the key of this signing request is `caller`.

        Raises:
            UserError: the request is none, or not signed by the key that it names.
        """
        return self._sign(
            requested_key(request),
            (x509.UniformResourceIdentifier(caller.uri), x509.DNSName(caller.host)),
            now_s=now_s,
            life_s=life_s,
        )

    def certify_site(
        self, key: ec.EllipticCurvePublicKey, hosts: Iterable[str], *, now_s: float
    ) -> tuple[str, float]:
        """A certificate in PEM by which browsers know these names and addresses, and its seconds; nobody's identity."""
        names, uses = [_name_of(host) for host in sorted(set(hosts))], [ExtendedKeyUsageOID.SERVER_AUTH]
        return self._sign(key, names, now_s=now_s, life_s=LIFE_S, uses=uses), LIFE_S

    def _sign(
        self,
        key: ec.EllipticCurvePublicKey,
        names: Sequence[x509.GeneralName],
        *,
        now_s: float,
        life_s: float,
        uses: Sequence[x509.ObjectIdentifier] = (),
    ) -> str:
        begins = _time(now_s)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins - _EARLIER)
            .not_valid_after(begins + timedelta(seconds=life_s))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
        )
        if uses:
            builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        return pem_of(builder.sign(self.key, hashes.SHA256()))

    def caller_of(self, certificate: str) -> tuple[Caller, ec.EllipticCurvePublicKey]:
        """The caller that a certificate of this authority names, ended or not, and the key.

        Raises:
            UserError: another authority made it, or it is none.
        """
        wrong = UserError(
            "certificate", "", "is none of this authority; join anew with a line from skein token create"
        )
        try:
            read = x509.load_pem_x509_certificate(certificate.encode())
            read.verify_directly_issued_by(self.certificate)
            (caller,) = callers_named(read)
        except (ValueError, TypeError, InvalidSignature) as error:
            raise wrong from error
        key = read.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise wrong
        return caller, key

    def make_out(self, caller: Caller, *, now_s: float, life_s: float = LIFE_S) -> Passport:
        """An identity with a key of its own, for this machine."""
        key = new_key()
        certificate = self.certify(signing_request(key), caller, now_s=now_s, life_s=life_s)
        return Passport(key=key_text(key), certificate=certificate, authority=self.pem)


def requested_key(request: bytes) -> ec.EllipticCurvePublicKey:
    """The key that a signing request asks to certify.

    Raises:
        UserError: it is no request, or not signed by that key, or that is on another curve.
    """
    wrong = UserError("request", f"{len(request)} bytes", "is no signing request in PEM for a key on P-256")
    if len(request) > MAX_REQUEST_BYTES:
        raise wrong
    try:
        read = x509.load_pem_x509_csr(request)
        is_signed, key = read.is_signature_valid, read.public_key()
    except ValueError as error:
        raise wrong from error
    if (
        not is_signed
        or not isinstance(key, ec.EllipticCurvePublicKey)
        or not isinstance(key.curve, ec.SECP256R1)
    ):
        raise wrong
    return key


def key_name(key: ec.EllipticCurvePublicKey) -> str:
    """A key's digest: the same key, the same name."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(
        key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return digest.finalize().hex()


def _name_of(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _time(wall_s: float) -> datetime:
    return datetime.fromtimestamp(wall_s, UTC)
