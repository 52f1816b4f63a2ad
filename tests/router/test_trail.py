"""Who was refused, and what operators have asked: each call is counted, and a line says who made it."""

import logging

import grpc
import pytest
from certificates import Certificates
from web_pages import metrics

from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.client import AsyncClient
from octavo.net.security import trail
from octavo.net.security.api_keys import key_id, line_of, new_key
from octavo.process import telemetry
from octavo.request.errors import Unauthenticated
from octavo.v1 import admin_pb2, admin_pb2_grpc
from octavo.wire.channel import open_channel
from octavo.wire.tls import ClientCredentials


@pytest.fixture
def lines():
    """The lines of the trail, whole."""
    found: list[str] = []
    handler = logging.Handler()
    handler.setFormatter(telemetry.HumanFormatter("test"))
    handler.emit = lambda record: found.append(handler.format(record))  # type: ignore[method-assign]
    trail.log.addHandler(handler)
    trail.log.setLevel(logging.INFO)
    yield found
    trail.log.removeHandler(handler)
    trail.log.setLevel(logging.NOTSET)


def refusals(process):
    found = process.trail.values()
    return {v.labels: v.value for v in found if v.name == "octavo_calls_refused_total" and v.value}


async def test_refused_keys_are_counted_and_named(world, tmp_path, lines):
    """Each reason, over gRPC and HTTP. No line has a key, and the id of one of ours is the begin of its line."""
    own, old, foreign = new_key(), new_key(), new_key()
    file = tmp_path / "keys"
    file.write_text(f"{line_of('acme', own)}\n{line_of('acme', old, 2.0)}\n")
    router = await world.start([WitnessRunner()], router={"api_keys": str(file)}, warm_up_ms=0)
    wrong = {old: "expired, at 1970-01-01", foreign: "not valid", "": "no API key", "hunter2": "not valid"}
    for key, says in wrong.items():
        async with AsyncClient(router.endpoint, credentials=ClientCredentials(api_key=key)) as client:
            with pytest.raises(Unauthenticated, match=says):
                await client.models()
        header = {"authorization": f"Bearer {key}"} if key else {}
        assert (await world.http(router.http_endpoint, "/v1/models", **header))[0] == 401
    one_each = {"expired_key": 1, "unknown_key": 2, "no_key": 1}
    assert refusals(router) == {(at, why): count for at in ("grpc", "http") for why, count in one_each.items()}
    text = "\n".join(lines)
    assert len(lines) == 8
    assert not any(key in text for key in (own, old, foreign, "hunter2"))
    assert text.count(f"subject={key_id(old)}") == text.count(f"subject={key_id(foreign)}") == 2
    assert key_id(old).removeprefix("key:") in file.read_text()
    assert text.count("method=/octavo.v1.Inference/ListModels") == text.count("method=/v1/models") == 4
    assert all("peer=127.0.0.1:" in line or "peer=ipv4:127.0.0.1:" in line for line in lines)
    told = await metrics(router.web_endpoint)
    assert told["octavo_calls_refused_total{listener=grpc,reason=unknown_key}"] == 2
    assert told["octavo_calls_refused_total{listener=admin,reason=role}"] == 0
    assert told["octavo_api_keys{state=valid}"] == told["octavo_api_keys{state=expired}"] == 1


async def test_operators_are_named_and_others_refused(world, tmp_path, lines):
    """By roles, on routers, workers and pages."""
    certificates = Certificates(tmp_path / "tls")
    of_worker, runners = certificates.settings("worker"), [WitnessRunner(step_s=0.002) for _ in range(2)]
    router = await world.start(runners, router=certificates.settings("router"), warm_up_ms=0, **of_worker)
    worker, admin = world.workers[0].listener, world.admin_endpoint()
    for endpoint, role, method, options in (
        (router.endpoint, "worker", "/octavo.v1.Inference/ListModels", {}),
        (admin, "client", "/octavo.v1.Admin/ListWorkers", {}),
        (worker.endpoint, "client", "/octavo.internal.v1.Worker/Hello", {"of_worker": True}),
    ):
        async with open_channel(endpoint, credentials=certificates.caller(role, **options)) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="PERMISSION_DENIED"):
                await channel.unary_unary(method)(b"")
    context = certificates.files("client").client_context()
    assert (await world.http(router.web_endpoint, "/metrics", context=context))[0] == 403
    assert refusals(router) == {("grpc", "role"): 1, ("admin", "role"): 1, ("pages", "role"): 1}
    assert refusals(worker) == {("worker", "role"): 1}
    assert len(lines) == 4 and sum("subject=octavo:///role/client" in line for line in lines) == 3
    lines.clear()
    async with open_channel(admin, credentials=certificates.caller("operator")) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        await stub.ListWorkers(admin_pb2.ListWorkersRequest())
        async for _ in stub.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id=worker.worker_id, grace_ms=1000)):
            pass
    [listed, drained, by_router] = lines
    assert "method=octavo.v1.Admin/ListWorkers" in listed
    assert f"worker_id={worker.worker_id}" in drained
    assert all("subject=octavo:///role/operator" in line for line in (listed, drained))
    assert "method=octavo.internal.v1.Worker/Drain" in by_router
    assert "subject=octavo:///role/router" in by_router  # the router's own line says for whom
