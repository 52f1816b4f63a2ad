"""A whole service with TLS on every connection: who may call what, and files that are replaced while streams go on."""

import asyncio
from typing import Any

import grpc
import pytest
from certificates import Certificates
from effort import patience
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.client import AsyncClient
from octavo.internal.v1 import transfer_pb2, worker_pb2  # noqa: F401  their descriptors
from octavo.net.security.roles import ALLOWED, PeerRole, roles_allowed
from octavo.request.errors import Unreachable
from octavo.v1 import admin_pb2, admin_pb2_grpc
from octavo.wire import tls
from octavo.wire.channel import open_channel


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("tls") / "shared")


@pytest.fixture
async def secured(world, shared):
    """A router and two workers whose blocks can move. Every connection is TLS."""
    await start(world, shared)
    return world


async def start(world, certificates):
    runners = [WitnessRunner(step_s=0.005) for _ in range(2)]
    await world.start(runners, router=certificates.settings("router"), warm_up_ms=0, **certificates.settings("worker"))


def caller_of(world, credentials):
    made = AsyncClient(world.routers[0].endpoint, credentials=credentials)
    world.stack.push_async_callback(made.close)
    return made


async def methods_at(endpoint, credentials):
    """Every method of every service that a server says it has, and whether requests and replies are streams."""
    async with open_channel(endpoint, credentials=credentials) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        [reply] = [each async for each in stub.ServerReflectionInfo(iter([ask]))]
    pool, found = descriptor_pool.Default(), []
    for service in reply.list_services_response.service:
        for method in pool.FindServiceByName(service.name).methods:
            found.append((f"/{service.name}/{method.name}", method.client_streaming, method.server_streaming))
    return found


async def code_of(channel, method, client_streaming, server_streaming):
    """How a call with an empty request ends; None if it does not end, or has answered."""
    kind = f"{'stream' if client_streaming else 'unary'}_{'stream' if server_streaming else 'unary'}"
    call = getattr(channel, kind)(method)
    empty: Any = iter([b""]) if client_streaming else b""
    try:
        async with asyncio.timeout(patience(20)):
            if server_streaming:
                async for _ in call(
                    empty, timeout=patience(0.5)
                ):  # as long as a call takes that does not end by itself
                    return None
            else:
                await call(empty, timeout=patience(0.5))
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


async def test_every_method_lets_in_its_roles_alone(secured, shared):
    """Also those of health, reflection and channelz; and a method that is in no line lets nobody in."""
    worker = secured.workers[0].listener.endpoint
    servers = {
        secured.routers[0].endpoint: shared.caller("operator"),
        secured.admin_endpoint(): shared.caller("operator"),
        worker: shared.caller("operator", of_worker=True),
    }
    seen = set()
    for endpoint, asking in servers.items():
        methods = await methods_at(endpoint, asking)
        seen |= {method for method, _, _ in methods}
        for role in PeerRole:
            credentials = shared.caller(role, of_worker=endpoint == worker)
            async with open_channel(endpoint, credentials=credentials) as channel:
                for method, *streaming in methods:
                    code = await code_of(channel, method, *streaming)
                    denied = code is grpc.StatusCode.PERMISSION_DENIED
                    assert denied == (role not in roles_allowed(method)), f"{role} at {method}: {code}"
        async with open_channel(endpoint, credentials=shared.stranger()) as channel:
            for method, *streaming in methods:
                assert await code_of(channel, method, *streaming) is grpc.StatusCode.UNAVAILABLE  # no handshake
        async with open_channel(endpoint) as channel:
            assert await code_of(channel, *methods[0]) is grpc.StatusCode.UNAVAILABLE  # no TLS
    assert seen == set(ALLOWED)


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(tls, "CHECK_S", 0.0)


async def test_files_are_replaced_while_streams_go_on(world, tmp_path, hasty):
    """With another authority: whoever still has the old certificates cannot connect any more; nobody else notices."""
    certificates = Certificates(tmp_path / "tls")
    old = Certificates(tmp_path / "old")
    for each in certificates.folder.iterdir():
        (old.folder / each.name).write_bytes(each.read_bytes())
    await start(world, certificates)
    client = caller_of(world, certificates.caller("client"))
    going = asyncio.create_task(
        client.complete(list(range(3, 40)), max_tokens=900, temperature=0.0, request_id="going")
    )
    await world.until(lambda: any(len(e.journals[0]) > 10 for e in world.entries))
    new = Certificates(tmp_path / "new")
    for each in new.folder.iterdir():
        (certificates.folder / each.name).write_bytes(each.read_bytes())
    assert not going.done()
    late = caller_of(world, new.caller("client"))
    first = await late.complete(list(range(3, 40)), max_tokens=5, temperature=0.0)
    again = await client.complete(list(range(3, 40)), max_tokens=5, temperature=0.0)  # the client has new ones as well
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    with pytest.raises(Unreachable):
        await caller_of(world, old.caller("client")).connect(1.0)
    router = world.routers[0]
    for endpoint, path in ((router.http_endpoint, "/v1/models"), (router.web_endpoint, "/metrics")):
        context = new.files("operator").client_context()
        assert (await world.http(endpoint, path, context=context))[0] == 200
        context.load_cert_chain(*list(old.settings("operator").values())[:2])  # trusts the new authority all the same
        with pytest.raises(OSError, match=r"."):
            await world.http(endpoint, path, context=context)
    async with open_channel(world.admin_endpoint(), credentials=new.caller("operator")) as channel:
        moved = await admin_pb2_grpc.AdminStub(channel).Migrate(admin_pb2.MigrateRequest(request_id="going"))
    assert moved.num_sent_blocks > 0  # between workers, over a connection made now
    world.hurry()
    await world.worker(WitnessRunner(), warm_up_ms=0, **certificates.settings("worker"))
    await world.ready()  # the router meets a worker that has only the new ones
    answer = await going
    assert len(answer.outputs[0].token_ids) == 900
    assert answer.outputs[0].token_ids[:5] == first.outputs[0].token_ids
