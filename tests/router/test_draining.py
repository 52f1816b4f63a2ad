"""A worker or a router that leaves on purpose: nothing is lost but a pause, and nobody counts a crash."""

import asyncio
import json
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
from octavo.request.record import SequenceState
from octavo.request.sampling import SamplingParams
from octavo.store.memory import MemoryStore
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from octavo.wire import statuses
from octavo.wire.channel import open_channel
from router.fleet import worker_streams
from router.placing import assigner, dispatcher

GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
LONG = replace(GREEDY, max_tokens=2000)
PROMPT = list(range(3, 40))
SERVING = health_pb2.HealthCheckResponse.SERVING


def takes(entry) -> list[str]:
    """On which grounds a sequence was taken."""
    return [line.detail.split()[1] for line in entry.record.timeline if line.what == "taken"]


def running_on(world, worker) -> list:
    entries = world.state._entries.values()
    return [entry for entry in entries if entry.record.owner == worker.listener.incarnation]


async def is_serving(endpoint: str) -> bool:
    async with open_channel(endpoint) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        return reply.status == SERVING


def admin_of(world, router=0):
    channel = open_channel(json.loads(world.routers[router]._member.info)["admin_endpoint"])
    world.stack.push_async_callback(channel.close)
    return admin_pb2_grpc.AdminStub(channel)


async def leave(world, worker) -> None:
    """What a worker's process does on SIGTERM."""
    world.workers.remove(worker)
    await worker.leave(asyncio.Event())
    await worker.stop()


# Workers


async def test_workers_that_leave_one_after_the_other_count_no_crash(world, oracle):
    """Of five that leave in a row, each has every sequence: five crashes would be two too many."""
    await world.worker(FakeRunner(step_s=0.01))
    await world.router()
    await world.ready()
    params = replace(GREEDY, max_tokens=1500)  # more than they get to before the last worker, which is quick
    tasks = await world.streams(world.client(), 4, params)
    for number in range(5):
        old = world.workers[0]
        await world.until(lambda old=old: len(running_on(world, old)) == 4, 20.0)
        await world.worker(FakeRunner(step_s=0.01 if number < 4 else 0.0))
        await world.ready()
        await leave(world, old)
    await oracle.check_completions(tasks, params)
    for entry in world.state._entries.values():
        assert entry.record.crashes == 0
        moves = [line for line in entry.record.timeline if line.what == "migrated"]
        assert takes(entry).count("queued") + len(moves) >= 6
        assert set(takes(entry)) <= {"queued", "refused"}  # by a worker that had just begun to leave


async def test_a_worker_that_leaves_serves_no_more_at_once_and_refuses_what_is_new(world):
    await world.start(workers=2)
    worker = world.workers[0]
    tasks = await world.streams(world.client(), 4, LONG)
    worker.drain.begin(20.0)
    assert not await is_serving(worker.listener.endpoint)
    await world.until(lambda: not running_on(world, worker))
    await world.client().complete([1, 2, 3], GREEDY, request_id="new")
    assert world.entry("new").record.owner != worker.listener.incarnation
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_routers_are_told_of_a_drain_before_the_next_report_is_due(world, monkeypatch):
    monkeypatch.setattr(worker_streams, "WATCH_MS", 60_000)
    worker = await world.worker()
    router = await world.router()
    await world.ready()
    worker.drain.begin(20.0)
    link = router.pool.links[worker.listener.incarnation]
    await world.until(lambda: link.view().reason_unavailable == "draining")


async def test_the_only_worker_goes_on_until_the_end_and_leaves_the_rest_in_the_queue(world, oracle):
    await world.worker(FakeRunner(step_s=0.02), drain_ms=3000)
    await world.router()
    await world.ready()
    client = world.client()
    short = asyncio.create_task(client.complete([*PROMPT, 0], replace(GREEDY, max_tokens=10), request_id="short"))
    long = asyncio.create_task(client.complete([*PROMPT, 1], replace(GREEDY, max_tokens=300), request_id="long"))
    await world.until(lambda: world.workers[0].drain.num_left == 2)
    await leave(world, world.workers[0])
    assert world.entry("short").record.state is SequenceState.DONE  # what ends meanwhile ends here
    assert world.entry("long").record.state is SequenceState.QUEUED
    assert len(world.entry("long").journals[0]) > 20  # it went on until the time was nearly over
    await world.worker(FakeRunner(step_s=0.0))
    assert oracle.returned(await short) == oracle.outputs([*PROMPT, 0], replace(GREEDY, max_tokens=10))
    assert oracle.returned(await long) == oracle.outputs([*PROMPT, 1], replace(GREEDY, max_tokens=300))
    assert world.entry("long").record.crashes == 0


