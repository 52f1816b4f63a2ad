"""What a program answers over HTTP to those who watch it: `/metrics` and `/health`."""

import importlib.metadata
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from octavo.metrics.exporter import MetricExporter
from octavo.metrics.value import MetricValue


class WebApp:
    """Answers for one program. `is_serving` is what its health says of its own service, `is_healthy` of any service.

    `more` are further paths that the program answers to.
    """

    def __init__(
        self,
        program: str,
        is_serving: Callable[[], bool],
        is_healthy: Callable[[str], bool] | None = None,
        more: Sequence[Route] = (),
    ) -> None:
        self.exporter = MetricExporter(program, importlib.metadata.version("octavo"))
        self.exporter.add_source(lambda: [MetricValue("octavo_serving", is_serving())])
        self._is_serving = is_serving
        self._is_healthy = is_healthy or (lambda _: self._is_serving())
        routes = [
            Route("/metrics", self._metrics),
            Route("/health", self._health),
            Route("/health/{service}", self._health_of_service),
            *more,
        ]
        self.app = Starlette(routes=routes)

    async def _metrics(self, request: Request) -> Response:
        exposition = self.exporter.expose(request.headers.get("accept", ""))
        return Response(exposition.text, headers={"content-type": exposition.content_type})

    async def _health(self, request: Request) -> Response:
        return _health_answer(self._is_serving())

    async def _health_of_service(self, request: Request) -> Response:
        """What grpc.health.v1 says of a service, for probes that cannot show a certificate."""
        return _health_answer(self._is_healthy(request.path_params["service"]))


def _health_answer(serving: bool) -> Response:
    return JSONResponse({"status": "SERVING" if serving else "NOT_SERVING"}, status_code=200 if serving else 503)
