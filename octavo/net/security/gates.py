"""ASGI applications around others: what web pages of strangers, and callers who are no operators, do not get.

A browser sends what any page wants to any address, such as 127.0.0.1. It says so in `Origin` and `Sec-Fetch-Site`, and
asks first (a preflight) where a request has another content type than forms have. A page may also have a name of its
own that suddenly means 127.0.0.1 (DNS rebinding): for the browser its requests then stay with its own server, but they
carry the page's name as `Host`.
"""

import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from octavo.net.security.roles import PeerRole, roles_of_peer
from octavo.net.security.trail import AccessReason, AccessTrail, Caller, ListenerKind
from octavo.settings.router import ANY

AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]
PREFLIGHT_S = 600  # how long a browser need not ask again
# Headers of an answer that a page may read.
SHOWN = b"x-request-id, x-octavo-request-id, x-octavo-ignored-fields, retry-after, retry-after-ms"
WRONG_HOST = (
    "this listener is on loopback without TLS and keys: call it by an address or as localhost, not by another name; "
    "a proxy must set such a Host"
)
WRONG_FORM = "send a form, with the header `Content-Type: multipart/form-data` and its boundary (curl -F does)"
WRONG_TYPE = "send JSON, with the header `Content-Type: application/json` (curl: -H 'Content-Type: application/json')"
NO_OPERATOR = json.dumps({"error": "this page needs a certificate with the role operator"}).encode()
FOREIGN_SITES = frozenset({"cross-site", "same-site"})
JSON_TYPE = (b"content-type", b"application/json")
_JSON = re.compile(r"application/(?:[\w.+-]+\+)?json\s*(?:;.*)?", re.IGNORECASE)
_FORM = re.compile(r"multipart/form-data\s*;.*", re.IGNORECASE)
_HEADER_NAMES = re.compile(rb"[\w, -]{1,1000}", re.ASCII)

Headers = list[tuple[bytes, bytes]]


class WebGate:
    """An ASGI application around another one. Requests of web pages pass if their origin is listed, or is its own.

    `origins` are those that are listed, as browsers write them, or "*" for all. With `local_names_only`, requests by
    other names than addresses and localhost are refused. A body must be JSON, and on the paths in `forms` a form: pages
    are kept from those by what their browser says of them, and by nothing else. `headers` are those of refusals.
    """

    def __init__(
        self,
        app: AsgiApp,
        origins: Iterable[str] = (),
        *,
        local_names_only: bool,
        forms: Iterable[str] = (),
        headers: Mapping[str, str] | None = None,
        trail: AccessTrail | None = None,
        listener: ListenerKind = ListenerKind.HTTP,
    ) -> None:
        """The trail, if there is one, is told of names and pages that are refused."""
        self._app = app
        self._trail = trail
        self._listener = listener
        self._origins = frozenset(origins)
        self._forms = frozenset(forms)
        self._local_names_only = local_names_only
        self._headers = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        hosts = _values(scope, b"host")
        if self._local_names_only and not (len(hosts) < 2 and all(map(is_local_name, hosts))):  # a browser sends one
            self._note(AccessReason.HOST, scope, " ".join(hosts))
            await self._refuse(send, 421, "Host", WRONG_HOST)
            return
        found = _values(scope, b"origin")
        origin = found[0] if len(found) == 1 else ", ".join(found)
        if refusal := self._why_not(scope, origin, hosts):
            self._note(AccessReason.ORIGIN, scope, origin)
            await self._refuse(send, 403, "Origin", refusal)
            return
        granted = _granted(origin) if origin and not _is_own(origin, hosts) else []

        async def granting_send(message: Any) -> None:
            if granted and message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *granted]}
            await send(message)

        if scope["method"] == "OPTIONS" and granted and _values(scope, b"access-control-request-method"):
            await _answer(granting_send, 204, _preflight(scope))
        elif scope["method"] in ("POST", "PUT", "PATCH") and (wrong := self._wrong_type(scope)):
            await self._refuse(granting_send, 415, "Content-Type", wrong)
        else:
            await self._app(scope, receive, granting_send if granted else send)

    def _note(self, reason: AccessReason, scope: Any, detail: str) -> None:
        if self._trail is not None:
            self._trail.note_refusal(self._listener, reason, Caller.of_request(scope), scope["path"], detail)

    def _wrong_type(self, scope: Any) -> str:
        """What to send instead of a body of another type; empty for one of the right type."""
        if scope["path"] in self._forms:
            return "" if _is_of(_FORM, scope) else WRONG_FORM
        return "" if _is_of(_JSON, scope) else WRONG_TYPE

    def _why_not(self, scope: Any, origin: str, hosts: list[str]) -> str:
        """Why a request of a web page is refused. Empty if it is not, or if it is of no page."""
        if origin in self._origins or (origin and (ANY in self._origins or _is_own(origin, hosts))):
            return ""
        if origin:
            return f"web pages of {origin[:200]} may not call this router: --http-origins lists those that may"
        if FOREIGN_SITES.isdisjoint(_values(scope, b"sec-fetch-site")):
            return ""
        return "this request is of another site's page and does not say which: have it use fetch with the mode cors"

    async def _refuse(self, send: Any, status: int, param: str, message: str) -> None:
        kind = "permission_error" if status == 403 else "invalid_request_error"
        body = json.dumps({"error": {"message": message, "type": kind, "param": param, "code": None}}).encode()
        # What there is of a body is not read.
        await _answer(send, status, [*self._headers, JSON_TYPE, (b"connection", b"close")], body)


class OperatorGate:
    """An ASGI application around another one, of which only operators see more than /health and what is below it."""

    def __init__(self, app: AsgiApp, trail: AccessTrail | None = None) -> None:
        self._app = app
        self._trail = trail

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path, known = scope["path"], scope["state"]["peer_certificate"]
        if path == "/health" or path.startswith("/health/") or PeerRole.OPERATOR in roles_of_peer(known):
            await self._app(scope, receive, send)
            return
        if self._trail is not None:
            reason = AccessReason.ROLE if known else AccessReason.NO_CERTIFICATE
            self._trail.note_refusal(ListenerKind.PAGES, reason, Caller.of_request(scope), path)
        await _answer(send, 403, [JSON_TYPE], NO_OPERATOR)


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


def _is_own(origin: str, hosts: list[str]) -> bool:
    """Whether the page came from this very listener, or from a proxy before it that leaves Host as it is."""
    return len(hosts) == 1 and origin.partition("://")[2].lower() == hosts[0].lower() != ""


def _is_of(kind: re.Pattern[str], scope: Any) -> bool:
    types = _values(scope, b"content-type")
    return len(types) == 1 and bool(kind.fullmatch(types[0].strip()))


def _granted(origin: str) -> Headers:
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", SHOWN),
        (b"vary", b"origin"),
    ]


def _preflight(scope: Any) -> Headers:
    """What a page of a listed origin may send."""
    asked = ", ".join(_values(scope, b"access-control-request-headers")).encode("latin-1")
    headers = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-max-age", b"%d" % PREFLIGHT_S),
        (b"vary", b"access-control-request-headers"),
    ]
    if _HEADER_NAMES.fullmatch(asked):
        headers.append((b"access-control-allow-headers", asked))
    if _values(scope, b"access-control-request-private-network") == ["true"]:
        headers.append((b"access-control-allow-private-network", b"true"))
    return headers


def _values(scope: Any, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


async def _answer(send: Any, status: int, headers: Headers, body: bytes = b"") -> None:
    length = [] if status == 204 else [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *length]})
    await send({"type": "http.response.body", "body": body})
