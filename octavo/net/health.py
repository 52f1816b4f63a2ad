"""grpc.health.v1 for asyncio servers.

The servicer of grpcio-health-checking forgets the other watchers of a service when one watcher leaves: they are not
told of any later change. Here every watcher waits by itself.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from grpc_health.v1 import health_pb2

from octavo.request.errors import NotFound

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
ALL = ""  # the name that stands for the whole server
ALIVE = "alive"  # SERVING for as long as the process answers, whatever becomes of its services: for probes that kill


class Health:
    """Says of each service whether it serves: not before `set` or `set_all`, and not after `shut_down`."""

    def __init__(self, service_names: Iterable[str]) -> None:
        self._statuses = dict.fromkeys((ALL, *service_names), NOT_SERVING) | {ALIVE: SERVING}
        self._changed = asyncio.Event()
        self._ended = False

    def set(self, service_name: str, serving: bool) -> None:
        if self._ended:
            return
        self._statuses[service_name] = SERVING if serving else NOT_SERVING
        self._changed.set()  # wakes every watcher that waits now; later ones wait for the next event
        self._changed = asyncio.Event()

    def is_serving(self, service_name: str = ALL) -> bool:
        """Whether the service says SERVING. An unknown one does not."""
        return bool(self._statuses.get(service_name) == SERVING)

    def set_all(self, serving: bool) -> None:
        for name in self._statuses.keys() - {ALIVE}:
            self.set(name, serving)

    def shut_down(self) -> None:
        """Sets all services to NOT_SERVING for good. Call it first of all when draining begins."""
        self.set_all(False)
        self._ended = True

    async def Check(self, request: Any, context: Any) -> Any:
        status = self._statuses.get(request.service)
        if status is None:
            raise NotFound(f"no service {request.service!r} here", resource="service", name=request.service)
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: Any) -> Any:
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        sent = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, SERVICE_UNKNOWN)
            if status != sent:
                sent = status
                yield health_pb2.HealthCheckResponse(status=status)
            else:
                await changed.wait()
