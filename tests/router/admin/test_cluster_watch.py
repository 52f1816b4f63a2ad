"""Whoever watches the cluster sees what the other calls of Admin tell, and costs nothing while nobody does."""

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace

import grpc

from gpu_worker.testing.fake_runner import FakeRunner
from octavo.net.channel import open_channel
from octavo.request.sampling import SamplingParams
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from octavo.wire import statuses
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


async def test_a_view_tells_where_sequences_move(world):
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
    await world.until(lambda: len(world.entries) == 6)
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


async def test_a_caller_of_views_may_leave(world):
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
