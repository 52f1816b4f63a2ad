"""A worker that stops without dying: others take over, and what it says when it wakes up is not accepted."""

import asyncio
import random
import re

import pytest


def num_fenced(cluster, name):
    """Appends that the store has refused to this worker, by its log."""
    return len(re.findall(r"another worker owns", cluster.processes[name].log.read_text()))


@pytest.mark.timeout(300)
async def test_a_hung_worker_is_replaced_and_fenced(cluster, traffic, seed):
    victim = random.Random(seed).choice(["w0", "w1"])
    before = num_fenced(cluster, victim)
    await asyncio.sleep(0.7)
    running = cluster.workers()[victim].load.num_sequences
    cluster.pause(victim)
    assert running > 0
    streams = traffic.num_streams
    await asyncio.sleep(3 * cluster.shape.lease_ms / 1000)
    traffic.check()
    assert traffic.num_streams > streams + 8  # those that ran there, and new ones
    cluster.resume(victim)
    await asyncio.to_thread(cluster.wait_ready)
    await asyncio.sleep(1.0)
    await traffic.stop()
    assert num_fenced(cluster, victim) > before


@pytest.mark.timeout(300)
async def test_a_hung_router_loses_nothing(cluster, traffic):
    await asyncio.sleep(0.5)
    cluster.pause("r0")
    await asyncio.sleep(2 * cluster.shape.lease_ms / 1000)
    cluster.resume("r0")
    await asyncio.to_thread(cluster.wait_ready)
    await traffic.stop()


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_stream_leaves_a_hung_router(cluster):
    """A router that says nothing any more, with its connections open: the SDK gives it up by itself, and soon."""
    async with cluster.client([0, 1]) as client:
        stream = client.generate("Hello", max_tokens=100, temperature=0, ignore_eos=True)
        await anext(stream)
        async with asyncio.timeout(45):  # 20 s on a quiet machine; gRPC alone waits 60 s for a ping
            cluster.pause("r0")
            rest = [event async for event in stream]
    assert rest[-1].finished is not None
    assert stream.num_reattaches == 1
