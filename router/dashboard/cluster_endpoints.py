"""The state of the cluster over HTTP: one view, or a stream of views (server-sent events) for the page.

Both have what Admin.WatchCluster sends, as JSON. Nothing is gathered for a reader that is slow: `send` waits until the
reader has taken a view, and the next one is the newest.
"""

from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.net.http_server import error_body
from octavo.request.errors import TooManyStreams
from router.admin.cluster_watch import ClusterView, ClusterWatch
from router.dashboard.static_files import HEADERS

RETRY_MS = 1000  # after which a browser connects again
STREAM_HEADERS = {
    **HEADERS,
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # a proxy in between must pass each event on at once
}


class ClusterEndpoint:
    """Answers with one view."""

    def __init__(self, cluster: ClusterWatch) -> None:
        self._cluster = cluster

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._cluster.watch()) as views:
            try:
                view = await anext(views)
            except TooManyStreams as error:
                answer = busy(error)
            else:
                headers = {**HEADERS, "cache-control": "no-store", "content-type": "application/json"}
                answer = Response(view.json, headers=headers)
        await answer(scope, receive, send)


class ClusterStream:
    """Answers with views until the reader leaves."""

    def __init__(self, cluster: ClusterWatch) -> None:
        self._cluster = cluster

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._cluster.watch()) as views:
            try:
                view = await anext(views)
            except TooManyStreams as error:
                await busy(error)(scope, receive, send)
                return
            headers = [(name.encode(), value.encode()) for name, value in STREAM_HEADERS.items()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"retry: %d\n\n" % RETRY_MS, "more_body": True})
            await send({"type": "http.response.body", "body": event_of(view), "more_body": True})
            async for view in views:
                await send({"type": "http.response.body", "body": event_of(view), "more_body": True})


def event_of(view: ClusterView) -> bytes:
    return b"data: %s\n\n" % view.json


def busy(error: TooManyStreams) -> Response:
    headers = {**HEADERS, "content-type": "application/json", "retry-after": str(error.retry_after_ms // 1000)}
    return Response(error_body(error.message, "server_error", code=error.reason), 503, headers)
