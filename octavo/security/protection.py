"""What the settings of a program say about TLS and API keys, as the objects that do it."""

import ssl

from octavo.security.api_keys import ApiKeys
from octavo.security.authorizer import Authorizer
from octavo.security.operator_gate import AsgiApp, OperatorGate
from octavo.security.tls import TlsFiles
from octavo.settings import RouterSettings, WorkerSettings


def tls_of(settings: RouterSettings | WorkerSettings) -> TlsFiles | None:
    """The files of TLS; None where the program does without. Raises TlsError."""
    if not settings.tls_cert:
        return None
    return TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_ca)


def operator_page_options(app: AsgiApp, tls: TlsFiles | None) -> tuple[AsgiApp, ssl.SSLContext | None]:
    """What a server of pages for operators is to serve, and the context of its connections."""
    return (app, None) if tls is None else (OperatorGate(app), tls.http_context())


def client_authorizer(settings: RouterSettings) -> Authorizer:
    """Who may call where clients call, over gRPC and over HTTP. Raises ApiKeyError."""
    keys = ApiKeys(settings.api_keys) if settings.api_keys else None
    return Authorizer(tls=bool(settings.tls_cert), ask_callers=settings.client_certificates, keys=keys)


def internal_authorizer(settings: RouterSettings | WorkerSettings) -> Authorizer:
    """Who may call where operators, routers and workers call."""
    return Authorizer(tls=bool(settings.tls_cert))
