"""The pages of operators over TLS: who sees them, and with which certificates."""

import asyncio
from typing import Any

from certificates import Certificates

from octavo.net.http_server import HttpServer
from octavo.net.security.listener_tls import TlsFiles
from octavo.net.security.operator_gate import OperatorGate


async def page(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def status_of(endpoint: str, path: str, files: TlsFiles) -> int:
    """The status of a GET. Raises OSError where there is no connection."""
    host, _, port = endpoint.rpartition(":")
    reader, writer = await asyncio.open_connection(
        host, int(port), ssl=files.client_context(), server_hostname="localhost"
    )
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        async with asyncio.timeout(20):
            return int((await reader.readline()).split()[1])
    except IndexError:
        raise ConnectionResetError from None
    finally:
        writer.close()


async def test_operators_see_pages_and_everybody_sees_the_health(certificates: Certificates) -> None:
    server = HttpServer(OperatorGate(page), "127.0.0.1:0", "--web-listen", certificates.files("router").http_context())
    endpoint = await server.start()
    try:
        found = {}
        for role in ("client", "operator", "router", "worker"):
            found[role] = [
                await status_of(endpoint, path, certificates.files(role))
                for path in ("/metrics", "/health", "/health/alive", "/healthy")
            ]
        stranger = TlsFiles(ca=certificates.settings("client")["tls_ca"])
        found["nobody"] = [
            await status_of(endpoint, path, stranger) for path in ("/metrics", "/health", "/health/alive", "/healthy")
        ]
        assert found == {
            "client": [403, 200, 200, 403],
            "operator": [200, 200, 200, 200],
            "router": [403, 200, 200, 403],
            "worker": [403, 200, 200, 403],
            "nobody": [403, 200, 200, 403],
        }
    finally:
        await server.stop(0)