async def test_what_was_moved_out_on_request_holds_no_drain(world, oracle):
    """With nobody else to go to it comes back and ends here, long before the time is over."""
    await world.worker(FakeRunner(step_s=0.01), drain_ms=60_000)
    await world.router()
    await world.ready()
    worker, params = world.workers[0], replace(GREEDY, max_tokens=40)
    task = asyncio.create_task(world.client().complete(PROMPT, params, request_id="out"))
    await world.until(lambda: worker.drain.num_left == 1)
    await world.until(lambda: bool(world.entry("out").journals[0]))
    record = world.entry("out").record
    await asyncio.wrap_future(worker.engine.swap(record.seq_id, record.epoch, "out"))
    worker.drain.begin(60.0)
    await world.until(lambda: worker.drain.done, 20.0)
    assert world.entry("out").record.state is SequenceState.DONE
    assert worker.drain.num_released == 0
    assert oracle.returned(await task) == oracle.outputs(PROMPT, params)


async def test_a_second_signal_releases_everything_at_once(world):
    await world.worker(FakeRunner(step_s=0.02))
    await world.router()
    await world.ready()
    tasks = await world.streams(world.client(), 4, LONG)
    urgent, worker = asyncio.Event(), world.workers[0]
    leaving = asyncio.create_task(worker.leave(urgent))
    await asyncio.sleep(0.1)
    assert not leaving.done()  # the only worker: it goes on
    urgent.set()
    async with asyncio.timeout(patience(5)):
        await leaving
        await worker.stop()
    world.workers.remove(worker)
    assert {entry.record.state for entry in world.state._entries.values()} == {SequenceState.QUEUED}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_worker_that_has_no_time_to_leave_still_ends_its_step(world):
    worker = await world.worker(FakeRunner(step_s=0.2), drain_ms=0)
    await world.router()
    await world.ready()
    tasks = await world.streams(world.client(), 2, LONG)
    world.workers.remove(worker)
    await worker.leave(asyncio.Event())
    assert await worker.stop()
    assert {entry.record.state for entry in world.state._entries.values()} == {SequenceState.QUEUED}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_others_are_given_a_few_replays_at_a_time_and_the_cheapest_first(world, monkeypatch):
    """A replay that does not come to its first token keeps further ones away."""
    monkeypatch.setattr(releaser, "RELEASES_PER_WORKER", 2)
    monkeypatch.setattr(releaser, "REPLAY_PATIENCE_S", 100.0)
    await world.worker(FakeRunner(step_s=0.01), move_limit=0)
    await world.router()
    await world.ready()
    client = world.client()
    sizes = [400, 50, 300, 100, 200]
    streams = [client.generate(range(1, size), LONG, request_id=f"p{size}") for size in sizes]
    for stream in streams:
        await anext(stream)
    slow = FakeRunner(step_s=0.01)
    run, held = slow.run, asyncio.Event()
    slow.run = lambda step: (time.sleep(0.0 if held.is_set() else 0.4), run(step))[1]
    other = await world.worker(slow)
    await world.ready()
    order, requeue = [], world.workers[0].drain.releaser._store.requeue

    async def noted(seq_id, epoch):
        order.append(world.state._entries[seq_id].record.prompt_len + 1)
        return await requeue(seq_id, epoch)

    world.workers[0].drain.releaser._store.requeue = noted
    world.workers[0].drain.begin(20.0)
    most = 0
    async with asyncio.timeout(30):
        while not world.workers[0].drain.done:
            moved = running_on(world, other)
            most = max(most, len(world.workers[0].drain.releaser._under_way))
            if len(moved) >= 3:
                held.set()
            await asyncio.sleep(0.005)
    assert order == sorted(sizes)
    assert 1 <= most <= 2
    for stream in streams:
        await stream.aclose()


