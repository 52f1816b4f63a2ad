"""Which names the certificate of a peer has, as gRPC tells them in the context of a call, and as `ssl` does.

gRPC tells alternative names of all kinds in one list, and URIs in a second one, and it cuts a URI at a zero byte, which
stands in no honest certificate: such a URI counts as no name.
"""

import ssl
from collections.abc import Iterable, Mapping
from typing import Any

AuthContext = Mapping[str, Iterable[bytes]]


def uris_of_context(found: AuthContext) -> list[str]:
    """The URIs, whole."""
    certificate = next(iter(found.get("x509_pem_cert", ())), b"")
    if not certificate:
        return []
    der = ssl.PEM_cert_to_DER_cert(certificate.decode("ascii"))
    return [_text(uri) for uri in found.get("peer_uri", ()) if uri + b"\0" not in der]


def uris_of_peer(certificate: Mapping[str, Any] | None) -> list[str]:
    """The URIs in a peer's certificate, as ssl's `getpeercert` gives it: none for a peer without a certificate."""
    return [value for kind, value in _alternatives(certificate) if kind == "URI"]


def subject_of_context(found: AuthContext) -> list[str]:
    """The names by which people know the peer: URIs and common names, or other names if there is neither."""
    uris = uris_of_context(found)
    known = [*uris, *(f"CN={_text(name)}" for name in found.get("x509_common_name", ()))]
    cut = set(found.get("peer_uri", ()))
    others = (name for name in found.get("x509_subject_alternative_name", ()) if name not in cut)
    return known or [f"name={_text(name)}" for name in others]


def subject_of_peer(certificate: Mapping[str, Any] | None) -> list[str]:
    """The names by which people know a peer, from its certificate as `getpeercert` gives it."""
    pairs = (pair for each in (certificate or {}).get("subject", ()) for pair in each)
    known = [*uris_of_peer(certificate), *(f"CN={value}" for name, value in pairs if name == "commonName")]
    others = (value for kind, value in _alternatives(certificate) if kind != "URI" and isinstance(value, str))
    return known or [f"name={value}" for value in others]


def _alternatives(certificate: Mapping[str, Any] | None) -> Iterable[tuple[str, Any]]:
    found: Iterable[tuple[str, Any]] = (certificate or {}).get("subjectAltName", ())
    return found


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
