"""An authority for development and for one machine: it signs a certificate for each role, all in one folder.

It is no authority for production: its key lies beside what it has signed. It needs the package `cryptography`.
"""

import datetime
import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.net.security.roles import PeerRole
from octavo.wire.tls import WORKER_NAME

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

LIFE_DAYS = 365
BACKDATED = datetime.timedelta(minutes=5)  # clocks of other machines may be behind
CA_FILE = "ca.crt"
CA_KEY_FILE = "ca.key"
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class CertificateError(Exception):
    """The certificates cannot be made. The message says what to do."""


def certificate_files(folder: Path, role: PeerRole) -> tuple[str, str, str]:
    """The paths of the certificate, the key and the authority of a role."""
    return str(folder / f"{role}.crt"), str(folder / f"{role}.key"), str(folder / CA_FILE)


def is_complete(folder: Path) -> bool:
    """Whether the folder has all that `make_certificates` makes, each with a tenth of its life left at least."""
    names = [Path(name) for role in PeerRole for name in certificate_files(folder, role)]
    if not all(name.is_file() for name in names):
        return False
    x509 = _x509()
    now = datetime.datetime.now(datetime.UTC)
    try:
        found = [x509.load_pem_x509_certificate(name.read_bytes()) for name in names if name.suffix == ".crt"]
    except ValueError:
        return False
    return all(now + datetime.timedelta(days=LIFE_DAYS / 10) < each.not_valid_after_utc for each in found)


def make_certificates(folder: Path, hosts: Sequence[str] = (), days: int = LIFE_DAYS) -> None:
    """Makes an authority, unless the folder has one, and certificates of all roles, which replace those that are there.

    The router's and the worker's are for this machine and for `hosts` as well; without any, for those of the
    certificates that are replaced. All files are readable by this user alone. Raises CertificateError.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    authority, key = _authority(folder, days)
    names = [*LOCAL_NAMES, socket.gethostname(), *(hosts or _hosts_of(folder))]
    for role in PeerRole:
        extra = [WORKER_NAME] if role is PeerRole.WORKER else []
        listens = role in (PeerRole.ROUTER, PeerRole.WORKER)
        _make_certificate(folder, role, [*names, *extra] if listens else [], authority, key, days)


def _hosts_of(folder: Path) -> list[str]:
    """The names and addresses that the router's certificate is for; none if there is none that can be read."""
    x509 = _x509()
    try:
        router = x509.load_pem_x509_certificate(Path(certificate_files(folder, PeerRole.ROUTER)[0]).read_bytes())
        names = router.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def _authority(folder: Path, days: int) -> "tuple[x509.Certificate, EllipticCurvePrivateKey]":
    x509 = _x509()
    from cryptography.hazmat.primitives import serialization

    cert_file, key_file = folder / CA_FILE, folder / CA_KEY_FILE
    if cert_file.exists() and key_file.exists():
        try:
            known = serialization.load_pem_private_key(key_file.read_bytes(), None)
            return x509.load_pem_x509_certificate(cert_file.read_bytes()), _as_ec_key(known)
        except ValueError as error:
            remedy = f"remove {CA_FILE} and {CA_KEY_FILE}, or use another folder"
            raise CertificateError(f"{folder}: {error}: {remedy}") from error
    key = _new_key()
    builder = _builder("octavo development CA", key, days)
    builder = builder.issuer_name(_name("octavo development CA"))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    cert = builder.add_extension(identifier, critical=False).sign(key, _sha256())
    _write(key_file, _key_pem(key))
    _write(cert_file, _cert_pem(cert))
    return cert, key


def _make_certificate(
    folder: Path,
    role: PeerRole,
    hosts: Sequence[str],
    authority: "x509.Certificate",
    authority_key: "EllipticCurvePrivateKey",
    days: int,
) -> None:
    x509 = _x509()
    key = _new_key()
    names: list[Any] = [x509.UniformResourceIdentifier(role.uri), *map(_host_name, dict.fromkeys(hosts))]
    builder = _builder(f"octavo {role}", key, days).issuer_name(authority.subject)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    uses = [x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]
    if hosts:
        uses.append(x509.oid.ExtendedKeyUsageOID.SERVER_AUTH)
    builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    cert = builder.add_extension(identifier, critical=False).sign(authority_key, _sha256())
    cert_file, key_file, _ = certificate_files(folder, role)
    _write(Path(key_file), _key_pem(key))
    _write(Path(cert_file), _cert_pem(cert))


def _builder(name: str, key: "EllipticCurvePrivateKey", days: int) -> Any:
    x509 = _x509()
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(_name(name)).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - BACKDATED).not_valid_after(now + datetime.timedelta(days=days))


def _host_name(host: str) -> Any:
    x509 = _x509()
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


def _name(text: str) -> Any:
    x509 = _x509()
    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)])


def _usage(*, signs_certificates: bool) -> Any:
    return _x509().KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _new_key() -> "EllipticCurvePrivateKey":
    _x509()
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _as_ec_key(key: Any) -> "EllipticCurvePrivateKey":
    from cryptography.hazmat.primitives.asymmetric import ec

    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{CA_KEY_FILE} holds another kind of key than `octavo cert` makes")
    return key


def _sha256() -> Any:
    from cryptography.hazmat.primitives import hashes

    return hashes.SHA256()


def _key_pem(key: "EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _cert_pem(cert: "x509.Certificate") -> bytes:
    from cryptography.hazmat.primitives import serialization

    return cert.public_bytes(serialization.Encoding.PEM)


def _write(file: Path, content: bytes) -> None:
    """Replaces a file in one step. Nobody else can read it, not even for a moment."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:
        opened.write(content)
    temporary.replace(file)


def _x509() -> Any:
    try:
        from cryptography import x509
    except ImportError:
        raise CertificateError("making certificates needs a package: pip install 'octavo[certificates]'") from None
    return x509
