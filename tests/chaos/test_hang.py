"""A router or a worker that stops without dying: its streams soon go on elsewhere."""

import asyncio
import time

import pytest

LEFT_S = 8.0  # 2.1 to 2.9 s on a busy machine; it took 10 to 20 s when pings had 10 s


async def longest_silence(stream):
    """Reads a stream to its end; the longest time without an event."""
    worst, last = 0.0, time.monotonic()
    async for _ in stream:
        now = time.monotonic()
        worst, last = max(worst, now - last), now
    return worst


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["r0", "w0"])
async def test_streams_leave_what_hangs(cluster, victim):
    """A router or a worker that says nothing any more, with its connections open, until all its streams have ended."""
    async with cluster.client([0, 1]) as client:
        streams = [client.generate(f"Hello {i}", max_tokens=300, temperature=0, ignore_eos=True) for i in range(8)]
        for stream in streams:
            await anext(stream)
        cluster.pause(victim)
        silences = await asyncio.gather(*map(longest_silence, streams))
    assert max(silences) > 0.3, "nothing was to be noticed"
    assert max(silences) < LEFT_S
    assert any(stream.num_reattaches for stream in streams) == (victim == "r0")
    cluster.resume(victim)
    await asyncio.to_thread(cluster.wait_ready)
