"""Who a caller is: the certificate, the key and the authorities of its process, and its API key.

Certificates are read from files, and read again when the files change. Each new connection uses what the files hold by
then; connections that are open go on. Files that cannot be used, such as a certificate whose new key has not been
written yet, are looked at again, and the last good ones stay in use.
"""

import logging
import ssl
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)

# The DNS name that the certificate of every worker has, beside any others: pods have addresses that no certificate
# can know, so routers and workers expect this name wherever a worker listens.
WORKER_NAME = "worker.octavo.internal"
CHECK_S = 1.0  # how old what is known of the files may be


class TlsError(Exception):
    """The files cannot be used. The message names the setting, the file, and what is wrong."""


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """What the files held at one time. The context is for connections that are not those of gRPC."""

    cert: bytes
    key: bytes
    ca: bytes  # empty: the authorities that the system trusts
    client_context: ssl.SSLContext


class TlsFiles:
    """The files of one process. A caller may have authorities alone. Thread-safe."""

    def __init__(self, cert: str = "", key: str = "", ca: str = "") -> None:
        """Raises TlsError."""
        if bool(cert) != bool(key):
            raise TlsError("--tls-cert and --tls-key belong together: give both, or none of them")
        self._files = {"--tls-cert": cert, "--tls-key": key, "--tls-ca": ca}
        self._lock = threading.Lock()
        self._stamp = self._current_stamp()
        self._looked_at = time.monotonic()
        self._refused: object = None  # the stamp of files that could not be used, which is said once
        self._material = self._read()

    def current(self) -> TlsMaterial:
        """What the files hold, or held a second ago. The same object for as long as they do not change."""
        with self._lock:
            if time.monotonic() - self._looked_at >= CHECK_S:
                self._look_again()
            return self._material

    def client_context(self) -> ssl.SSLContext:
        """The context of a connection that is made now."""
        return self.current().client_context

    def _look_again(self) -> None:
        stamp = self._current_stamp()
        self._looked_at = time.monotonic()
        if stamp == self._stamp:
            return
        try:
            self._material = self._read()
        except TlsError as error:
            if stamp != self._refused:
                log.warning("the last certificate stays in use: %s", error)
            self._refused = stamp
            return
        if self._current_stamp() == stamp:  # else they changed again while they were read
            self._stamp = stamp
        log.info("new connections use the certificates that are in the files now")

    def _current_stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(stamp_of(file) for file in self._files.values())

    def _read(self) -> TlsMaterial:
        cert, key, ca = (_bytes_of(flag, file) for flag, file in self._files.items())
        client = ssl.create_default_context(cadata=pem_text(ca) or None) if ca else ssl.create_default_context()
        client.minimum_version = ssl.TLSVersion.TLSv1_2
        if cert:
            self._load_chain(client)
        return TlsMaterial(cert, key, ca, client)

    def _load_chain(self, context: ssl.SSLContext) -> None:
        cert, key = self._files["--tls-cert"], self._files["--tls-key"]
        try:
            context.load_cert_chain(cert, key, password=_refuse_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            what = f"--tls-cert {cert} and --tls-key {key} cannot be used together"
            raise TlsError(f"{what}: {_reason(error)}") from error


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """What goes with the calls of one caller. Without anything, calls are neither encrypted nor authenticated."""

    tls: TlsFiles | None = None
    server_name: str = ""  # in the certificate of whom it calls; empty: the host of the endpoint
    api_key: str = field(default="", repr=False)


PLAIN = ClientCredentials()


def _refuse_password() -> str:
    raise ValueError("the key is encrypted: give one without a password, readable by this user alone")


def _bytes_of(flag: str, file: str) -> bytes:
    if not file:
        return b""
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise TlsError(f"{flag} {file}: {error.strerror}: name a PEM file") from error
    if b"-----BEGIN " not in content:
        raise TlsError(f"{flag} {file}: is no PEM file")
    if flag == "--tls-ca":
        try:
            ssl.create_default_context(cadata=pem_text(content))
        except (ssl.SSLError, ValueError) as error:
            raise TlsError(f"{flag} {file}: holds no certificate that can be read: {_reason(error)}") from error
    return content


def pem_text(pem: bytes) -> str:
    return pem.decode("ascii", "replace")


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", "") or error)


def stamp_of(file: str) -> tuple[int, int, int] | None:
    """What changes when a file is replaced or written; None if there is none."""
    if not file:
        return None
    try:
        found = Path(file).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
