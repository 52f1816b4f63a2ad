"""An authority for development and for one machine: it signs a certificate for each role, all in one folder.

It is no authority for production: its key lies beside what it has signed.
Commands import this module when they need it, for its package, `cryptography`.
"""

import datetime
import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from octavo.local.certificate_files import CA_FILE, CA_KEY_FILE, LIFE_DAYS, CertificateError, certificate_files
from octavo.local.state import replace_file
from octavo.net.security.roles import PeerRole
from octavo.wire.tls import WORKER_NAME

BACKDATED = datetime.timedelta(minutes=5)  # clocks of other machines may be behind
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
CA_NAME = "octavo development CA"


def is_complete(folder: Path) -> bool:
    """Whether the folder has all that `make_certificates` makes, each with a tenth of its life left at least."""
    names = [Path(name) for role in PeerRole for name in certificate_files(folder, role)]
    if not all(name.is_file() for name in names):
        return False
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
    try:
        router = x509.load_pem_x509_certificate(Path(certificate_files(folder, PeerRole.ROUTER)[0]).read_bytes())
        names = router.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def _authority(folder: Path, days: int) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    cert_file, key_file = folder / CA_FILE, folder / CA_KEY_FILE
    if cert_file.exists() and key_file.exists():
        try:
            known = load_pem_private_key(key_file.read_bytes(), None)
            if not isinstance(known, EllipticCurvePrivateKey):
                raise ValueError(f"{CA_KEY_FILE} holds another kind of key than `octavo cert` makes")
            return x509.load_pem_x509_certificate(cert_file.read_bytes()), known
        except ValueError as error:
            remedy = f"remove {CA_FILE} and {CA_KEY_FILE}, or use another folder"
            raise CertificateError(f"{folder}: {error}: {remedy}") from error
    key = generate_private_key(SECP256R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = _builder(CA_NAME, key, days, is_authority=True).issuer_name(_name(CA_NAME))
    cert = builder.add_extension(identifier, critical=False).sign(key, hashes.SHA256())
    _write(key_file, key)
    _write(cert_file, cert)
    return cert, key


def _make_certificate(
    folder: Path,
    role: PeerRole,
    hosts: Sequence[str],
    authority: x509.Certificate,
    authority_key: EllipticCurvePrivateKey,
    days: int,
) -> None:
    key = generate_private_key(SECP256R1())
    names = [x509.UniformResourceIdentifier(role.uri), *map(_host_name, dict.fromkeys(hosts))]
    uses = [x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH, *([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = _builder(f"octavo {role}", key, days, is_authority=False).issuer_name(authority.subject)
    for extension in (x509.SubjectAlternativeName(names), x509.ExtendedKeyUsage(uses), identifier):
        builder = builder.add_extension(extension, critical=False)
    cert_file, key_file, _ = certificate_files(folder, role)
    _write(Path(key_file), key)
    _write(Path(cert_file), builder.sign(authority_key, hashes.SHA256()))


def _builder(name: str, key: EllipticCurvePrivateKey, days: int, *, is_authority: bool) -> x509.CertificateBuilder:
    """What an authority and what it signs have in common; one may sign certificates, the others may not."""
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(_name(name)).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - BACKDATED).not_valid_after(now + datetime.timedelta(days=days))
    constraints = x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None)
    # Digital signatures; four others; certificates; lists of revoked ones; two others.
    usage = x509.KeyUsage(not is_authority, False, False, False, False, is_authority, is_authority, False, False)
    return builder.add_extension(constraints, critical=True).add_extension(usage, critical=True)


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)])


def _write(file: Path, content: x509.Certificate | EllipticCurvePrivateKey) -> None:
    if isinstance(content, x509.Certificate):
        pem = content.public_bytes(Encoding.PEM)
    else:
        pem = content.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    replace_file(file, pem)
