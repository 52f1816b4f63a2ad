"""Serves an ASGI application over HTTP/1.1, in the program's own event loop.

    server = HttpServer(app, "127.0.0.1:58051", "--http-listen")
    endpoint = await server.start()      # HOST:PORT, with the port that was chosen for port 0
    await server.stop(grace_s=2.0)

The server bounds what a client can cost it: connections, headers, the time in which a request arrives, and the time in
which nothing of an answer is read. The application bounds the bodies that it reads; what it has not read stays with the
client. An answer that a client reads slowly makes `send` wait, so the application must not gather what it has to send.
"""

import asyncio
import json
import logging
import secrets
import socket
import ssl
import time
from email.utils import formatdate
from functools import lru_cache
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from octavo.process import telemetry
from octavo.process.listen_address import ListenError, why_not_listening
from octavo.wire.endpoint import parse_listener

MAX_CONNECTIONS = 16_384
MAX_HEADER_BYTES = 32 * 1024
MAX_PIPELINED = 16  # requests that wait on a connection for the answer to one before them
HEADERS_S = 20.0  # how long the line and the headers of a request may take, and a first request after its connection
KEEP_ALIVE_S = 75  # longer than balancers keep idle connections, so that the server never ends one in use
UNREAD_S = 60.0  # how long a client may read nothing of an answer, once the buffers of both sides are full
PROBE_S, PROBE_INTERVAL_S, PROBES = 10, 5, 4  # TCP's own probes: a client whose machine has gone is noticed in 30 s
BACKLOG = 2048
CONNECTION = "connection"  # in a scope's state, for _guarded alone

_log = logging.getLogger(__name__)


