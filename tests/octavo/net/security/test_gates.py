"""Who gets through: by raw requests to a real server, as browsers write them, and with certificates of every role."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from certificates import Certificates

from octavo.net.http_server import HttpServer
from octavo.net.security.gates import OperatorGate, WebGate, is_local_name
from octavo.net.security.trail import AccessTrail, ListenerKind
from octavo.wire.tls import TlsFiles

LISTED = "https://chat.example.com"
FOREIGN = [
    "example.com",
    "example.com:52051",
    "localhost.example.com",
    "127.0.0.1.example.com",
    "[::1].example.com",
    "::1",
]
Ask = Callable[..., Awaitable[tuple[int, dict[str, str], bytes]]]


@pytest.mark.parametrize("host", ["", *FOREIGN])
def test_other_names_are_not(host: str) -> None:
    assert not is_local_name(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8080", "LOCALHOST", "[::1]:52051", "[::1]", "10.0.0.7:80"])
def test_addresses_and_localhost_are_local(host: str) -> None:
    assert is_local_name(host)


async def app(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"6"), (b"x-request-id", b"one")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"secret"})


@pytest.fixture(params=[True, False], ids=["loopback", "elsewhere"])
def local_names_only(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def trail() -> AccessTrail:
    return AccessTrail(ListenerKind.HTTP)


@pytest.fixture
async def ask(local_names_only: bool, trail: AccessTrail) -> AsyncIterator[Ask]:
    """Sends one request of these headers, and returns status, headers and body of the answer."""
    gate = WebGate(app, [LISTED], local_names_only=local_names_only, trail=trail)
    server = HttpServer(gate, "127.0.0.1:0", "--http-listen")
    host, _, port = (await server.start()).rpartition(":")

    async def one(method: str, *lines: str, body: str = "", name: str = "localhost") -> Any:
        reader, writer = await asyncio.open_connection(host, int(port))
        head = [f"{method} /v1/models HTTP/1.1", f"host: {name}", "connection: close", f"content-length: {len(body)}"]
        writer.write("\r\n".join([*head, *lines, "", body]).encode())
        async with asyncio.timeout(30):
            answer = await reader.read()
        writer.close()
        begin, _, content = answer.partition(b"\r\n\r\n")
        status, *fields = begin.decode().split("\r\n")
        pairs = (field.split(": ", 1) for field in fields)
        return int(status.split()[1]), {key.lower(): value for key, value in pairs}, content

    yield one
    await server.stop(0)


JSON = "content-type: application/json"


async def test_refused_pages_and_names_are_counted(ask: Ask, local_names_only: bool, trail: AccessTrail) -> None:
    await ask("GET", "origin: http://evil.example")
    await ask("GET", f"origin: {LISTED}")
    await ask("GET", name="evil.example")
    counts = {value.labels: value.value for value in trail.values() if value.value}
    assert counts == {("http", "origin"): 1} | ({("http", "host"): 1} if local_names_only else {})


async def test_a_page_under_another_name_reads_nothing(ask: Ask, local_names_only: bool) -> None:
    """DNS rebinding: for the browser the page's own server answers, so it sends no foreign origin."""
    for lines in [(), ("origin: http://evil.example",)]:
        status, _, body = await ask("GET", *lines, name="evil.example")
        assert (status == 421) == local_names_only
        assert (b"secret" in body) == (not local_names_only)
    assert (await ask("GET", "host: localhost"))[0] == (421 if local_names_only else 200)  # two of them


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://localhost:3000",
        "http://chat.example.com",
        "https://chat.example.com:8443",
        "https://chat.example.com.evil.example",
        "https://evil-chat.example.com",
        "HTTPS://chat.example.com",
        "https://chat.example.com, http://evil.example",
        "https://chat.example.com\r\norigin: http://evil.example",
        "://",
        "http://",
    ],
)
async def test_a_page_that_is_not_listed_is_refused(ask: Ask, origin: str) -> None:
    for method, lines in [
        ("GET", ()),
        ("POST", (JSON,)),
        ("POST", ("content-type: text/plain",)),
        ("DELETE", ()),
        ("OPTIONS", ("access-control-request-method: POST",)),
    ]:
        status, headers, body = await ask(method, f"origin: {origin}", *lines)
        assert status == 403
        assert not [name for name in headers if name.startswith("access-control")]
        assert b"secret" not in body
        assert json.loads(body)["error"]["param"] == "Origin"
        assert "--http-origins" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "lines",
    [
        (),
        ("content-type: text/plain",),
        ("content-type: application/x-www-form-urlencoded",),
        ("content-type: multipart/form-data; boundary=x",),
        ("content-type: text/plain; application/json",),
        ("content-type: application/jsonp",),
        (JSON, "content-type: text/plain"),
    ],
)
async def test_a_body_is_json_or_refused(ask: Ask, lines: tuple[str, ...]) -> None:
    """What a form can send, a browser sends without asking."""
    for origin in ((), (f"origin: {LISTED}",)):
        status, headers, body = await ask("POST", *lines, *origin, body="{}")
        assert status == 415
        assert "Content-Type: application/json" in json.loads(body)["error"]["message"]
        assert ("access-control-allow-origin" in headers) == bool(origin)


