"""Whoever watches the cluster sees what the other calls of Admin tell, and costs nothing while nobody does."""

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace

import grpc
import pytest

from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.errors import StoreUnavailable, TooManyStreams
from octavo.request.sampling import SamplingParams
from octavo.store.memory import MemoryStore
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from octavo.wire import statuses
from octavo.wire.channel import open_channel
from router.admin import cluster_watch
from router.admin.messages import sequence_to_wire

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
LONG = replace(GREEDY, max_tokens=2000)
PROMPT = list(range(3, 40))


async def view_of(router):
    async with aclosing(router.cluster.watch()) as views:
        return (await anext(views)).message


async def test_a_view_has_workers_sequences_and_traffic(world):
    await world.start(workers=2)
    [router] = world.routers
    client = world.client()
    tasks = await world.streams(client, 3, LONG)
    await client.complete(PROMPT, GREEDY)
    await client.complete(PROMPT, GREEDY)
    view = await view_of(router)
    assert [worker.worker_id for worker in view.workers] == ["worker-0", "worker-1"]
    assert sorted(s.request_id for s in view.sequences) == ["s0", "s1", "s2"]
    for sequence in view.sequences:
        record = world.entry(sequence.request_id).record
        assert (sequence.owner, sequence.epoch) == (record.owner, record.epoch)
        assert sequence.state == inference_pb2.REQUEST_STATE_RUNNING
        assert not sequence.moving_to
    assert not view.has_more_sequences
    assert not view.HasField("failure")
    assert (view.queue.num_queued, view.queue.num_tenants) == (0, 0)
    assert (view.router_id, view.num_streams) == (router.incarnation, 3)
    [traffic] = view.traffic
    assert (traffic.model, traffic.num_accepted, traffic.num_ended) == ("fake", 5, 2)
    assert traffic.num_output_tokens >= 2 * GREEDY.max_tokens + 3 * 3
    assert sum(traffic.first_token.counts) == 5
    assert len(traffic.first_token.counts) == len(traffic.first_token.bounds_s) + 1
    assert 0 < traffic.num_cached_tokens < traffic.num_prompt_tokens
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_worker_tells_where_its_time_and_its_prefixes_went(world):
    await world.start()
    for _ in range(2):
        await world.client().complete(PROMPT, GREEDY)
    times = world.workers[0].watch.times
    link = next(iter(world.routers[0].pool.links.values()))
    await world.until(lambda: link.load.num_steps == 20)
    [worker] = (await view_of(world.routers[0])).workers
    load = worker.load
    assert load.step_plan_s > 0
    assert load.step_run_s >= 20 * 0.001
    assert load.step_commit_s > 0
    assert load.prefix_asked_tokens == 2 * len(PROMPT)
    assert 0 < load.prefix_hit_tokens < len(PROMPT)
    assert load.num_step_tokens == 2 * (len(PROMPT) + 9) - load.prefix_hit_tokens == times.num_tokens


async def test_moves_are_shown_with_the_names_of_workers(world):
    await world.start(workers=2)
    [router] = world.routers
    client = world.client()
    tasks = await world.streams(client, 1, LONG)
    before = world.entry("s0").record.owner
    report = await router.migrator.migrate(world.entry("s0").record.seq_id)
    view = await view_of(router)
    [move] = view.moves
    assert (move.kind, move.request_id) == (admin_pb2.MOVE_KIND_MIGRATED, "s0")
    assert move.from_worker == router.pool.name_of(before)
    assert move.to_worker == router.pool.name_of(report.target)
    assert view.sequences[0].owner == report.target
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await world.until(lambda: world.entry("s0").record.state.ended)
    assert [move.request_id for move in (await view_of(router)).moves] == ["s0"]  # also after its end


async def test_where_a_sequence_moves_to_is_told_while_it_runs(world):
    await world.start()
    tasks = await world.streams(world.client(), 1, LONG)
    record = world.entry("s0").record
    record.mig_to = "there"
    [sequence] = (await view_of(world.routers[0])).sequences
    assert sequence.moving_to == "there"
    assert sequence_to_wire(replace_state(record, "QUEUED"), 0).moving_to == ""
    record.mig_to = ""
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def replace_state(record, state):
    return replace(record, state=type(record.state)(state))