async def test_an_outage_of_the_store_does_not_keep_a_worker_from_its_end(world, monkeypatch):
    monkeypatch.setattr(releaser, "STORE_PATIENCE_S", 0.2)
    store = MemoryStore(world.state)
    worker = await world.worker(FakeRunner(step_s=0.01), store, drain_ms=600)
    await world.router()
    await world.ready()
    tasks = await world.streams(world.client(), 2, LONG)

    async def away(*_) -> None:
        raise StoreUnavailable("down")

    store.requeue = store.append_batch = store.heartbeat = store.leave = store.members = away
    async with asyncio.timeout(10):
        await leave(world, worker)
    assert {entry.record.state for entry in world.state._entries.values()} == {SequenceState.RUNNING}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_cancellation_that_is_lost_keeps_no_worker_from_its_end(world):
    """The store's client may answer one by an error, while it connects."""
    store, asked = MemoryStore(world.state), asyncio.Event()
    worker = await world.worker(FakeRunner(step_s=0.01), store)
    await world.router(MemoryStore(world.state))
    await world.ready()
    tasks = await world.streams(world.client(), 1, LONG)

    async def loses(_) -> None:
        asked.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise StoreUnavailable("the connection was cut") from None

    async def loses_requeue(seq_id, epoch) -> None:
        await loses(seq_id)

    store.members, store.requeue = loses, loses_requeue
    worker.drain.begin(20.0)
    await asked.wait()
    async with asyncio.timeout(20):
        await worker.drain.stop()
        await worker.drain.releaser.release_rest(urgent=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# By command


async def test_tokens_that_no_journal_takes_keep_no_drain_from_its_end(world, oracle, monkeypatch):
    """Another worker computes them again."""
    monkeypatch.setattr(releaser, "STORE_PATIENCE_S", 0.2)
    store = MemoryStore(world.state)
    worker = await world.worker(FakeRunner(step_s=0.01), store)
    await world.router(MemoryStore(world.state))
    await world.ready()
    params = replace(GREEDY, max_tokens=300)
    tasks = await world.streams(world.client(), 2, params)

    async def away(*_) -> None:
        raise StoreUnavailable("down")

    store.append_batch = away
    worker.drain.begin(0.1)
    async with asyncio.timeout(20):
        await worker.drain.wait_until_done()
    await world.worker(FakeRunner(step_s=0.0))
    await oracle.check_completions(tasks, params)
    assert all(entry.record.crashes == 0 for entry in world.state._entries.values())


@pytest.mark.parametrize("undone", [False, True], ids=["draining", "undone"])
async def test_what_was_stopped_during_an_outage_is_released_after_it(world, oracle, monkeypatch, undone):
    """The worker lives on: no lease ends, and the sequence runs nowhere."""
    monkeypatch.setattr(releaser, "STORE_PATIENCE_S", 0.1)
    store, asked = MemoryStore(world.state), []
    worker = await world.worker(FakeRunner(step_s=0.01), store)
    await world.router(MemoryStore(world.state))
    await world.ready()
    params = replace(GREEDY, max_tokens=300)
    tasks = await world.streams(world.client(), 2, params)
    requeue = store.requeue

    async def away(*_) -> None:
        asked.append(time.monotonic())
        raise StoreUnavailable("down")

    store.requeue = away
    worker.drain.begin(0.0)
    await world.until(lambda: asked and time.monotonic() - asked[0] > 0.5)
    if undone:
        worker.drain.undo()
    store.requeue = requeue
    await world.until(lambda: worker.drain.num_released == 2)
    await world.worker(FakeRunner(step_s=0.0))
    await oracle.check_completions(tasks, params)
    assert all(entry.record.crashes == 0 for entry in world.state._entries.values())


async def test_an_operator_drains_a_worker_and_gives_it_work_again(world, oracle):
    await world.worker(FakeRunner(step_s=0.01))
    await world.worker(FakeRunner(step_s=0.01))
    await world.router()
    await world.ready()
    admin, worker = admin_of(world), world.workers[0]
    params = replace(GREEDY, max_tokens=400)
    tasks = await world.streams(world.client(), 6, params)
    num_here = len(running_on(world, worker))
    assert num_here > 0
    request = admin_pb2.DrainWorkerRequest(worker_id=worker.listener.worker_id)
    progress = [each async for each in admin.DrainWorker(request)]
    assert progress[-1].num_left == 0
    assert progress[-1].num_migrated + progress[-1].num_released == num_here
    assert progress[-1].num_migrated > 0
    assert not running_on(world, worker)
    assert not await is_serving(worker.listener.endpoint)
    again = [each async for each in admin.DrainWorker(request)]  # nothing is left to do
    assert (again[-1].num_left, again[-1].num_released) == (0, 0)
    await oracle.check_completions(tasks, params)
    assert all(entry.record.crashes == 0 for entry in world.state._entries.values())
    listed = await admin.ListWorkers(admin_pb2.ListWorkersRequest())
    assert [each.reason for each in listed.workers] == ["draining", ""]
    request.undo = True
    assert [each async for each in admin.DrainWorker(request)]
    await world.ready()
    await world.kill(world.workers[1])
    assert oracle.returned(await world.client().complete([1, 2], GREEDY)) == oracle.outputs([1, 2], GREEDY)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (admin_pb2.DrainWorkerRequest(worker_id="nobody"), NotFound),
        (admin_pb2.DrainWorkerRequest(), InvalidArgument),
        (admin_pb2.DrainWorkerRequest(worker_id="worker-0", grace_ms=2**32 - 1), InvalidArgument),
    ],
)
async def test_a_drain_that_names_no_worker_or_too_much_time_is_refused(world, request_, error):
    await world.start()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in admin_of(world).DrainWorker(request_):
            pass
    assert isinstance(statuses.error_from(raised.value), error)
    assert not world.workers[0].drain.active


