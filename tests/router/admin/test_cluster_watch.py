"""Whoever watches the cluster sees what the other calls of Admin tell, and costs nothing while nobody does."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

from octavo.request.sampling import SamplingParams
from octavo.v1 import admin_pb2, inference_pb2

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
    for _ in range(2):
        await client.complete(PROMPT, GREEDY)
    view = await view_of(router)
    assert [worker.worker_id for worker in view.workers] == ["worker-0", "worker-1"]
    assert sorted(s.request_id for s in view.sequences) == ["s0", "s1", "s2"]
    for sequence in view.sequences:
        record = world.entry(sequence.request_id).record
        assert (sequence.owner, sequence.epoch, sequence.moving_to) == (record.owner, record.epoch, "")
        assert sequence.state == inference_pb2.REQUEST_STATE_RUNNING
    assert not view.has_more_sequences and not view.HasField("failure")
    assert (view.queue.num_queued, view.queue.num_tenants) == (0, 0)
    assert (view.router_id, view.num_streams) == (router.incarnation, 3)
    [traffic] = view.traffic
    assert (traffic.model, traffic.num_accepted, traffic.num_ended) == ("fake", 5, 2)
    assert traffic.num_output_tokens >= 2 * GREEDY.max_tokens + 3 * 3
    assert sum(traffic.first_token.counts) == 5
    assert len(traffic.first_token.counts) == len(traffic.first_token.bounds_s) + 1
    assert 0 < traffic.num_cached_tokens < traffic.num_prompt_tokens
    await world.abandon(tasks)


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
