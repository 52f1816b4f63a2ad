"""The gRPC server of a worker, which listens before the model is loaded."""

import logging

from gpu_worker.serving.address import advertised_address
from gpu_worker.serving.server import SERVICES, WorkerService, add_services
from octavo import rpc
from octavo.ids import Incarnation, new_incarnation
from octavo.settings import WorkerSettings

log = logging.getLogger(__name__)


class Listener:
    """The name, the address and the gRPC server of one worker process.

    Until the worker serves, health says NOT_SERVING, and calls that need the engine are answered Loading. So a probe
    can tell a process that loads from one that is dead.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        """Raises NoAddress if no address to advertise can be found."""
        self._listen = settings.address
        self._host, self._port = advertised_address(settings.address, settings.advertise)
        self.worker_id = settings.worker_id  # empty: made from host and port once the listener is open
        self.incarnation: Incarnation = new_incarnation()
        self.endpoint = ""  # where routers call; known once the listener is open
        self.service = WorkerService(self.worker_id, self.incarnation)
        self._server = rpc.server(internal=True)
        self.health = rpc.add_standard_services(self._server, SERVICES)
        add_services(self._server, self.service)

    async def open(self) -> None:
        """Begins to listen. Raises RuntimeError if the address is taken or does not exist."""
        port = self._server.add_insecure_port(self._listen)
        self.endpoint = f"{self._host}:{self._port or port}"
        self.worker_id = self.service.worker_id = self.worker_id or f"worker-{self._host}-{port}"
        await self._server.start()
        log.info(
            "%s (%s) listens on %s, to be called at %s", self.worker_id, self.incarnation, self._listen, self.endpoint
        )

    async def close(self, grace_s: float = 0.5) -> None:
        """Stops listening; calls under way have `grace_s` to end."""
        await self._server.stop(grace_s)
