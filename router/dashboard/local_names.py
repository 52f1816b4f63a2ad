"""Keeps web pages of strangers from reading a router that listens on loopback without TLS.

A page in the browser of whoever runs the router may have a name of its own that suddenly means 127.0.0.1. The browser
then takes the router for that page's own server. Its requests still carry the page's name as Host, and get nothing.
"""

import ipaddress

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.http_server import error_body
from router.dashboard.static_files import HEADERS

REFUSAL = "this router listens on loopback without TLS: call it by an address or as localhost, not by another name"


class LocalNameGuard:
    """An application around another one: requests by other names than addresses and localhost are refused."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) == 1 and is_local_name(hosts[0]):
            await self._app(scope, receive, send)
            return
        answer = Response(
            error_body(REFUSAL, "invalid_request_error"), 421, {**HEADERS, "content-type": "application/json"}
        )
        await answer(scope, receive, send)


def is_local_name(host: str) -> bool:
    """Whether a Host header has an address or localhost, with or without a port."""
    name, _, rest = host[1:].partition("]") if host.startswith("[") else host.partition(":")
    if host.startswith("[") and rest and not rest.startswith(":"):
        return False
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
