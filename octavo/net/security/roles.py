"""Which roles may call each gRPC method. Nobody may call a method that has no line in the table.

A role stands in the certificate of whoever calls, as a URI among its alternative names: octavo:///role/router. A
certificate may have several. Without TLS there are no roles, and whoever reaches a listener may call all of it.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from octavo.net.security.certificate_names import AuthContext, uris_of_context, uris_of_peer

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
    },
    "octavo.v1.Admin": {
        ("ListWorkers", "ListSequences", "ExplainPlacement", "WatchCluster", "Migrate", "DrainWorker"): _OPERATOR,
    },
    "octavo.internal.v1.Worker": {
        ("Hello", "Watch"): _ROUTER | _OPERATOR,
        ("Drain",): _ROUTER | _OPERATOR | _WORKER,  # a pod empties its own worker before it ends
        ("Schedule", "Step", "Swap", "Migrate", "Cancel"): _ROUTER,
    },
    "octavo.internal.v1.Transfer": {
        ("Prepare", "Extend", "Finish", "Abort", "Fetch", "ListHot"): _WORKER,
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
