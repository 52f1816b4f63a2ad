"""Who gets through: by raw requests to a real server, as browsers write them, and with certificates of every role."""

import asyncio
import json

import pytest

from octavo.net.http_server import HttpServer
from octavo.net.security.gates import OperatorGate, WebGate, is_local_name
from octavo.net.security.trail import AccessTrail, ListenerKind
from octavo.wire.tls import TlsFiles

LISTED = "https://chat.example.com"


LOCAL = ["127.0.0.1", "localhost:8080", "LOCALHOST", "[::1]:52051", "[::1]", "10.0.0.7:80"]
OTHERS = ["", "example.com", "example.com:52051", "localhost.example.com", "127.0.0.1.example.com", "::1"]


def test_addresses_and_localhost_are_local():
    assert [host for host in (*LOCAL, *OTHERS, "[::1].example.com") if is_local_name(host)] == LOCAL


async def app(scope, receive, send):
    headers = [(b"content-length", b"6"), (b"x-request-id", b"one")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"secret"})


@pytest.fixture(params=[True, False], ids=["loopback", "elsewhere"])
async def ask(request):
    """Sends one request of these headers, and returns status, headers and body of the answer."""
    trail = AccessTrail(ListenerKind.HTTP)
    gate = WebGate(app, [LISTED], local_names_only=request.param, forms=["/form"], trail=trail)
    server = HttpServer(gate, "127.0.0.1:0", "--http-listen")
    host, _, port = (await server.start()).rpartition(":")

    async def one(method, *lines, body="", name="localhost", path="/v1/models"):
        reader, writer = await asyncio.open_connection(host, int(port))
        head = [f"{method} {path} HTTP/1.1", f"host: {name}", "connection: close", f"content-length: {len(body)}"]
        writer.write("\r\n".join([*head, *lines, "", body]).encode())
        async with asyncio.timeout(30):
            answer = await reader.read()
        writer.close()
        begin, _, content = answer.partition(b"\r\n\r\n")
        status, *fields = begin.decode().split("\r\n")
        pairs = (field.split(": ", 1) for field in fields)
        return int(status.split()[1]), {key.lower(): value for key, value in pairs}, content

    one.local_names_only, one.trail = request.param, trail
    yield one
    await server.stop(0)


JSON = "content-type: application/json"


async def test_a_page_under_another_name_reads_nothing(ask):
    """DNS rebinding: for the browser the page's own server answers, so it sends no foreign origin."""
    for lines in [(), ("origin: http://evil.example",)]:
        status, _, body = await ask("GET", *lines, name="evil.example")
        assert (status == 421) == ask.local_names_only
        assert (b"secret" in body) == (not ask.local_names_only)
    assert (await ask("GET", "host: localhost"))[0] == (421 if ask.local_names_only else 200)  # two of them
    await ask("GET", "origin: http://evil.example")
    counts = {value.labels: value.value for value in ask.trail.values() if value.value}
    assert counts == {("http", "origin"): 1} | ({("http", "host"): 3} if ask.local_names_only else {})


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "http://localhost:3000",
        "http://chat.example.com",
        "https://chat.example.com:8443",
        "https://chat.example.com.evil.example",
        "HTTPS://chat.example.com",
        "https://chat.example.com, http://evil.example",
        "https://chat.example.com\r\norigin: http://evil.example",
        "://",
    ],
)
async def test_a_page_that_is_not_listed_is_refused(ask, origin):
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


@pytest.mark.parametrize("kinds", [[], ["text/plain"], ["text/plain; application/json"], ["application/jsonp"],
                                   ["application/json", "text/plain"]])  # fmt: skip
async def test_a_body_is_json_or_refused(ask, kinds):
    """What a form can send, a browser sends without asking."""
    for origin in ((), (f"origin: {LISTED}",)):
        status, headers, body = await ask("POST", *(f"content-type: {kind}" for kind in kinds), *origin, body="{}")
        assert status == 415
        assert "Content-Type: application/json" in json.loads(body)["error"]["message"]
        assert ("access-control-allow-origin" in headers) == bool(origin)


async def test_a_path_of_forms_takes_them_alone_and_none_of_a_foreign_page(ask):
    form = "content-type: multipart/form-data; boundary=x"
    for lines, expected in (
        ((form,), 200),
        ((form, f"origin: {LISTED}"), 200),
        ((JSON,), 415),
        ((form, form), 415),
        (("content-type: multipart/form-data",), 415),
        ((form, "origin: null"), 403),
        ((form, "origin: http://evil.example"), 403),
        ((form, "sec-fetch-site: cross-site"), 403),
    ):
        status, _, body = await ask("POST", *lines, body="--x--", path="/form")
        assert (status, body == b"secret") == (expected, expected == 200), lines
    assert (await ask("POST", form, body="--x--"))[0] == 415, "other paths take none"


async def test_what_no_foreign_page_sends_is_served(ask):
    """Of programs, of a person at the address bar, and of the listener's own page, which needs no grant."""
    for lines in [(), ("sec-fetch-site: none",), ("sec-fetch-site: same-origin",), ("origin: http://LOCALHOST:7",)]:
        for method, more in (("GET", ()), ("POST", ("content-type: Application/vnd.octavo+JSON; charset=utf-8",))):
            body = "{}" if more else ""
            status, headers, found = await ask(method, *lines, *more, body=body, name="localhost:7")
            assert (status, found) == (200, b"secret")
            assert "access-control-allow-origin" not in headers


async def test_a_page_that_does_not_say_its_origin_is_refused(ask):
    """As for a picture, a script or a link."""
    for site in ("cross-site", "same-site"):
        assert (await ask("GET", f"sec-fetch-site: {site}"))[0] == 403
        assert (await ask("GET", f"sec-fetch-site: {site}", f"origin: {LISTED}"))[0] == 200


async def test_a_listed_page_is_served(ask):
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


async def status_of(endpoint, path, files):
    host, _, port = endpoint.rpartition(":")
    context = files.client_context()
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="localhost")
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    async with asyncio.timeout(20):
        line = await reader.readline()
    writer.close()
    return int(line.split()[1])


async def test_operators_see_pages_and_everybody_sees_the_health(certificates):
    server = HttpServer(OperatorGate(app), "127.0.0.1:0", "--web-listen", certificates.files("router").http_context())
    endpoint = await server.start()
    files = {role: certificates.files(role) for role in ("client", "operator", "router", "worker")}
    files["nobody"] = TlsFiles(ca=certificates.settings("client")["tls_ca"])
    try:
        for role, own in files.items():
            paths = ("/metrics", "/health", "/health/alive", "/healthy")
            found = [await status_of(endpoint, path, own) for path in paths]
            assert found == ([200] * 4 if role == "operator" else [403, 200, 200, 403]), role
    finally:
        await server.stop(0)
