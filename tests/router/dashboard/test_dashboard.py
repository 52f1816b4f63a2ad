"""A router serves its page beside /metrics and /health, and with TLS to operators alone."""

import asyncio
import http.client
import json

import pytest
from certificates import Certificates
from web_pages import get

PATHS = ["/", "/dashboard.css", "/dashboard.js", "/cluster", "/cluster/stream"]


async def test_the_page_is_where_monitoring_is(world):
    router = await world.router()
    for path, kind in [("/", "text/html"), ("/dashboard.css", "text/css"), ("/dashboard.js", "text/javascript")]:
        answer = await asyncio.to_thread(get, router.web_endpoint, path)
        assert (answer.status, answer.content_type) == (200, f"{kind}; charset=utf-8")
        assert "octavo" in answer.text or path.endswith("css")
    for path in ("/metrics", "/health"):
        assert (await asyncio.to_thread(get, router.web_endpoint, path)).status in (200, 503)


@pytest.mark.parametrize("path", PATHS)
async def test_it_is_for_reading(world, path):
    router = await world.router()
    assert (await asyncio.to_thread(get, router.web_endpoint, path, "POST")).status == 405


@pytest.mark.parametrize(("role", "status"), [("operator", 200), ("client", 403), ("worker", 403)])
async def test_with_tls_it_is_for_operators(world, tmp_path_factory, role, status):
    certificates = Certificates(tmp_path_factory.mktemp("tls"))
    router = await world.router(**certificates.settings("router"))
    context = certificates.files(role).client_context()
    for path in PATHS if status != 200 else PATHS[:-1]:  # a stream has no end
        assert (await world.http(router.web_endpoint, path, context=context))[0] == status, path


def status_of(endpoint, path, **headers):
    connection = http.client.HTTPConnection(endpoint, timeout=20)
    try:
        connection.putrequest("GET", path, skip_host=True)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read(300 if path.endswith("stream") else None)
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/cluster", "/cluster/stream"])
async def test_a_page_of_a_stranger_reads_nothing(world, path):
    router = await world.router()
    assert router.web_endpoint.startswith("127.0.0.1:")
    status, body = await asyncio.to_thread(status_of, router.web_endpoint, path, Host="evil.example.com")
    assert status == 421
    assert "by an address or as localhost" in json.loads(body)["error"]["message"]
    for foreign in ({"Origin": "http://evil.example.com"}, {"Sec_Fetch_Site": "cross-site"}):
        status, _ = await asyncio.to_thread(status_of, router.web_endpoint, path, Host="localhost:1", **foreign)
        assert status == 403
    status, _ = await asyncio.to_thread(status_of, router.web_endpoint, path, Host="localhost:1")
    assert status == 200