async def test_the_queue_is_told_by_tenant(world):
    await world.worker(FakeRunner(step_s=0.02), max_batch_sequences=1)
    await world.router()
    await world.ready()
    client = world.client()
    tasks = [asyncio.create_task(client.complete([*PROMPT, i], LONG, request_id=f"s{i}")) for i in range(6)]
    await world.until(lambda: len(world.state._entries) == 6)
    await world.until(lambda: world.state.depth().num_queued > 1)
    view = await view_of(world.routers[0])
    [tenant] = view.queue.tenants
    assert tenant.num_queued == view.queue.num_queued == world.state.depth().num_queued
    assert tenant.queued_tokens == view.queue.queued_tokens
    waiting = [s for s in view.sequences if s.state == inference_pb2.REQUEST_STATE_QUEUED]
    assert len(waiting) == view.queue.num_queued
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class CountingStore(MemoryStore):
    """Counts what is read of it, and fails when it is told to."""

    reads = 0
    failing = False

    async def list_sequences(self, owner, limit):
        self.reads += 1
        if self.failing:
            raise StoreUnavailable("it is away")
        return await super().list_sequences(owner, limit)


async def test_nobody_watching_costs_nothing_and_all_share_what_is_read(world):
    store = CountingStore(world.state)
    router = await world.router(store)
    watches = [router.cluster.watch(60_000) for _ in range(8)]
    assert store.reads == 0
    views = await asyncio.gather(*(anext(watch) for watch in watches))
    assert store.reads == 1
    assert len({id(view) for view in views}) == 1
    assert views[0].json is views[1].json  # made once
    assert router.cluster.num_watchers == 8
    for watch in watches:
        await watch.aclose()
    assert router.cluster.num_watchers == 0


async def test_a_watcher_that_reads_slowly_gets_the_newest_view(world, monkeypatch):
    monkeypatch.setattr(cluster_watch, "MIN_MS", 1)
    router = await world.router(store := CountingStore(world.state))
    async with aclosing(router.cluster.watch(1)) as views:
        first = await anext(views)
        await asyncio.sleep(0.3)  # hundreds of intervals pass
        assert store.reads == 1  # nothing was gathered for it
        assert (await anext(views)).at > first.at + 0.29


async def test_a_store_that_does_not_answer_is_told_beside_the_rest(world, monkeypatch):
    monkeypatch.setattr(cluster_watch, "READ_S", 0.05)
    store = CountingStore(world.state)
    await world.worker()
    router = await world.router(store)
    await world.ready()
    store.failing = True
    view = await view_of(router)
    assert view.failure.reason == "STORE_UNAVAILABLE"
    assert view.failure.message == "it is away"
    assert len(view.workers) == 1
    assert not view.HasField("queue")

    async def hang(limit):
        await asyncio.Event().wait()

    monkeypatch.setattr(store, "tenant_depths", hang)
    router.cluster._latest = None
    assert "has not answered" in (await view_of(router)).failure.message


async def test_too_many_watchers_are_refused(world, monkeypatch):
    monkeypatch.setattr(cluster_watch, "MAX_WATCHERS", 1)
    router = await world.router()
    async with aclosing(router.cluster.watch()) as views:
        await anext(views)
        with pytest.raises(TooManyStreams):
            await view_of(router)
    await view_of(router)


async def test_the_call_streams_views_and_its_caller_may_leave(world):
    router = await world.router()
    async with open_channel(json.loads(router._member.info)["admin_endpoint"]) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        call = stub.WatchCluster(admin_pb2.WatchClusterRequest(interval_ms=1))
        with statuses.serving_errors():
            seen = [await call.read() for _ in range(2)]
        assert [view.router_id for view in seen] == [router.incarnation] * 2
        assert seen[1].up_ms >= seen[0].up_ms + 190  # 1 ms counts as 200
        call.cancel()
        await world.until(lambda: router.cluster.num_watchers == 0)
        assert await call.code() is grpc.StatusCode.CANCELLED
