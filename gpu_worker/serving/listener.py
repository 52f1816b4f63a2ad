"""The gRPC server of a worker, which listens before the model is loaded."""

import logging

from gpu_worker.serving.address import advertised_host, advertised_port
from gpu_worker.serving.server import SERVICES, WorkerService, add_services
from octavo import rpc
from octavo.ids import Incarnation, new_incarnation
from octavo.settings import WorkerSettings

log = logging.getLogger(__name__)


class Listener:
    """What listens from the beginning: health says NOT_SERVING and the services Loading until there is a worker.

    Raises NoAddress where others could not call it.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._listen = settings.listen
        self._host = advertised_host(settings.listen, settings.advertise)
        self._port = advertised_port(settings.advertise)
        self.worker_id = settings.worker_id or f"worker-{self._host}-{settings.listen.rpartition(':')[2]}"
        self.incarnation: Incarnation = new_incarnation()
        self.endpoint = ""
        self.service = WorkerService(self.worker_id, self.incarnation)
        self._server = rpc.server(internal=True)
        self.health = rpc.add_standard_services(self._server, SERVICES)
        add_services(self._server, self.service)

    async def open(self) -> None:
        """Raises RuntimeError if the address cannot be had."""
        port = self._server.add_insecure_port(self._listen)
        self.endpoint = f"{self._host}:{self._port or port}"
        await self._server.start()
        log.info(
            "%s (%s) listens on %s, to be called at %s", self.worker_id, self.incarnation, self._listen, self.endpoint
        )

    async def close(self, grace_s: float = 0.5) -> None:
        await self._server.stop(grace_s)