class HttpServer:
    """Serves `app` on HOST:PORT, which came from the setting `flag`. With `tls`, over TLS alone.

    Each request is a task of the application, cancelled when its client leaves before the whole answer is sent.
    An exception of the application becomes a 500 with an id, under which the log has the stack. The scope's `state`
    has `peer_certificate`: what ssl says of the client's certificate, or None.
    """

    def __init__(
        self,
        app: Any,
        address: str,
        flag: str,
        tls: ssl.SSLContext | None = None,
        *,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._address = address
        self._flag = flag
        self._tls = tls
        self._max_connections = max_connections
        self._state = ServerState()
        self._config = Config(
            _guarded(app),
            http=HttpConnection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            reset_contextvars=True,  # a request knows nothing of the one before it on its connection
        )
        self._server: asyncio.Server | None = None

    @property
    def num_connections(self) -> int:
        return len(self._state.connections)

    async def start(self) -> str:
        """Listens. Returns HOST:PORT, with the port chosen for port 0. Raises ListenError."""
        endpoint = parse_listener(self._address)
        self._config.load()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._new_connection,
                endpoint.host.strip("[]"),
                endpoint.port,
                ssl=self._tls,
                backlog=BACKLOG,
                ssl_handshake_timeout=HEADERS_S if self._tls else None,
            )
        except OSError:
            raise ListenError(why_not_listening(self._address, self._flag)) from None
        port = self._server.sockets[0].getsockname()[1]
        return str(parse_listener(f"{endpoint.host}:{port}"))

    def refuse_connections(self) -> None:
        """Listens no more. Connections end when they have nothing to answer."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()

    async def stop(self, grace_s: float) -> None:
        """Listens no more, lets answers end for `grace_s`, and then ends every connection."""
        self.refuse_connections()
        if self._state.tasks and grace_s > 0:
            await asyncio.wait(set(self._state.tasks), timeout=grace_s)
        for connection in list(self._state.connections):
            connection.transport.abort()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)

    def _new_connection(self) -> "HttpConnection":
        connection = HttpConnection(self._config, self._state, {})
        connection.max_connections = self._max_connections
        return connection


class HttpConnection(HttpToolsProtocol):
    """One connection of a client, which is ended when the client costs more than it may."""

    max_connections = MAX_CONNECTIONS

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.answering: set[asyncio.Task[None]] = set()  # requests whose answer is not whole yet
        self._cycle_at_work: RequestResponseCycle | None = None
        self.lost = False  # whether the client has left
        self._bytes_without_body = 0  # of this request, since its beginning or the last bytes of its body
        self._in_request = False
        self._in_headers = False
        self._has_body = False  # whether what has just come has some of a body
        self._refused = False
        self._headers_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self.app_state = {"peer_certificate": transport.get_extra_info("peercert"), CONNECTION: self}
        set_probes(transport.get_extra_info("socket"))
        if len(self.connections) > self.max_connections:
            self._refuse(503, "too many connections: retry later, or call another router")
        else:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._headers_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        if self._cycle_at_work is not None:  # uvicorn tells the last one that has come
            self._cycle_at_work.disconnected = True
        self.lost = True
        for task in self.answering:
            task.cancel()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._cycle_at_work = cycle
        super()._start_asgi_task(cycle, app)

    # What a client sends

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._has_body = False
        super().data_received(data)
        if self._in_request and not self._has_body:  # the parser keeps a header, or a trailer after a body, to its end
            self._bytes_without_body += len(data)
            if self._bytes_without_body > MAX_HEADER_BYTES:
                self._refuse_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_request = self._in_headers = True
        self._bytes_without_body = 0
        if self._headers_timer is None:
            self._await_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # what comes after a body has no use
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
            self._refuse_headers()
        elif len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(429, f"{MAX_PIPELINED} requests wait on this connection already: read their answers first")
        elif not self._refused:
            self.server_state.default_headers = date_header(int(time.time()))
            super().on_headers_complete()
            if self.pipeline:
                self.flow.resume_reading()  # else nobody would see that the client leaves

    def on_body(self, body: bytes) -> None:
        self._has_body, self._bytes_without_body = True, 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_request = False
        if not self._refused:
            super().on_message_complete()

    def _await_headers(self) -> None:
        self._headers_timer = self.loop.call_later(HEADERS_S, self.transport.close)

    # What a client does not read

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
        super().resume_writing()

    # Refusals

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is no HTTP/1.1 request, or a broken one")

    def _refuse_headers(self) -> None:
        self._refuse(431, f"the line and the headers of a request may have {MAX_HEADER_BYTES} bytes; send fewer")

    def _refuse(self, status: int, message: str) -> None:
        """Answers without the application, and ends the connection; in the middle of an answer, it only ends it."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = error_body(message, "server_error" if status >= 500 else "invalid_request_error")
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


@lru_cache(maxsize=1)
def date_header(second: int) -> list[tuple[bytes, bytes]]:
    """The Date header of answers that are given in that second."""
    return [(b"date", formatdate(second, usegmt=True).encode())]


def set_probes(connected: socket.socket | None) -> None:
    """Has TCP probe the other side of a connection, and give it up when it does not answer."""
    if connected is None or connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_INTERVAL_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)


def error_body(message: str, kind: str, *, code: str | None = None) -> bytes:
    """An error as JSON, in the shape that OpenAI's clients read."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


def _guarded(app: Any) -> Any:
    """`app`, whose exceptions become a 500 that says nothing of them; the log has the stack under the same id."""

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        connection: HttpConnection = scope["state"].pop(CONNECTION)
        task, started = cast("asyncio.Task[None]", asyncio.current_task()), False

        async def noting_send(message: Any) -> None:
            nonlocal started
            started = True
            if not message.get("more_body") and message["type"] == "http.response.body":
                connection.answering.discard(task)
            await send(message)

        connection.answering.add(task)
        try:
            await app(scope, receive, noting_send)
        except asyncio.CancelledError:
            if not connection.lost:
                raise
        except Exception as error:
            error_id = secrets.token_hex(4)
            _log.error("internal error %s in %r\n%s", error_id, scope["path"], telemetry.stack_of(error))
            if started:
                raise  # the connection ends in the middle of the answer: the client sees that it is not whole
            body = error_body(f"internal error {error_id}; the server's log says more under this id", "server_error")
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 500, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        finally:
            connection.answering.discard(task)

    return guarded
