"""Which paths the page of a router has."""

from starlette.routing import Route
from starlette.types import ASGIApp

from router.admin.cluster_watch import ClusterWatch
from router.dashboard.cluster_endpoints import ClusterEndpoint, ClusterStream
from router.dashboard.local_names import LocalNameGuard
from router.dashboard.static_files import static_routes


def dashboard_routes(cluster: ClusterWatch, *, local_names_only: bool) -> list[Route]:
    """The page, and what feeds it. With `local_names_only`, views are for those who call by an address or localhost."""

    def guarded(app: ASGIApp) -> ASGIApp:
        return LocalNameGuard(app) if local_names_only else app

    return [
        *static_routes(),
        Route("/cluster", guarded(ClusterEndpoint(cluster)), methods=["GET"]),
        Route("/cluster/stream", guarded(ClusterStream(cluster)), methods=["GET"]),
    ]
