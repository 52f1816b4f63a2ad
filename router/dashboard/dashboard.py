"""The page of a router: its files, and the state of the cluster, as one view or as a stream of views for the page.

A view is what Admin.WatchCluster sends, as JSON. Nothing is gathered for a reader that is slow: `send` waits until the
reader has taken a view, and the next one is the newest. A browser may keep the files, and asks whether they changed.
"""

import hashlib
from collections.abc import Mapping
from contextlib import aclosing
from importlib.resources import files
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.net.http_server import error_body
from octavo.net.security.gates import WebGate
from octavo.net.security.trail import AccessTrail, ListenerKind
from octavo.request.errors import TooManyStreams
from router.admin.cluster_watch import ClusterView, ClusterWatch

FILES = {
    "/": ("dashboard.html", "text/html; charset=utf-8"),
    "/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
}
# Nothing from elsewhere, nothing inline, and no other page around this one.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }
)
JSON = {"content-type": "application/json"}
STREAM_HEADERS = [
    (name.encode(), value.encode())
    for name, value in {
        **HEADERS,
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-store",
        "x-accel-buffering": "no",  # a proxy in between must pass each event on at once
    }.items()
]
RETRY_MS = 1000  # after which a browser connects again


def dashboard_routes(cluster: ClusterWatch, *, local_names_only: bool, trail: AccessTrail | None = None) -> list[Route]:
    """The page, and what feeds it. `local_names_only`: for those alone who call by an address or as localhost."""

    def guarded(app: ASGIApp) -> ASGIApp:
        kind = ListenerKind.PAGES
        return WebGate(app, local_names_only=local_names_only, headers=HEADERS, trail=trail, listener=kind)

    return [
        *(Route(path, StaticFile(*described).answer) for path, described in FILES.items()),
        Route("/cluster", guarded(ClusterEndpoint(cluster)), methods=["GET"]),
        Route("/cluster/stream", guarded(ClusterEndpoint(cluster, is_stream=True)), methods=["GET"]),
    ]


class StaticFile:
    """One file, read once."""

    def __init__(self, name: str, content_type: str) -> None:
        self._body = (files("router.dashboard") / name).read_bytes()
        tag = f'"{hashlib.sha256(self._body).hexdigest()[:16]}"'
        self._headers = {**HEADERS, "content-type": content_type, "etag": tag}

    async def answer(self, request: Request) -> Response:
        """The file, or 304 where the browser has it."""
        if request.headers.get("if-none-match") == self._headers["etag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, headers=self._headers)


class ClusterEndpoint:
    """Answers with one view, or with views until the reader leaves."""

    def __init__(self, cluster: ClusterWatch, *, is_stream: bool = False) -> None:
        self._cluster = cluster
        self._is_stream = is_stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._cluster.watch()) as views:
            try:
                view = await anext(views)
            except TooManyStreams as error:
                headers = {**HEADERS, **JSON, "retry-after": str(error.retry_after_ms // 1000)}
                answer = Response(error_body(error.message, "server_error", code=error.reason), 503, headers)
            else:
                if self._is_stream:
                    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                    await _send_event(send, b"retry: %d\n\n" % RETRY_MS + event_of(view))
                    async for view in views:
                        await _send_event(send, event_of(view))
                    return
                answer = Response(view.json, headers={**HEADERS, **JSON, "cache-control": "no-store"})
        await answer(scope, receive, send)


async def _send_event(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def event_of(view: ClusterView) -> bytes:
    return b"data: %s\n\n" % view.json
