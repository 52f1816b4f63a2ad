"""The certificate, the key and the authorities of a process, read from files, and read again when the files change.

    tls = TlsFiles("tls.crt", "tls.key", "ca.crt")
    server.add_secure_port(address, tls.server_credentials())
    context = tls.client_context()

Each new connection uses what the files hold by then; connections that are open go on. Files that cannot be used, such
as a certificate whose new key has not been written yet, are looked at again, and the last good ones stay in use.
"""

import logging
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from octavo.net.security.certificate_names import AuthContext, uris_of_context, uris_of_peer
from octavo.net.security.roles import PeerRole, roles_in
from octavo.net.security.trail import AccessReason, AccessTrail, Caller, ListenerKind, note_handshakes

log = logging.getLogger(__name__)

CHECK_S = 1.0  # how old what is known of the files may be


class TlsError(Exception):
    """The files cannot be used. The message names the setting, the file, and what is wrong."""


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """What the files held at one time. Contexts are for connections that are not those of gRPC."""

    cert: bytes
    key: bytes
    ca: bytes  # empty: the authorities that the system trusts
    server_context: ssl.SSLContext | None  # None without a certificate
    http_context: ssl.SSLContext | None  # as well
    client_context: ssl.SSLContext


class TlsFiles:
    """The files of one process. A caller may have authorities alone; a listener needs a certificate. Thread-safe."""

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
        self.trail: AccessTrail | None = (
            None  # is told of handshakes that fail, but for those of gRPC, which tells nobody
        )

    @property
    def has_certificate(self) -> bool:
        return bool(self._files["--tls-cert"])

    def current(self) -> TlsMaterial:
        """What the files hold, or held a second ago. The same object for as long as they do not change."""
        with self._lock:
            if time.monotonic() - self._looked_at >= CHECK_S:
                self._look_again()
            return self._material

    def server_credentials(self, *, ask_callers: bool = True) -> grpc.ServerCredentials:
        """The credentials of a gRPC listener. With `ask_callers`, whoever calls needs a certificate of --tls-ca."""
        used = self.current()

        def changed() -> Any:
            nonlocal used
            found = self.current()
            if found is used:
                return None
            used = found
            return _grpc_configuration(found)

        return grpc.dynamic_ssl_server_credentials(_grpc_configuration(used), changed, ask_callers)

    def server_context(self) -> ssl.SSLContext:
        """The context of a listener of TLS that hands it to each new connection. Callers need a certificate."""
        context = self.current().server_context
        if context is None:
            raise TlsError("a listener needs --tls-cert and --tls-key")
        return context

    def client_context(self) -> ssl.SSLContext:
        """The context of a connection that is made now."""
        return self.current().client_context

    def http_context(self, listener: ListenerKind = ListenerKind.HTTP) -> ssl.SSLContext:
        """The context of an HTTP server, which keeps it for its life. Callers may have a certificate, or none.

        A certificate that no authority of --tls-ca has signed ends the handshake.
        """

        def use_current(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            connection.context = self.current().http_context or connection.context

        if not self.has_certificate:
            raise TlsError("a listener needs --tls-cert and --tls-key")
        context = _new_http_context(self._files, self.current().ca)
        context.sni_callback = use_current  # called for every handshake, before the certificate is chosen
        note_handshakes(context, lambda why: self.note_refusal(listener, AccessReason.HANDSHAKE, Caller(), why))
        return context

    def note_refusal(self, listener: ListenerKind, reason: AccessReason, caller: Caller, why: str) -> None:
        """A connection was refused."""
        if self.trail is not None:
            self.trail.note_refusal(listener, reason, caller, "", why)

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
        return tuple(_stamp_of(file) for file in self._files.values())

    def _read(self) -> TlsMaterial:
        cert, key, ca = (_bytes_of(flag, file) for flag, file in self._files.items())
        client = ssl.create_default_context(cadata=_text(ca) or None) if ca else ssl.create_default_context()
        client.minimum_version = ssl.TLSVersion.TLSv1_2
        server = http = None
        if cert:
            http = _new_http_context(self._files, ca)
            server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            server.minimum_version = ssl.TLSVersion.TLSv1_3
            server.verify_mode = ssl.CERT_REQUIRED
            if ca:
                server.load_verify_locations(cadata=_text(ca))
            for context in (client, server):
                _load_chain(context, self._files)
        return TlsMaterial(cert, key, ca, server, http, client)


def roles_of_peer(certificate: Mapping[str, Any] | None) -> frozenset[PeerRole]:
    """The roles in a peer's certificate, as ssl's `getpeercert` gives it: none for a peer without one."""
    return roles_in(uris_of_peer(certificate))


def roles_of_context(found: AuthContext) -> frozenset[PeerRole]:
    """The same, as gRPC gives it in the context of a call."""
    return roles_in(uris_of_context(found))


def _grpc_configuration(material: TlsMaterial) -> Any:
    pairs = [(material.key, material.cert)]
    return grpc.ssl_server_certificate_configuration(pairs, root_certificates=material.ca or None)


def _new_http_context(files: Mapping[str, str], ca: bytes) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _load_chain(context, files)
    if ca:
        context.load_verify_locations(cadata=_text(ca))
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def _load_chain(context: ssl.SSLContext, files: Mapping[str, str]) -> None:
    cert, key = files["--tls-cert"], files["--tls-key"]
    try:
        context.load_cert_chain(cert, key, password=_refuse_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise TlsError(f"--tls-cert {cert} and --tls-key {key} cannot be used together: {_reason(error)}") from error


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
            ssl.create_default_context(cadata=_text(content))
        except (ssl.SSLError, ValueError) as error:
            raise TlsError(f"{flag} {file}: holds no certificate that can be read: {_reason(error)}") from error
    return content


def _text(pem: bytes) -> str:
    return pem.decode("ascii", "replace")


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", "") or error)


def _stamp_of(file: str) -> tuple[int, int, int] | None:
    """What changes when a file is replaced or written; None if there is none."""
    if not file:
        return None
    try:
        found = Path(file).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