# Routers


async def call_of(world, router: int, request_id: str, max_tokens: int):
    """One Generate call, without an SDK that goes on elsewhere."""
    channel = open_channel(world.routers[router].endpoint)
    world.stack.push_async_callback(channel.close)
    request = inference_pb2.GenerateRequest(request_id=request_id)
    request.token_ids.ids.extend(PROMPT)
    request.sampling.max_tokens, request.sampling.temperature, request.sampling.ignore_eos = max_tokens, 0.0, True
    return aiter(inference_pb2_grpc.InferenceStub(channel).Generate(request))


async def test_a_router_that_drains_takes_no_calls_and_lets_its_streams_end(world):
    await world.worker(FakeRunner(step_s=0.01))
    router = await world.router(drain_ms=20_000)
    await world.ready()
    stream = await call_of(world, 0, "going", 60)
    await anext(stream)
    complete = asyncio.create_task(AsyncClient([router.endpoint]).complete(PROMPT, replace(GREEDY, max_tokens=50)))
    await world.until(lambda: len(world.state._entries) == 2)
    leaving = asyncio.create_task(router.leave(asyncio.Event()))
    await asyncio.sleep(0)
    assert not await is_serving(router.endpoint)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await anext(await call_of(world, 0, "new", 5))
    assert isinstance(statuses.error_from(raised.value), Draining)
    events = [event async for event in stream]
    assert events[-1].HasField("finished")
    assert len((await complete).outputs[0].token_ids) == 50
    async with asyncio.timeout(patience(5)):
        await leaving
    assert {entry.record.request_id for entry in world.state._entries.values()} >= {"going"}
    assert "new" not in {entry.record.request_id for entry in world.state._entries.values()}


async def test_what_is_left_when_the_time_is_over_ends_with_draining_and_a_resume_token(world, oracle):
    """Also a stream that has had no event yet."""
    gate = asyncio.Event()
    runner = FakeRunner(step_s=0.01)
    await world.worker(runner)
    router = await world.router(drain_ms=300, grace_ms=30_000)
    await world.router(grace_ms=30_000)
    await world.ready()
    stream = await call_of(world, 0, "begun", 400)
    await anext(stream)
    run = runner.run
    runner.run = lambda step: (None if gate.is_set() else time.sleep(1.0), run(step))[1]
    silent = await call_of(world, 0, "silent", 60)
    await world.until(lambda: len(world.state._entries) == 2)
    world.routers.remove(router)
    await router.leave(asyncio.Event())
    await router.stop()
    gate.set()
    for call, request_id, num_tokens in ((stream, "begun", 400), (silent, "silent", 60)):
        events = []
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


