"""Where the certificates are that octavo makes itself. `development_ca` makes them, which needs a package."""

from pathlib import Path

from octavo.net.security.roles import PeerRole
from octavo.process.command_error import CommandError

LIFE_DAYS = 365
CA_FILE, CA_KEY_FILE = "ca.crt", "ca.key"


class CertificateError(CommandError):
    """The certificates cannot be made. The message says what to do."""


def certificate_files(folder: Path, role: PeerRole) -> tuple[str, str, str]:
    """The paths of the certificate, the key and the authority of a role."""
    return str(folder / f"{role}.crt"), str(folder / f"{role}.key"), str(folder / CA_FILE)
