"""Quotas of tenants over gRPC and HTTP: who is refused, with which delay, and that nothing that runs is ended."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from web_pages import metrics

from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.client import AsyncClient, RetryPolicy
from octavo.net.security.api_keys import line_of, new_key
from octavo.request.errors import QuotaExceeded
from octavo.request.limits import TenantQuota
from octavo.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from octavo.wire.channel import open_channel
from octavo.wire.statuses import error_from
from octavo.wire.tls import ClientCredentials

PROMPT = [3, 4, 5]
LONG = {"max_tokens": 4000, "temperature": 0.0}
SHORT = {"max_tokens": 5, "temperature": 0.0}
NO_RETRY = RetryPolicy(progress_timeout_s=0.0)


class Tenants:
    """Two routers of one store that read one file of keys, with a client of each tenant at each router."""

    def __init__(self, world: Any, keys: dict[str, str]) -> None:
        self.world = world
        self.keys = keys

    def client(self, tenant: str, router: int = 0) -> AsyncClient:
        credentials = ClientCredentials(api_key=self.keys[tenant])
        made = AsyncClient(self.world.routers[router].endpoint, credentials=credentials, policy=NO_RETRY)
        self.world.stack.push_async_callback(made.close)
        return made

    async def begin(self, tenant: str, request_id: str, router: int = 0) -> asyncio.Task[Any]:
        """A request whose first token has come."""
        stream = self.client(tenant, router).generate(PROMPT, request_id=request_id, **LONG)
        await anext(stream)

        async def rest() -> int:
            return sum([len(event.token_ids) async for event in stream])

        return asyncio.create_task(rest())


@pytest.fixture
async def make_tenants(world: Any, tmp_path: Path) -> Any:
    async def make(quotas: dict[str, TenantQuota], **settings: Any) -> Tenants:
        keys = {tenant: new_key() for tenant in quotas}
        file = tmp_path / "keys"
        file.write_text("".join(f"{line_of(t, keys[t], quota=quota)}\n" for t, quota in quotas.items()))
        await world.worker(WitnessRunner(step_s=0.001), warm_up_ms=0)
        for _ in range(2):
            await world.router(api_keys=str(file), **settings)
        await world.ready()
        return Tenants(world, keys)

    return make


async def test_any_router_refuses_a_stream_too_many(make_tenants: Any) -> None:
    tenants = await make_tenants({"acme": TenantQuota(max_streams=1), "bolt": TenantQuota()})
    running = await tenants.begin("acme", "one")
    for router in (0, 1):
        with pytest.raises(QuotaExceeded, match="1 requests under way") as refused:
            await tenants.client("acme", router).complete(PROMPT, **SHORT)
        assert refused.value.quota == "streams"
        assert refused.value.retry_after_ms == 1000
    assert (await tenants.client("bolt", 1).complete(PROMPT, **SHORT)).outputs
    again = tenants.client("acme", 1).generate(PROMPT, request_id="one", **LONG)  # its own request is no further one
    await anext(again)
    await again.aclose()
    await tenants.client("acme").cancel("one")
    await running
    assert (await tenants.client("acme", 1).complete(PROMPT, **SHORT)).outputs
    found = await metrics(tenants.world.routers[0].web_endpoint)
    assert found["octavo_tenant_refused_total{reason=QUOTA_EXCEEDED,tenant=acme}"] == 1
    assert found["octavo_tenant_requests_total{tenant=acme}"] == 1
    assert found["octavo_requests_refused_total{reason=QUOTA_EXCEEDED}"] == 1


async def test_used_up_minutes_are_refused_with_a_delay(make_tenants: Any) -> None:
    """By the settings of the routers. What runs is not ended, and what it uses beyond is owed."""
    tenants = await make_tenants({"acme": TenantQuota()}, tenant_tokens_per_minute=600)
    client = tenants.client("acme")
    whole = await client.complete(PROMPT, max_tokens=900, temperature=0.0, request_id="large")
    assert len(whole.outputs[0].token_ids) == 900
    async with open_channel(tenants.world.routers[1].endpoint) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(token_ids=types_pb2.TokenIds(ids=PROMPT))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Complete(request, metadata=[("authorization", f"Bearer {tenants.keys['acme']}")])
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = error_from(refused.value)
    assert isinstance(error, QuotaExceeded)
    assert error.quota == "tokens_per_minute"
    assert 0 < error.retry_after_ms <= 2 * 903 * 100
    status, headers, body = await post(tenants.world.routers[0].http_endpoint, tenants.keys["acme"])
    assert status == 429
    assert 0 < int(headers["retry-after"]) <= 2 * 91
    assert "600 tokens per minute" in body["error"]["message"]
    assert (await client.get("large")).request_id == "large"  # what it has, it may read


async def post(endpoint: str, key: str) -> tuple[int, dict[str, str], Any]:
    host, _, port = endpoint.rpartition(":")
    body = json.dumps({"prompt": PROMPT, "max_tokens": 5})
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
    writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
    answer = (await reader.read()).decode()
    writer.close()
    top, _, content = answer.partition("\r\n\r\n")
    first, *lines = top.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split()[1]), headers, json.loads(content)
