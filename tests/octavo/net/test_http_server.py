"""The HTTP server that both programs start: errors, bounds, and how it ends."""

import asyncio
import inspect
import json
import logging
import re
from contextlib import suppress

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from waiting import until

from octavo.net import http_server
from octavo.net.http_server import HttpConnection, HttpServer

SECRET = "what neither a client nor the log may see"
GET = b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n"


class Application:
    """Answers with its path, unless that is one of those below. It counts what it could send."""

    def __init__(self):
        self.sent = self.waiting = 0

    async def __call__(self, scope, receive, send):
        path = scope["path"]
        if path == "/fail":
            raise RuntimeError(SECRET)
        if path == "/wait":
            self.waiting += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.waiting -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if path == "/halt":
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            raise RuntimeError(SECRET)
        while path == "/flood":
            await send({"type": "http.response.body", "body": b"." * 65536, "more_body": True})
            self.sent += 1
        await send({"type": "http.response.body", "body": path.encode()})


@pytest.fixture
async def app():
    return Application()


@pytest.fixture
async def server(app):
    server = HttpServer(app, "127.0.0.1:0", "--http-listen", max_connections=4)
    server.endpoint = await server.start()
    yield server
    await server.stop(0)


@pytest.fixture
async def connect():
    """Opens connections, and closes all of them in the end."""
    writers = []

    async def opened(server):
        host, port = server.endpoint.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)
        return reader, writer

    yield opened
    for writer in writers:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


async def answer_to(connect, server, request):
    """The status and the error of an answer that has a length."""
    reader, writer = await connect(server)
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert b"application/json" in head
    body = await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
    return int(head.split()[1]), json.loads(body)["error"]


async def test_exceptions_are_answered_with_a_logged_id(server, connect, caplog):
    """One that comes later breaks the answer off."""
    with caplog.at_level(logging.ERROR):
        status, error = await answer_to(connect, server, GET % b"fail")
        reader, writer = await connect(server)
        writer.write(GET % b"halt")
        answer = await reader.read()
    assert (status, error["type"]) == (500, "server_error")
    assert error["message"].split()[2].rstrip(";") in caplog.text
    assert SECRET not in error["message"] + caplog.text
    assert b"half" in answer and not answer.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
async def test_headers_are_bounded(server, connect, end):
    many = b"".join(b"x-%d: %s\r\n" % (i, b"y" * 1000) for i in range(40))
    status, error = await answer_to(connect, server, b"GET / HTTP/1.1\r\n" + many + end)
    assert status == 431
    assert str(http_server.MAX_HEADER_BYTES) in error["message"]


async def test_connections_are_bounded(server, connect):
    for _ in range(4):
        await connect(server)
    await until(lambda: server.num_connections == 4)
    status, error = await answer_to(connect, server, b"")
    assert status == 503
    assert "too many connections" in error["message"]


async def test_a_client_that_reads_nothing_is_left(server, connect, app, monkeypatch):
    monkeypatch.setattr(http_server, "UNREAD_S", 1.0)
    _, writer = await connect(server)
    writer.transport.pause_reading()
    writer.write(GET % b"flood")
    await until(lambda: app.sent)
    await until(lambda: not server.num_connections)
    assert app.sent < 200  # 13 MiB: what the kernel and the two buffers hold


async def test_headers_after_a_body_are_not_gathered(server, connect):
    _, writer = await connect(server)
    writer.write(b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n")
    with suppress(ConnectionError):
        for number in range(2000):
            writer.write(b"x-%d: %b\r\n" % (number, b"y" * 200))
            await asyncio.wait_for(writer.drain(), 20)
        pytest.fail("400 kB of trailers were taken")


async def test_a_connection_has_few_requests_that_wait(server, app, connect):
    """And one whose client leaves is cancelled."""
    reader, writer = await connect(server)
    writer.write(GET % b"wait" * 400)
    assert await asyncio.wait_for(reader.read(), 20) == b"", "the connection ends"
    await until(lambda: not app.waiting)
    _, writer = await connect(server)
    writer.write(GET % b"wait")
    await until(lambda: app.waiting)
    writer.close()
    await until(lambda: not app.waiting)


def test_uvicorn_has_what_is_overridden():
    """A method that a new version of uvicorn does not have would be overridden in vain."""
    own = "send_400_response", "_unset_keepalive_if_required"
    named = {*re.findall(r"super\(\)\.(\w+)", inspect.getsource(HttpConnection)), *own}
    assert {"data_received", "on_headers_complete", "_start_asgi_task"} <= named
    source = inspect.getsource(HttpToolsProtocol)
    assert not {name for name in named if f"def {name}(" not in source}
