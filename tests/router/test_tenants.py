"""API keys: whose request is whose, over every call, and whose prefixes are whose."""

import asyncio

import grpc
import pytest
from web_pages import metrics

from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.client import AsyncClient, RetryPolicy
from octavo.net.security import api_keys
from octavo.net.security.api_keys import line_of, new_key, salt_of
from octavo.request.errors import InvalidArgument, NotFound, QuotaExceeded, Unauthenticated
from octavo.request.limits import TenantQuota
from octavo.v1 import admin_pb2, inference_pb2, types_pb2
from octavo.wire.statuses import error_from
from octavo.wire.tls import ClientCredentials

PROMPT = list(range(3, 100))
FEW = [3, 4, 5]
LONG = {"max_tokens": 4000, "temperature": 0.0}
SHORT = {"max_tokens": 5, "temperature": 0.0}


class Keys:
    """A file of keys, and the key of each tenant."""

    def __init__(self, file, *tenants):
        self.file = file
        self.of = {tenant: new_key() for tenant in tenants}
        self.write()

    def write(self):
        lines = [line_of(tenant, key) for tenant, key in self.of.items()]
        self.file.write_text("\n".join(["# keys", "", *lines]) + "\n")


@pytest.fixture
def keys(tmp_path, monkeypatch):
    monkeypatch.setattr(api_keys, "CHECK_S", 0.0)
    return Keys(tmp_path / "keys", "acme", "bolt")


@pytest.fixture
async def guarded(world, keys):
    runners = [WitnessRunner(step_s=0.002) for _ in range(2)]
    await world.start(runners, router={"api_keys": str(keys.file)}, warm_up_ms=0)
    return world


def client_of(world, key, router=0):
    policy = RetryPolicy(progress_timeout_s=0.0)  # what is refused is told at once
    made = AsyncClient(world.routers[router].endpoint, credentials=ClientCredentials(api_key=key), policy=policy)
    world.stack.push_async_callback(made.close)
    return made


async def test_no_method_of_inference_answers_without_a_key(guarded, keys):
    methods = inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods
    wrong, stub = new_key(), guarded.stub()
    headers = ["", wrong, f"Bearer {wrong}", "Bearer ", "Bearer", f"Basic {keys.of['acme']}", keys.of["acme"]]
    for method in methods:
        request = getattr(inference_pb2, method.input_type.name)()
        for header in headers:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                call = getattr(stub, method.name)(request, metadata=[("authorization", header)] if header else None)
                await (anext(aiter(call)) if method.server_streaming else call)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, (method.name, header)
            assert wrong not in (refused.value.details() or "")
    metadata = [("authorization", f"bearer  {keys.of['acme']}")]
    assert (await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)).models


async def test_a_request_of_another_tenant_is_not_found(guarded, keys):
    """As if it had never been: also by its resume token, and although both tenants may use one request id."""
    acme, bolt = (client_of(guarded, keys.of[tenant]) for tenant in ("acme", "bolt"))
    stream = acme.generate(PROMPT, request_id="one", **LONG)  # it runs until it is cancelled
    await anext(stream)
    entry = guarded.entry("one")
    assert entry.record.tenant == "acme"
    assert entry.record.salt == salt_of("acme") not in ("", "acme")
    for foreign in (bolt.get("one"), bolt.cancel("one"), anext(bolt.attach("one"))):
        with pytest.raises(NotFound, match="one") as refused:
            await foreign
        with pytest.raises(NotFound) as never_was:
            await bolt.get("never")
        assert refused.value.message.replace("one", "never") == never_was.value.message
    with pytest.raises(InvalidArgument, match="not one of ours"):
        await anext(bolt.attach(resume_token=stream.resume_token))
    assert not guarded.entry("one").record.cancel
    status = await acme.get("one")
    assert status.request_id == "one"
    again = await anext(acme.attach(resume_token=stream.resume_token))
    assert again.request_id == "one"
    own = await bolt.complete([5, 6, 7], max_tokens=3, temperature=0.0, request_id="one")
    assert len(own.outputs[0].token_ids) == 3
    await acme.cancel("one")
    await guarded.until(lambda: entry.record.cancel)


async def test_operators_name_the_tenant(guarded, keys):
    acme, index = client_of(guarded, keys.of["acme"]), guarded.routers[0].pool.kv_index
    for runner in guarded.runners:
        runner.step_s = 0.01
    going = asyncio.create_task(acme.complete(PROMPT, max_tokens=400, temperature=0.0, request_id="moves"))
    await guarded.until(lambda: any(len(e.journals[0]) > 20 for e in guarded.entries))
    await guarded.until(lambda: index.num_blocks["device"])
    admin = guarded.admin()
    [listed] = (await admin.ListSequences(admin_pb2.ListSequencesRequest())).sequences
    assert listed.tenant == "acme"
    with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
        await admin.Migrate(admin_pb2.MigrateRequest(request_id="moves"))
    await admin.Migrate(admin_pb2.MigrateRequest(request_id="moves", tenant="acme"))
    hypothetical = inference_pb2.GenerateRequest(token_ids=types_pb2.TokenIds(ids=PROMPT))
    for tenant, hits in (("acme", True), ("bolt", False)):
        request = admin_pb2.ExplainPlacementRequest(hypothetical=hypothetical, tenant=tenant)
        found = (await admin.ExplainPlacement(request)).candidates
        assert any(each.device_hit_tokens for each in found) == hits  # the router's KV index
    guarded.hurry()
    await going


