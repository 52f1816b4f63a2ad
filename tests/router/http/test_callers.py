"""Who may send HTTP requests, and whose requests they find: the same as over gRPC."""

from certificates import Certificates

from octavo.client import AsyncClient
from octavo.net.security.api_keys import line_of, new_key
from octavo.wire.tls import ClientCredentials, TlsFiles

PATHS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/x"),
    ("GET", "/v1/requests/one"),
    ("DELETE", "/v1/requests/one"),
    ("POST", "/v1/embeddings"),
    ("POST", "/rerank"),
    ("POST", "/v1/score"),
    ("GET", "/anything"),
]


async def ask(world, path, method="GET", key="", context=None):
    """The status and the body of one request."""
    header = {"authorization": f"Bearer {key}"} if key else {}
    body = {} if method == "POST" else None
    endpoint = world.routers[0].http_endpoint
    status, _, found = await world.http(endpoint, path, body, method=method, context=context, **header)
    return status, found


async def test_only_the_health_answers_without_a_key(world, tmp_path):
    key, file = new_key(), tmp_path / "keys"
    file.write_text(line_of("acme", key))
    await world.start(router={"api_keys": str(file)})
    for method, path in PATHS:
        for wrong in ("", new_key(), "none"):
            status, found = await ask(world, path, method, wrong)
            assert status == 401, (method, path)
            assert "Authorization: Bearer KEY" in found["error"]["message"]
    assert (await ask(world, "/health"))[0] in (200, 503)  # 503: it does not serve yet
    assert (await ask(world, "/v1/models", key=key))[0] == 200


async def test_clients_without_certificates_come_in_by_their_keys(world, tmp_path):
    certificates, key = Certificates(tmp_path / "tls"), new_key()
    (tmp_path / "keys").write_text(line_of("acme", key))
    by_key = {"client_certificates": False, "api_keys": str(tmp_path / "keys"), **certificates.settings("router")}
    await world.start(router=by_key, **certificates.settings("worker"))
    router, files = world.routers[0], TlsFiles(ca=certificates.settings("client")["tls_ca"])
    context = files.client_context()
    assert (await ask(world, "/v1/models", key=key, context=context))[0] == 200
    assert (await ask(world, "/v1/models", context=context))[0] == 401
    async with AsyncClient(router.endpoint, credentials=ClientCredentials(files, "", key)) as client:
        assert len((await client.complete([4, 5, 6], max_tokens=5)).outputs[0].token_ids) == 5
