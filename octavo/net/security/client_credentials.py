"""How a caller shows who it is, and knows whom it calls."""

from dataclasses import dataclass, field
from pathlib import Path

from octavo.net.security.tls import TlsError, TlsFiles
from octavo.settings.client import ClientSettings


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """What goes with the calls of one caller. Without anything, calls are neither encrypted nor authenticated."""

    tls: TlsFiles | None = None
    server_name: str = ""  # in the certificate of whom it calls; empty: the host of the endpoint
    api_key: str = field(default="", repr=False)


PLAIN = ClientCredentials()


def credentials_of(settings: ClientSettings) -> ClientCredentials:
    """What the settings say. Raises TlsError."""
    key = _read_key(settings.api_key_file) if settings.api_key_file else ""
    tls = None
    if settings.tls_cert or settings.tls_key or settings.tls_ca:
        tls = TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_ca)
    return ClientCredentials(tls, settings.tls_server_name, key)


def _read_key(file: str) -> str:
    try:
        key = Path(file).expanduser().read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not ASCII"
        raise TlsError(f"--api-key-file {file}: {reason}") from None
    if not key or any(each.isspace() for each in key):
        raise TlsError(f"--api-key-file {file}: must hold one key, and nothing else")
    return key
