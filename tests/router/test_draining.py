"""A worker or a router that leaves on purpose: nothing is lost but a pause, and nobody counts a crash."""

import asyncio
import time
from dataclasses import replace

import grpc
import pytest
from effort import patience
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpu_worker.serving.leaving import releaser
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.client import AsyncClient
from octavo.request.errors import Draining, InvalidArgument, NotFound, StoreUnavailable
from octavo.request.sampling import SamplingParams
from octavo.store.memory import MemoryStore
from octavo.v1 import admin_pb2, inference_pb2
from octavo.wire import statuses
from octavo.wire.channel import open_channel

GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
PROMPT = list(range(3, 40))
SERVING = health_pb2.HealthCheckResponse.SERVING


async def is_serving(endpoint):
    async with open_channel(endpoint) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        return reply.status == SERVING


@pytest.mark.parametrize("undone", [False, True], ids=["draining", "undone"])
async def test_an_outage_only_delays_releases(world, oracle, monkeypatch, undone):
    """The worker lives on: no lease ends, and the sequence runs nowhere."""
    monkeypatch.setattr(releaser, "STORE_PATIENCE_S", 0.1)
    store, asked = MemoryStore(world.state), []
    await world.start(step_s=0.01, store=store)
    [worker] = world.workers
    params = replace(GREEDY, max_tokens=300)
    tasks = await world.streams(world.client(), 2, params)

    async def away(*_):
        asked.append(time.monotonic())
        raise StoreUnavailable("down")

    with monkeypatch.context() as outage:
        outage.setattr(store, "requeue", away)
        worker.drain.begin(0.0)
        await world.until(lambda: asked and time.monotonic() - asked[0] > 0.5)
        if undone:
            worker.drain.undo()
    await world.until(lambda: worker.drain.num_released == 2)
    await world.worker(FakeRunner(step_s=0.0))
    world.hurry()
    await oracle.check_completions(tasks, params)
    assert all(entry.record.crashes == 0 for entry in world.entries)


async def test_a_drain_with_wrong_arguments_is_refused(world):
    await world.start()
    for wrong, error in (
        ({"worker_id": "nobody"}, NotFound),
        ({}, InvalidArgument),
        ({"worker_id": "worker-0", "grace_ms": 2**32 - 1}, InvalidArgument),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in world.admin().DrainWorker(admin_pb2.DrainWorkerRequest(**wrong)):
                pass
        assert isinstance(statuses.error_from(raised.value), error), wrong
    assert not world.workers[0].drain.active


def call_of(world, request_id, max_tokens):
    """One Generate call of the first router."""
    request = inference_pb2.GenerateRequest(request_id=request_id)
    request.token_ids.ids.extend(PROMPT)
    request.sampling.max_tokens, request.sampling.temperature, request.sampling.ignore_eos = max_tokens, 0.0, True
    return aiter(world.stub().Generate(request))


async def test_a_draining_router_lets_its_streams_end(world, monkeypatch):
    monkeypatch.setattr("router.router.TELLING_S", patience(0.6))  # afterwards it takes no connection
    router = await world.start(step_s=0.01, router={"drain_ms": 20_000})
    stream = call_of(world, "going", 150)
    await anext(stream)
    complete = asyncio.create_task(AsyncClient([router.endpoint]).complete(PROMPT, replace(GREEDY, max_tokens=140)))
    await world.until(lambda: len(world.entries) == 2)
    leaving = asyncio.create_task(router.leave(asyncio.Event()))
    await asyncio.sleep(0)
    assert not await is_serving(router.endpoint)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await anext(call_of(world, "new", 5))
    assert isinstance(statuses.error_from(raised.value), Draining)
    events = [event async for event in stream]
    assert events[-1].HasField("finished")
    assert len((await complete).outputs[0].token_ids) == 140
    async with asyncio.timeout(patience(5)):
        await leaving
    assert {entry.record.request_id for entry in world.entries} >= {"going"}
    assert "new" not in {entry.record.request_id for entry in world.entries}


async def test_a_hanging_store_holds_no_router(world):
    store, urgent = MemoryStore(world.state), asyncio.Event()
    router = await world.router(store)
    world.routers.remove(router)

    async def hangs(*_):
        await asyncio.Event().wait()

    store.leave = store.heartbeat = store.sweep = store.members = hangs
    urgent.set()
    async with asyncio.timeout(20):
        await router.leave(urgent)
        await router.stop()