async def test_what_no_foreign_page_sends_is_served(ask: Ask) -> None:
    """Of programs, of a person at the address bar, and of the listener's own page, which needs no grant."""
    for lines in [(), ("sec-fetch-site: none",), ("sec-fetch-site: same-origin",), ("origin: http://LOCALHOST:7",)]:
        for method, more in (("GET", ()), ("POST", ("content-type: Application/vnd.octavo+JSON; charset=utf-8",))):
            body = "{}" if more else ""
            status, headers, found = await ask(method, *lines, *more, body=body, name="localhost:7")
            assert (status, found) == (200, b"secret")
            assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_page_that_does_not_say_its_origin_is_refused(ask: Ask, site: str) -> None:
    """As for a picture, a script or a link."""
    assert (await ask("GET", f"sec-fetch-site: {site}"))[0] == 403
    assert (await ask("GET", f"sec-fetch-site: {site}", f"origin: {LISTED}"))[0] == 200


async def test_a_listed_page_is_served(ask: Ask) -> None:
    status, headers, body = await ask(
        "OPTIONS",
        f"origin: {LISTED}",
        "access-control-request-method: POST",
        "access-control-request-headers: authorization,content-type,x-stainless-lang",
        "access-control-request-private-network: true",
    )
    assert (status, body) == (204, b"")
    assert headers["access-control-allow-origin"] == LISTED
    assert "POST" in headers["access-control-allow-methods"]
    assert headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-lang"
    assert headers["access-control-allow-private-network"] == "true"
    status, headers, body = await ask("POST", f"origin: {LISTED}", JSON, body="{}")
    assert (status, body) == (200, b"secret")
    assert headers["access-control-allow-origin"] == LISTED
    assert "x-request-id" in headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in headers


async def status_of(endpoint: str, path: str, files: TlsFiles) -> int:
    host, _, port = endpoint.rpartition(":")
    context = files.client_context()
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="localhost")
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    async with asyncio.timeout(20):
        line = await reader.readline()
    writer.close()
    return int(line.split()[1])


async def test_operators_see_pages_and_everybody_sees_the_health(certificates: Certificates) -> None:
    server = HttpServer(OperatorGate(app), "127.0.0.1:0", "--web-listen", certificates.files("router").http_context())
    endpoint = await server.start()
    files = {role: certificates.files(role) for role in ("client", "operator", "router", "worker")}
    files["nobody"] = TlsFiles(ca=certificates.settings("client")["tls_ca"])
    try:
        for role, own in files.items():
            found = [
                await status_of(endpoint, path, own) for path in ("/metrics", "/health", "/health/alive", "/healthy")
            ]
            assert found == ([200] * 4 if role == "operator" else [403, 200, 200, 403]), role
    finally:
        await server.stop(0)
