"""Which paths the page of a router has."""

from starlette.routing import Route
from starlette.types import ASGIApp

from octavo.net.security.gates import WebGate
from octavo.net.security.trail import AccessTrail, ListenerKind
from router.admin.cluster_watch import ClusterWatch
from router.dashboard.cluster_endpoints import ClusterEndpoint, ClusterStream
from router.dashboard.static_files import HEADERS, static_routes


def dashboard_routes(cluster: ClusterWatch, *, local_names_only: bool, trail: AccessTrail | None = None) -> list[Route]:
    """The page, and what feeds it. Views are for no web page but this one.

    With `local_names_only`, they are for those who call by an address or as localhost.
    """

    def guarded(app: ASGIApp) -> ASGIApp:
        kind = ListenerKind.PAGES
        return WebGate(app, local_names_only=local_names_only, headers=HEADERS, trail=trail, listener=kind)

    return [
        *static_routes(),
        Route("/cluster", guarded(ClusterEndpoint(cluster)), methods=["GET"]),
        Route("/cluster/stream", guarded(ClusterStream(cluster)), methods=["GET"]),
    ]
