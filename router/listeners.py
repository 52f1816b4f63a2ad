"""Where a router listens: for its clients over gRPC and HTTP, for operators and programs, and with its page."""

import asyncio

from octavo.metrics.web import WebApp
from octavo.net.http_server import HttpServer
from octavo.net.security.authorizer import Authorizer
from octavo.net.security.gates import AsgiApp, WebGate
from octavo.net.security.listener_tls import ListenerTls
from octavo.net.security.protection import internal_authorizer, operator_page_options
from octavo.net.security.trail import AccessTrail
from octavo.net.server import add_standard_services, listen, make_server
from octavo.net.traces import TraceInterceptor, traced_app
from octavo.process.listen_address import exposed_addresses
from octavo.process.open_files import connection_limit
from octavo.settings.router import RouterSettings, parse_origins
from router.admin.admin_service import AdminService
from router.health_monitor import INFERENCE
from router.http.app import FORM_PATHS, OpenAiApp
from router.streaming.inference_service import InferenceService

ADMIN = "octavo.v1.Admin"
STOP_GRACE_S = 2.0
OTHER_CALLS = 512  # that are no streams, or are about to be refused as one stream too many


class RouterListeners:
    """The servers of one router. They are made by `open`, and gRPC is answered from `serve` on."""

    def __init__(
        self,
        settings: RouterSettings,
        tls: ListenerTls | None,
        authorizer: Authorizer,
        trail: AccessTrail,
        *,
        with_traces: bool,
    ) -> None:
        self.endpoint = self.admin_endpoint = self.http_endpoint = self.web_endpoint = ""  # empty: nowhere
        self._settings = settings
        self._tls = tls
        self._authorizer = authorizer
        self._trail = trail
        self._with_traces = with_traces
        self._web_server: HttpServer | None = None

    async def open(self, inference: InferenceService, admin: AdminService, openai: OpenAiApp, pages: WebApp) -> None:
        """Listens, and answers HTTP. Raises ListenError."""
        settings = self._settings
        max_connections = connection_limit(settings.max_connections)
        self._public_server = make_server(
            authorizer=self._authorizer,
            interceptors=[TraceInterceptor()] if self._with_traces else [],
            max_connection_age_ms=settings.max_connection_age_ms or None,
            max_concurrent_rpcs=settings.max_streams + OTHER_CALLS,
            max_connections=max_connections,
        )
        self.public_health = add_standard_services(self._public_server, [INFERENCE])
        inference.serve_on(self._public_server)
        self.endpoint = listen(
            self._public_server, settings.address, "--listen", self._tls, ask_callers=settings.client_certificates
        )
        self._admin_server = make_server(authorizer=internal_authorizer(settings, self._trail))
        self.admin_health = add_standard_services(self._admin_server, [ADMIN])
        admin.serve_on(self._admin_server)
        if settings.admin_listen:
            self.admin_endpoint = listen(self._admin_server, settings.admin_listen, "--admin-listen", self._tls)
        self._http_server = self._make_http_server(openai, max_connections)
        if settings.http_address:
            self.http_endpoint = await self._http_server.start()
        if settings.web_listen:
            app, context = operator_page_options(pages.app, self._tls)
            self._web_server = HttpServer(app, settings.web_listen, "--web-listen", context)
            self.web_endpoint = await self._web_server.start()

    def _make_http_server(self, openai: OpenAiApp, max_connections: int) -> HttpServer:
        settings = self._settings
        open_to_all = self._tls is None and not settings.api_keys
        app: AsgiApp = WebGate(
            openai,
            parse_origins(settings.http_origins),
            local_names_only=open_to_all and not exposed_addresses([settings.http_address]),
            forms=FORM_PATHS,
            trail=self._trail,
        )
        return HttpServer(
            traced_app(app) if self._with_traces else app,
            settings.http_address,
            "--http-listen",
            None if self._tls is None else self._tls.http_context(),
            max_connections=max_connections,
        )

    async def serve(self) -> None:
        await self._public_server.start()
        await self._admin_server.start()

    def say_not_serving(self) -> None:
        """From now on, whoever asks for the health of a service over gRPC hears that it is not served."""
        self.public_health.shut_down()
        self.admin_health.shut_down()

    async def refuse_clients(self, grace_s: float) -> None:
        """Refuses further calls and connections of clients. Returns when no call over gRPC is left, or after a time."""
        self._http_server.refuse_connections()
        await self._public_server.stop(grace_s)

    async def stop(self) -> None:
        """Ends all connections, those of clients after some time."""
        await asyncio.gather(self._public_server.stop(STOP_GRACE_S), self._http_server.stop(STOP_GRACE_S))
        await self._admin_server.stop(0)
        if self._web_server is not None:
            await self._web_server.stop(0)
