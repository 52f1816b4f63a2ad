"""A worker or a router that leaves on purpose: nothing is lost but a pause, and nobody counts a crash."""

import asyncio
import threading
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


def takes(entry):
    """On which grounds a sequence was taken."""
    return [line.detail.split()[1] for line in entry.record.timeline if line.what == "taken"]


def running_on(world, worker):
    entries = world.entries
    return [entry for entry in entries if entry.record.owner == worker.listener.incarnation]


async def is_serving(endpoint):
    async with open_channel(endpoint) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        return reply.status == SERVING


# Workers


async def test_leaving_workers_count_no_crash(world, oracle):
    """Of four that leave in a row, each has every sequence: four crashes would be one too many."""
    await world.start(step_s=0.01)
    params = replace(GREEDY, max_tokens=1000)  # more than they get to before the last worker, which is quick
    tasks = await world.streams(world.client(), 2, params)
    for number in range(4):
        old = world.workers[0]
        await world.until(lambda old=old: len(running_on(world, old)) == 2, 20.0)
        await world.worker(FakeRunner(step_s=0.01 if number < 3 else 0.0))
        await world.ready()
        world.workers.remove(old)
        await old.leave(asyncio.Event())  # what its process does on SIGTERM
        await old.stop()
    await oracle.check_completions(tasks, params)
    for entry in world.entries:
        assert entry.record.crashes == 0
        moves = [line for line in entry.record.timeline if line.what == "migrated"]
        assert takes(entry).count("queued") + len(moves) >= 5
        assert set(takes(entry)) <= {"queued", "refused"}  # by a worker that had just begun to leave


# By command


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


async def test_an_operator_drains_a_worker_and_undoes_it(world, oracle):
    await world.start(2, step_s=0.01)
    admin, worker = world.admin(), world.workers[0]
    params = replace(GREEDY, max_tokens=800)
    tasks = await world.streams(world.client(), 6, params)
    num_here = len(running_on(world, worker))
    request = admin_pb2.DrainWorkerRequest(worker_id=worker.listener.worker_id)
    *_, last = [each async for each in admin.DrainWorker(request)]
    world.hurry()  # none was to end before that
    assert last.num_migrated > 0 == last.num_left
    assert last.num_migrated + last.num_released == num_here
    await world.until(lambda: not running_on(world, worker))  # what it has refused may still have it as its owner
    assert not await is_serving(worker.listener.endpoint)
    *_, again = [each async for each in admin.DrainWorker(request)]  # nothing is left to do
    assert (again.num_left, again.num_released) == (0, 0)
    await oracle.check_completions(tasks, params)
    assert all(entry.record.crashes == 0 for entry in world.entries)
    listed = await admin.ListWorkers(admin_pb2.ListWorkersRequest())
    assert [each.reason for each in listed.workers] == ["draining", ""]
    request.undo = True
    assert [each async for each in admin.DrainWorker(request)]
    await world.ready()
    await world.kill(world.workers[1])
    assert oracle.returned(await world.client().complete([1, 2], GREEDY)) == oracle.outputs([1, 2], GREEDY)


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


# Routers


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


async def test_late_streams_end_with_a_resume_token(world, oracle):
    """Also a stream that has had no event yet."""
    gate = threading.Event()
    runner = FakeRunner(step_s=0.01)
    await world.worker(runner)
    router = await world.router(drain_ms=300, grace_ms=30_000)
    await world.router(grace_ms=30_000)
    await world.ready()
    stream = call_of(world, "begun", 400)
    first = await anext(stream)
    run = runner.run
    runner.run = lambda step: (gate.wait(2.0), run(step))[1]
    silent = call_of(world, "silent", 60)
    await world.until(lambda: len(world.entries) == 2)
    world.routers.remove(router)
    await router.leave(asyncio.Event())
    stopping = asyncio.create_task(router.stop())
    await asyncio.sleep(0)  # it has ended its streams
    gate.set()
    await stopping
    world.hurry()
    for call, request_id, num_tokens in ((stream, "begun", 400), (silent, "silent", 60)):
        events = [first] if request_id == "begun" else []
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for event in call:
                events.append(event)
        assert isinstance(statuses.error_from(raised.value), Draining)
        assert bool(events[-1].token_ids) == (request_id == "begun")
        attached = [event async for event in world.client(0).attach(resume_token=events[-1].resume_token)]
        [(expected, _, _)] = oracle.outputs(PROMPT, replace(GREEDY, max_tokens=num_tokens, ignore_eos=True))
        rest = tuple(token for event in attached for token in event.token_ids)
        assert expected[len(expected) - len(rest) :] == rest
        assert attached[-1].finished


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
