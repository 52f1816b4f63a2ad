"""On loopback without TLS, only names that no stranger's page can have are answered."""

import asyncio
import http.client
import json

import pytest

from router.dashboard.local_names import is_local_name

LOCAL = ["127.0.0.1", "127.0.0.1:52051", "localhost:8080", "LOCALHOST", "[::1]:52051", "[::1]", "10.0.0.7:80"]
FOREIGN = [
    "example.com",
    "example.com:52051",
    "localhost.example.com",
    "",
    "127.0.0.1.example.com",
    "[::1].example.com",
    "::1",
]


@pytest.mark.parametrize("host", LOCAL)
def test_addresses_and_localhost_are_local(host):
    assert is_local_name(host)


@pytest.mark.parametrize("host", FOREIGN)
def test_other_names_are_not(host):
    assert not is_local_name(host)


def ask(endpoint, path, host):
    connection = http.client.HTTPConnection(endpoint, timeout=20)
    try:
        connection.putrequest("GET", path, skip_host=True)
        connection.putheader("Host", host)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read(200 if path.endswith("stream") else None)
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/cluster", "/cluster/stream"])
async def test_a_page_of_a_stranger_reads_nothing(world, path):
    router = await world.router()
    assert router.web_endpoint.startswith("127.0.0.1:")
    status, body = await asyncio.to_thread(ask, router.web_endpoint, path, "evil.example.com")
    assert status == 421
    assert "by an address or as localhost" in json.loads(body)["error"]["message"]
    status, _ = await asyncio.to_thread(ask, router.web_endpoint, path, "localhost:1")
    assert status == 200
