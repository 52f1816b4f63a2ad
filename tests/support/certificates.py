"""Certificates of all roles, and what programs and callers are told of them."""

from collections.abc import Sequence
from pathlib import Path

from octavo.security.client_credentials import ClientCredentials
from octavo.security.development_ca import certificate_files, make_certificates
from octavo.security.roles import WORKER_NAME, PeerRole
from octavo.security.tls import TlsFiles


class Certificates:
    """A folder with an authority and the certificates of all roles, those of servers for this machine and `hosts`."""

    def __init__(self, folder: Path, hosts: Sequence[str] = ()) -> None:
        self.folder = folder
        make_certificates(folder, hosts)

    def files(self, role: str) -> TlsFiles:
        return TlsFiles(*certificate_files(self.folder, PeerRole(role)))

    def settings(self, role: str) -> dict[str, str]:
        """The settings of a program of this role."""
        return dict(zip(("tls_cert", "tls_key", "tls_ca"), certificate_files(self.folder, PeerRole(role)), strict=True))

    def flags(self, role: str) -> list[str]:
        return [f"--{name.replace('_', '-')}={file}" for name, file in self.settings(role).items()]

    def caller(self, role: str, *, of_worker: bool = False, api_key: str = "") -> ClientCredentials:
        return ClientCredentials(self.files(role), WORKER_NAME if of_worker else "", api_key)

    def stranger(self) -> ClientCredentials:
        """A caller that knows whom it calls, and has no certificate."""
        return ClientCredentials(TlsFiles(ca=self.settings("client")["tls_ca"]))