async def test_a_prefix_is_for_a_tenant_that_has_a_key(guarded):
    for tenant, said in (("acmee", "did you mean acme"), ("", "say whose it is for")):
        request = admin_pb2.AddPrefixRequest(name="sea", text="x" * 100, tenant=tenant)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await guarded.admin().AddPrefix(request)
        error = error_from(refused.value)
        assert isinstance(error, InvalidArgument) and error.field == "tenant" and said in error.message


async def test_changed_keys_count_at_once(guarded, keys):
    old, key = keys.of.pop("acme"), new_key()
    keys.of["core"] = key
    with pytest.raises(Unauthenticated):
        await client_of(guarded, key).models()
    assert await client_of(guarded, old).models()
    keys.write()
    assert await client_of(guarded, key).models()
    with pytest.raises(Unauthenticated):
        await client_of(guarded, old).models()
    keys.file.write_text("this is no line of keys\n")
    assert await client_of(guarded, key).models()  # the last keys stay in force


async def test_a_key_that_expires_ends_no_stream(guarded, keys):
    """What runs goes on; what comes then is told that the key has expired."""
    acme = client_of(guarded, keys.of["acme"])
    stream = acme.generate(PROMPT, max_tokens=400, temperature=0.0, request_id="one")
    first = await anext(stream)
    keys.file.write_text(f"{line_of('acme', keys.of['acme'], 2.0)}\n")
    with pytest.raises(Unauthenticated, match="expired, at 1970-01-01T00:00:02Z"):
        await acme.models()
    assert len(first.token_ids) + sum([len(event.token_ids) async for event in stream]) == 400


async def with_quotas(world, file, quotas, **settings):
    """Starts two routers of one store; the keys of the tenants."""
    keys = {tenant: new_key() for tenant in quotas}
    file.write_text("".join(f"{line_of(t, keys[t], quota=quota)}\n" for t, quota in quotas.items()))
    await world.start([WitnessRunner(step_s=0.001)], 2, router={"api_keys": str(file), **settings}, warm_up_ms=0)
    return keys


async def test_any_router_refuses_a_stream_too_many(world, tmp_path):
    keys = await with_quotas(world, tmp_path / "keys", {"acme": TenantQuota(max_streams=1), "bolt": TenantQuota()})
    acme, elsewhere = (client_of(world, keys["acme"], router) for router in (0, 1))
    running = acme.generate(FEW, request_id="one", **LONG)
    await anext(running)
    for client in (acme, elsewhere):
        with pytest.raises(QuotaExceeded, match="1 requests under way") as refused:
            await client.complete(FEW, **SHORT)
        assert (refused.value.quota, refused.value.retry_after_ms) == ("streams", 1000)
    assert (await client_of(world, keys["bolt"], 1).complete(FEW, **SHORT)).outputs
    again = elsewhere.generate(FEW, request_id="one", **LONG)  # its own request is no further one
    await anext(again)
    await again.aclose()
    await acme.cancel("one")
    assert [event async for event in running][-1].finished
    assert (await elsewhere.complete(FEW, **SHORT)).outputs
    found = await metrics(world.routers[0].web_endpoint)
    assert found["octavo_tenant_refused_total{reason=QUOTA_EXCEEDED,tenant=acme}"] == 1
    assert found["octavo_tenant_requests_total{tenant=acme}"] == 1
    assert found["octavo_requests_refused_total{reason=QUOTA_EXCEEDED}"] == 1


async def test_used_up_minutes_are_refused_with_a_delay(world, tmp_path):
    """By the settings of the routers. What runs is not ended, and what it uses beyond is owed."""
    keys = await with_quotas(world, tmp_path / "keys", {"acme": TenantQuota()}, tenant_tokens_per_minute=200)
    client = client_of(world, keys["acme"])
    whole = await client.complete(FEW, max_tokens=300, temperature=0.0, request_id="large")
    assert len(whole.outputs[0].token_ids) == 300
    with pytest.raises(QuotaExceeded) as refused:
        await client_of(world, keys["acme"], 1).complete(FEW, **SHORT)
    assert refused.value.quota == "tokens_per_minute"
    assert 0 < refused.value.retry_after_ms <= 2 * 303 * 300
    endpoint, key = world.routers[0].http_endpoint, f"Bearer {keys['acme']}"
    asked = {"prompt": FEW, "max_tokens": 5}
    status, headers, body = await world.http(endpoint, "/v1/completions", asked, method="POST", authorization=key)
    assert (status, 0 < int(headers["retry-after"]) <= 2 * 91) == (429, True)
    assert "200 tokens per minute" in body["error"]["message"]
    assert (await client.get("large")).request_id == "large"  # what it has, it may read
