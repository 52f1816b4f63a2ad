"""Two hosts joined by one store: what happens to them, and to the link between them, under live streams.

The hosts are network namespaces, so addresses, certificates and what is advertised count as they do between machines.
"""

import asyncio
import re
from itertools import count

import pytest
from live.cluster import Shape
from live.host_cluster import host_cluster
from live.network_hosts import why_none
from live.reader import Reader
from live.traffic import Traffic

from octavo.client import SamplingParams

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_none()), reason=why_none() or "there are hosts"),
]

SHAPE = Shape(step_delay_ms=10, router_args=("--drain-ms", "3000"))
LONG = SamplingParams(temperature=0.0, max_tokens=20_000)
SHORT = SamplingParams(temperature=0.0, max_tokens=80)
PREFIX = list(range(100, 260))  # ten blocks that every stream begins with
CUT_S = 26.0  # longer than a router waits for the store before it ends its streams


@pytest.fixture(params=["ipv4-tls", "ipv6-insecure"])
def apart(request, tmp_path):
    family, transport = request.param.split("-")
    with host_cluster(tmp_path / "hosts", SHAPE, ipv6=family == "ipv6", tls=transport == "tls") as cluster:
        yield cluster


async def test_two_hosts_live_through_moves_drains_kills_and_a_cut(apart, oracle):
    numbers, aside = count(), asyncio.to_thread

    def draw(number):
        prompt = [*PREFIX, number, next(numbers)]
        return prompt, SHORT, oracle.outputs(prompt, SHORT)

    streams = Traffic(apart.client(), draw, 120)
    streams.begin(4)
    async with apart.client() as client:
        reader = Reader(client.generate([7, 8, 9], LONG, request_id="long"))
        await reader.until(60)

        async def both_go_on(timeout_s=20):
            await reader.until(reader.num_tokens + 40, timeout_s)
            await streams.until(4)

        for _ in range(2):  # there and back, with blocks
            there = {"w0": "w1", "w1": "w0"}[await aside(apart.owner, "long")]
            moved = await aside(apart.migrate, "long", there)
            assert (moved.worker_id, await aside(apart.owner, "long")) == (there, there)
            assert moved.num_sent_blocks > 0
            await reader.until(reader.num_tokens + 40)

        here = await aside(apart.owner, "long")
        last = (await aside(apart.drain, here))[-1]
        assert last.num_left == 0 and last.num_migrated > 0
        await both_go_on()
        await aside(lambda: apart.drain(here, undo=True))
        await aside(apart.wait_ready)

        for name in ("w1", "w0", "r1", "r0"):
            await aside(apart.kill, name)
            await both_go_on(60)
            apart.spawn(name)
            await aside(apart.wait_ready)
        for name in ("w0", "w1"):  # its prefixes came from the other host when it started again
            assert re.search(r"[1-9]\d* blocks of prefixes have come from 1 other", apart.processes[name].tail()), name

        await aside(apart.hosts.cut)
        await asyncio.sleep(CUT_S)
        await both_go_on(60)
        assert await aside(apart.owner, "long") == "w0"
        assert [name for name, worker in apart.workers().items() if worker.available] == ["w0"]
        await aside(apart.hosts.heal)
        await aside(apart.wait_ready)
        assert (await aside(apart.migrate, "long", "w1")).worker_id == "w1"
        await both_go_on()

        tokens = list(reader.tokens[0])
        await client.cancel("long")
        await asyncio.gather(reader.task, return_exceptions=True)
    await streams.stop()
    assert tokens == oracle.tokens([7, 8, 9], len(tokens))
    await aside(apart.wait_idle)