async def test_a_router_that_leaves_ends_what_it_has_begun_to_assign(world):
    """A take without its Schedule would leave a sequence that nobody runs."""
    await world.worker()
    router = await world.router()
    await world.ready()
    link = next(iter(router.pool.links.values()))
    schedule, asked, go = link.schedule, asyncio.Event(), asyncio.Event()

    async def slow(admission, follow):
        asked.set()
        await go.wait()
        return await schedule(admission, follow)

    link.schedule = slow
    call = await call_of(world, 0, "taken", 5)

    async def read() -> None:
        await anext(call)

    reading = asyncio.create_task(read())
    await asked.wait()
    world.routers.remove(router)
    stopping = asyncio.create_task(router.stop())
    await asyncio.sleep(0.05)
    go.set()
    await stopping
    await asyncio.gather(reading, return_exceptions=True)
    await world.until(lambda: world.entry("taken").record.state is SequenceState.DONE)


async def test_a_router_that_leaves_keeps_no_sequence_claimed(world, monkeypatch):
    """Neither one that it is popping, nor one for which it has found no room."""
    monkeypatch.setattr(dispatcher, "CLAIM_MS", 60_000)
    monkeypatch.setattr(assigner, "REQUEUE_DELAY_S", 60.0)
    await world.worker()
    store = MemoryStore(world.state)
    router = await world.router(store)
    await world.ready()
    router.assigner._choose_link = lambda attempt: None  # as where other assignments have taken the room
    pop, asked, go = store.pop, asyncio.Event(), asyncio.Event()

    async def slow(*arguments):
        popped = await pop(*arguments)
        if popped and world.state._entries[popped[0].record.seq_id].record.request_id == "popped":
            asked.set()
            await go.wait()
        return popped

    store.pop = slow
    calls = [await call_of(world, 0, request_id, 5) for request_id in ("no-room", "popped")]

    async def read(call) -> None:
        await anext(call)

    reading = [asyncio.create_task(read(call)) for call in calls]
    await asked.wait()
    world.routers.remove(router)
    stopping = asyncio.create_task(router.stop())
    await asyncio.sleep(0.05)
    go.set()
    await stopping
    await asyncio.gather(*reading, return_exceptions=True)
    assert not world.state.claims
    assert {entry.record.state for entry in world.state._entries.values()} == {SequenceState.QUEUED}


async def test_a_store_that_hangs_keeps_no_router_from_its_end(world):
    store = MemoryStore(world.state)
    router = await world.router(store)
    world.routers.remove(router)

    async def hangs(*_) -> None:
        await asyncio.Event().wait()

    store.leave = store.heartbeat = store.sweep = store.members = hangs
    urgent = asyncio.Event()
    urgent.set()
    async with asyncio.timeout(20):
        await router.leave(urgent)
        await router.stop()


async def test_a_worker_that_drains_gives_its_prefixes_to_the_others(world):
    """It gets no new sequences, and its blocks are the ones that will be gone."""
    sizes = {"block_size": 4, "num_blocks": 512, "context_tokens": 1024}
    for _ in range(2):
        await world.worker(FakeRunner(step_s=0.005, **sizes))
    router = await world.router()
    await world.ready()
    client, prompt = world.client(), list(range(3, 200))
    first = await client.complete(prompt, GREEDY, request_id="first")
    owner = world.entry("first").record.owner
    leaving, staying = sorted(world.workers, key=lambda worker: worker.listener.incarnation != owner)
    leaving.drain.begin(60.0)
    link = router.pool.links[owner]
    await world.until(lambda: link.view().draining)
    assert not link.view().available
    again = await client.complete(prompt, GREEDY, request_id="again")
    assert world.entry("again").record.owner == staying.listener.incarnation
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert staying.fetcher.num_fetched == len(prompt) // 4
    link.load_at -= 60
    assert not link.view().draining, "it does not answer any more"
