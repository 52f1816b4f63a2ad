"""Certificates of all roles, and what programs and callers are told of them."""

import datetime
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from octavo.local.certificate_files import certificate_files
from octavo.local.development_ca import make_certificates
from octavo.net.security.listener_tls import ListenerTls
from octavo.net.security.roles import PeerRole
from octavo.wire.tls import WORKER_NAME, ClientCredentials, TlsFiles


class Certificates:
    """A folder with an authority and the certificates of all roles, those of servers for this machine and `hosts`."""

    def __init__(self, folder: Path, hosts: Sequence[str] = ()) -> None:
        self.folder = folder
        make_certificates(folder, hosts)

    def files(self, role: str) -> ListenerTls:
        return ListenerTls(*certificate_files(self.folder, PeerRole(role)))

    def settings(self, role: str) -> dict[str, str]:
        """The settings of a program of this role."""
        return dict(zip(("tls_cert", "tls_key", "tls_ca"), certificate_files(self.folder, PeerRole(role)), strict=True))

    def flags(self, role: str) -> list[str]:
        return [f"--{name.replace('_', '-')}={file}" for name, file in self.settings(role).items()]

    def caller(self, role: str, *, of_worker: bool = False, api_key: str = "") -> ClientCredentials:
        return ClientCredentials(self.files(role), WORKER_NAME if of_worker else "", api_key)

    def with_names(self, name: str, names: Sequence[x509.GeneralName], subject: str = "somebody") -> ListenerTls:
        """Signs a certificate with exactly these alternative names, whatever they say, in files of that name."""
        authority = x509.load_pem_x509_certificate((self.folder / "ca.crt").read_bytes())
        authority_key = serialization.load_pem_private_key((self.folder / "ca.key").read_bytes(), None)
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().serial_number(x509.random_serial_number()).public_key(key.public_key())
        builder = builder.subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)]))
        builder = builder.issuer_name(authority.subject)
        builder = builder.not_valid_before(now - datetime.timedelta(minutes=5))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1))
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())  # type: ignore[arg-type]
        builder = builder.add_extension(issuer, critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        signed = builder.sign(authority_key, hashes.SHA256())  # type: ignore[arg-type]
        pem, pkcs8, plain = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        (self.folder / f"{name}.crt").write_bytes(signed.public_bytes(pem))
        (self.folder / f"{name}.key").write_bytes(key.private_bytes(pem, pkcs8, plain))
        return ListenerTls(*(str(self.folder / file) for file in (f"{name}.crt", f"{name}.key", "ca.crt")))

    def stranger(self) -> ClientCredentials:
        """A caller that knows whom it calls, and has no certificate."""
        return ClientCredentials(TlsFiles(ca=self.settings("client")["tls_ca"]))
