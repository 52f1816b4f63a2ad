"""API keys over HTTP: nobody is served without one, and nobody sees the requests of others."""

import pytest

from octavo.net.security.api_keys import line_of, new_key
from octavo.request.record import SequenceState

BODY = {"prompt": [1, 2, 3], "temperature": 0, "max_tokens": 4}


@pytest.fixture
async def keys(world, tmp_path):
    """The headers of two tenants, which a router of the world knows."""
    made = {tenant: new_key() for tenant in ("acme", "bolt")}
    file = tmp_path / "keys"
    file.write_text("\n".join(line_of(tenant, key) for tenant, key in made.items()) + "\n")
    await world.worker()
    await world.router(api_keys=str(file))
    await world.ready()
    return {tenant: {"authorization": f"Bearer {key}"} for tenant, key in made.items()}


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer none"}, {"authorization": "Basic x"}])
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/requests/x")]
)
async def test_without_a_key_nobody_is_served(call, keys, headers, method, path):
    answer = await call(method, path, BODY if method == "POST" else None, **headers)
    assert (answer.status, answer.error["type"]) == (401, "authentication_error")
    assert (await call("GET", "/health")).status in (200, 503)


async def test_a_request_of_another_tenant_is_not_found(call, keys):
    made = (await call("POST", "/v1/completions", BODY, **keys["acme"])).object
    path = f"/v1/requests/{made['id']}"
    assert (await call("GET", path, **keys["acme"])).object["choices"] == made["choices"]
    for method, each in (
        ("GET", path),
        ("GET", f"{path}?wait=false"),
        ("GET", f"{path}?stream=true"),
        ("DELETE", path),
    ):
        answer = await call(method, each, **keys["bolt"])
        assert (answer.status, answer.error["code"]) == (404, "not_found")


async def test_a_client_with_a_key_that_leaves_ends_its_request(world, connect, keys):
    connection = await connect()
    connection.send("POST", "/v1/completions", {**BODY, "max_tokens": 5000, "ignore_eos": True}, **keys["acme"])
    await world.until(lambda: any(len(entry.journals[0]) > 3 for entry in world.state._entries.values()))
    await connection.close()
    (entry,) = world.state._entries.values()
    await world.until(lambda: entry.record.state is SequenceState.CANCELLED)
