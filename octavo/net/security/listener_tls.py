"""The files of TLS of a process that listens.

tls = ListenerTls("tls.crt", "tls.key", "ca.crt")
server.add_secure_port(address, tls.server_credentials())
"""

import ssl
from dataclasses import dataclass
from typing import Any, cast

import grpc

from octavo.net.security.trail import AccessReason, AccessTrail, Caller, ListenerKind, note_handshakes
from octavo.wire.tls import TlsError, TlsFiles, TlsMaterial, pem_text


@dataclass(frozen=True, slots=True)
class ListenerMaterial(TlsMaterial):
    """The same with the contexts of listeners that are not those of gRPC."""

    server_context: ssl.SSLContext
    http_context: ssl.SSLContext


class ListenerTls(TlsFiles):
    """Files with a certificate. Its process calls others with it, too."""

    def __init__(self, cert: str, key: str, ca: str = "", trail: AccessTrail | None = None) -> None:
        """`trail` is told of handshakes that fail, but for those of gRPC, which tells nobody. Raises TlsError."""
        if not cert:
            raise TlsError("a listener needs --tls-cert and --tls-key")
        super().__init__(cert, key, ca)
        self.trail = trail

    def current(self) -> ListenerMaterial:
        return cast("ListenerMaterial", super().current())

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

    def http_context(self, listener: ListenerKind = ListenerKind.HTTP) -> ssl.SSLContext:
        """The context of an HTTP server, which keeps it for its life. Callers may have a certificate, or none.

        A certificate that no authority of --tls-ca has signed ends the handshake.
        """

        def use_current(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            connection.context = self.current().http_context

        context = self._new_http_context(self.current().ca)
        context.sni_callback = use_current  # called for every handshake, before the certificate is chosen
        note_handshakes(context, lambda why: self.note_refusal(listener, AccessReason.HANDSHAKE, Caller(), why))
        return context

    def note_refusal(self, listener: ListenerKind, reason: AccessReason, caller: Caller, why: str) -> None:
        """A connection was refused."""
        if self.trail is not None:
            self.trail.note_refusal(listener, reason, caller, "", why)

    def _read(self) -> ListenerMaterial:
        found = super()._read()
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # of a listener that hands it to each new connection
        server.minimum_version = ssl.TLSVersion.TLSv1_3
        server.verify_mode = ssl.CERT_REQUIRED
        if found.ca:
            server.load_verify_locations(cadata=pem_text(found.ca))
        self._load_chain(server)
        http = self._new_http_context(found.ca)
        return ListenerMaterial(found.cert, found.key, found.ca, found.client_context, server, http)

    def _new_http_context(self, ca: bytes) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._load_chain(context)
        if ca:
            context.load_verify_locations(cadata=pem_text(ca))
            context.verify_mode = ssl.CERT_OPTIONAL
        return context


def _grpc_configuration(material: TlsMaterial) -> Any:
    pairs = [(material.key, material.cert)]
    return grpc.ssl_server_certificate_configuration(pairs, root_certificates=material.ca or None)
