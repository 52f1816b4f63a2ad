"""Which roles may call each gRPC method. Nobody may call a method that has no line in the table.

A role stands in the certificate of whoever calls, as a URI among its alternative names: octavo:///role/router. A
certificate may have several. Without TLS there are no roles, and whoever reaches a listener may call all of it.

Certificates come as gRPC tells them in the context of a call, and as `ssl` does. gRPC tells alternative names of all
kinds in one list, and URIs in a second one, and it cuts a URI at a zero byte, which stands in no honest certificate:
such a URI counts as no name.
"""

import ssl
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

AuthContext = Mapping[str, Iterable[bytes]]
URI_PREFIX = "octavo:///role/"


class PeerRole(StrEnum):
    """What a process or a person with a certificate may do."""

    CLIENT = "client"  # sends requests
    OPERATOR = "operator"  # asks and tells routers how they run; may send requests as well
    ROUTER = "router"
    WORKER = "worker"

    @property
    def uri(self) -> str:
        """The URI in a certificate that gives it this role."""
        return f"{URI_PREFIX}{self}"


_CALLERS = frozenset({PeerRole.CLIENT, PeerRole.OPERATOR})
_OPERATOR = frozenset({PeerRole.OPERATOR})
_ROUTER = frozenset({PeerRole.ROUTER})
_WORKER = frozenset({PeerRole.WORKER})
_EVERYBODY = frozenset(PeerRole)

_TABLE: dict[str, dict[tuple[str, ...], frozenset[PeerRole]]] = {
    "octavo.v1.Inference": {
        ("Generate", "Complete", "Attach", "Cancel", "Get", "Tokenize", "Detokenize", "ListModels"): _CALLERS,
        ("Embed", "Score"): _CALLERS,
    },
    "octavo.v1.Admin": {
        ("ListWorkers", "ListSequences", "ExplainPlacement", "WatchCluster", "Migrate", "DrainWorker"): _OPERATOR,
        ("AddPrefix", "RemovePrefix", "ListPrefixes"): _OPERATOR,
        ("AddAdapter", "RemoveAdapter", "ListAdapters"): _OPERATOR,
    },
    "octavo.internal.v1.Worker": {
        ("Hello", "Watch"): _ROUTER | _OPERATOR,
        ("Drain",): _ROUTER | _OPERATOR | _WORKER,  # a pod empties its own worker before it ends
        ("Schedule", "Step", "Swap", "Migrate", "Cancel", "Pool", "Keep"): _ROUTER,
    },
    "octavo.internal.v1.Transfer": {
        ("Prepare", "Extend", "Finish", "Abort", "GiveAdapter", "Fetch", "ListHot", "Standby"): _WORKER,
    },
    "grpc.health.v1.Health": {("Check", "List", "Watch"): _EVERYBODY},
    "grpc.reflection.v1.ServerReflection": {("ServerReflectionInfo",): _CALLERS},
    "grpc.reflection.v1alpha.ServerReflection": {("ServerReflectionInfo",): _CALLERS},
    "grpc.channelz.v1.Channelz": {
        ("GetTopChannels", "GetServers", "GetServer", "GetServerSockets"): _OPERATOR,
        ("GetChannel", "GetSubchannel", "GetSocket"): _OPERATOR,
    },
}
ALLOWED = {
    f"/{service}/{method}": roles
    for service, lines in _TABLE.items()
    for methods, roles in lines.items()
    for method in methods
}
_NOBODY: frozenset[PeerRole] = frozenset()


def roles_allowed(method: str) -> frozenset[PeerRole]:
    """The roles that may call /package.Service/Method: none for a method that is not in the table."""
    return ALLOWED.get(method, _NOBODY)


def roles_in(uris: Iterable[str]) -> frozenset[PeerRole]:
    """The roles among the URIs of a certificate. URIs of another form, and unknown roles, give none."""
    named = {uri.removeprefix(URI_PREFIX) for uri in uris if uri.startswith(URI_PREFIX)}
    return frozenset(role for role in PeerRole if role.value in named)


def roles_of_peer(certificate: Mapping[str, Any] | None) -> frozenset[PeerRole]:
    """The roles in a peer's certificate, as ssl's `getpeercert` gives it: none for a peer without one."""
    return roles_in(uris_of_peer(certificate))


def roles_of_context(found: AuthContext) -> frozenset[PeerRole]:
    """The same, as gRPC gives it in the context of a call."""
    return roles_in(uris_of_context(found))


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
