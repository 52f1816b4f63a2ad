"""The gRPC server of a worker, and its pages for those who watch it. Both listen before the model is loaded."""

import ipaddress
import logging
import socket

from gpu_worker.migration.transfer_service import TransferService
from gpu_worker.serving.calls.worker_service import SERVICES, WorkerService, add_services
from octavo.metrics.web import WebApp
from octavo.net.http_server import HttpServer
from octavo.net.security.protection import internal_authorizer, operator_page_options, tls_of
from octavo.net.security.trail import AccessTrail, ListenerKind
from octavo.net.server import add_standard_services, make_server, open_port
from octavo.process.listen_address import EVERY_INTERFACE
from octavo.request.ids import Incarnation, new_incarnation
from octavo.request.record import WorkerRole
from octavo.settings.worker import WorkerSettings
from octavo.wire.endpoint import parse_advertised, parse_listener

log = logging.getLogger(__name__)


class NoAddress(RuntimeError):
    """No address to advertise can be found. The message says which setting helps."""


class Listener:
    """The name, the address and the gRPC server of one worker process.

    Until the worker serves, health says NOT_SERVING, and calls that need the engine are answered Loading. So a probe
    can tell a process that loads from one that is dead.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        """Raises NoAddress if no address to advertise can be found, or TlsError."""
        self.trail = AccessTrail(ListenerKind.WORKER, ListenerKind.PAGES, ListenerKind.BLOCKS)
        self.tls = tls_of(settings, self.trail)
        self._listen = settings.address
        self._host, self._port = advertised_address(settings.address, settings.advertise)
        self.worker_id = settings.worker_id  # empty: made from host and port once the listener is open
        self.incarnation: Incarnation = new_incarnation()
        self.endpoint = ""  # where routers call; known once the listener is open
        self.service = WorkerService(self.worker_id, self.incarnation, WorkerRole(settings.role))
        self.transfer = TransferService()
        self._server = make_server(internal=True, authorizer=internal_authorizer(settings, self.trail))
        self.health = add_standard_services(self._server, SERVICES)
        add_services(self._server, self.service, self.transfer)
        self.web_app = WebApp("worker", lambda: self.health.is_serving(SERVICES[0]), self.health.is_serving)
        self.web_app.exporter.add_source(self.trail.values)
        self._web_server: HttpServer | None = None
        if settings.web_listen:
            app, context = operator_page_options(self.web_app.app, self.tls)
            self._web_server = HttpServer(app, settings.web_listen, "--web-listen", context)
        self.web_endpoint = ""  # empty: nowhere

    async def open(self) -> None:
        """Begins to listen. Raises RuntimeError or ListenError if an address is taken or does not exist."""
        port = open_port(self._server, self._listen, self.tls)
        self.endpoint = f"{self._host}:{self._port or port}"
        self.worker_id = self.service.worker_id = self.worker_id or f"worker-{self._host}-{port}"
        if self._web_server is not None:
            self.web_endpoint = await self._web_server.start()
        await self._server.start()
        log.info(
            "%s (%s) listens on %s, to be called at %s", self.worker_id, self.incarnation, self._listen, self.endpoint
        )

    async def close(self, grace_s: float = 0.5) -> None:
        """Stops listening; calls under way have `grace_s` to end."""
        await self._server.stop(grace_s)
        if self._web_server is not None:
            await self._web_server.stop(0)


def advertised_address(listen: str, advertise: str) -> tuple[str, int | None]:
    """The host and the port in `advertise`, else the host in `listen`, else an address of this machine.

    Without a port, the one that the worker listens on is to be called. Raises NoAddress.
    """
    if advertise:
        return parse_advertised(advertise)
    host = parse_listener(listen).host
    return own_address() if host in EVERY_INTERFACE else host, None


def own_address() -> str:
    """The address that this machine's name stands for: in a cluster, the address of the pod. Raises NoAddress."""
    name = socket.gethostname()
    try:
        found = {info[4][0] for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        found = set()
    addresses = [ipaddress.ip_address(str(text).partition("%")[0]) for text in found]
    others = [each for each in addresses if not (each.is_loopback or each.is_link_local)]
    if not others:
        raise NoAddress(f"the name of this host, {name}, has no address that others could call: give --advertise HOST")
    best = min(others, key=lambda each: (each.version, str(each)))
    return f"[{best}]" if best.version == 6 else str(best)
