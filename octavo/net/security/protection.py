"""What the settings of a program say about TLS and API keys, as the objects that do it."""

import ssl

from octavo.net.security.api_keys import ApiKeys
from octavo.net.security.authorizer import Authorizer
from octavo.net.security.gates import AsgiApp, OperatorGate
from octavo.net.security.listener_tls import ListenerTls
from octavo.net.security.trail import AccessTrail, ListenerKind
from octavo.settings.router import RouterSettings
from octavo.settings.worker import WorkerSettings


def tls_of(settings: RouterSettings | WorkerSettings, trail: AccessTrail | None = None) -> ListenerTls | None:
    """The files of TLS; None where the program does without. Raises TlsError."""
    return ListenerTls(settings.tls_cert, settings.tls_key, settings.tls_ca, trail) if settings.tls_cert else None


def operator_page_options(app: AsgiApp, tls: ListenerTls | None) -> tuple[AsgiApp, ssl.SSLContext | None]:
    """What a server of pages for operators is to serve, and the context of its connections."""
    if tls is None:
        return app, None
    return OperatorGate(app, trail=tls.trail), tls.http_context(ListenerKind.PAGES)


def client_authorizer(settings: RouterSettings, trail: AccessTrail | None = None) -> Authorizer:
    """Who may call where clients call, over gRPC and over HTTP. Raises ApiKeyError."""
    keys = ApiKeys(settings.api_keys) if settings.api_keys else None
    return Authorizer(tls=bool(settings.tls_cert), ask_callers=settings.client_certificates, keys=keys, trail=trail)


def internal_authorizer(settings: RouterSettings | WorkerSettings, trail: AccessTrail | None = None) -> Authorizer:
    """Who may call where operators, routers and workers call."""
    listener = ListenerKind.ADMIN if isinstance(settings, RouterSettings) else ListenerKind.WORKER
    return Authorizer(tls=bool(settings.tls_cert), trail=trail, listener=listener)
