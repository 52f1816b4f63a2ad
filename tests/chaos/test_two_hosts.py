"""Two hosts joined by one store: what happens to them, and to the link between them, under live streams.

The hosts are network namespaces, so addresses, certificates and what is advertised count as they do between machines.
"""

import asyncio
import re

import pytest
from live.client_loops import ClientLoops, read_history
from live.cluster import Shape
from live.host_cluster import host_cluster
from live.network_hosts import why_none
from live.reader import Reader

from octavo.client import SamplingParams
from octavo.v1 import admin_pb2

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_none()), reason=why_none() or "there are hosts"),
]

SHAPE = Shape(step_delay_ms=10, router_args=("--drain-ms", "3000"))
STREAM_S = 120.0
LONG = SamplingParams(temperature=0.0, max_tokens=20_000)
PREFIX = list(range(100, 260))  # ten blocks that every stream begins with
CUT_S = 26.0  # longer than a router waits for the store before it ends its streams


class PrefixStreams(ClientLoops):
    """Clients with one stream after the other, all with one prefix; each must say what the oracle says."""

    def __init__(self, cluster, oracle):
        super().__init__(cluster.client())
        self._oracle, self.num_streams = oracle, 0

    async def stream_once(self, number):
        prompt, params = [*PREFIX, number, self.num_streams], SamplingParams(temperature=0.0, max_tokens=80)
        history = await read_history(self.client.generate(prompt, params), STREAM_S)
        history.check(self._oracle.outputs(prompt, params))
        self.num_streams += 1

    async def until(self, more, timeout_s=90.0):
        """Until so many more streams have ended well."""
        begun = self.num_streams
        async with asyncio.timeout(timeout_s):
            while self.num_streams < begun + more:
                self.check()
                await asyncio.sleep(0.05)


def migrate(cluster, request_id, to):
    request = admin_pb2.MigrateRequest(request_id=request_id, worker_id=to)
    return cluster.admin(0).Migrate(request, timeout=30)


def owner_of(cluster, request_id):
    """The name of the worker that runs it; empty if none does."""
    listed = cluster.admin(0).ListSequences(admin_pb2.ListSequencesRequest(), timeout=10).sequences
    names = {worker.incarnation: name for name, worker in cluster.workers().items()}
    return next((names.get(each.owner, "") for each in listed if each.request_id == request_id), "")


def drain(cluster, name, *, undo=False):
    return list(cluster.admin(0).DrainWorker(admin_pb2.DrainWorkerRequest(worker_id=name, undo=undo), timeout=60))


@pytest.fixture(params=["ipv4-tls", "ipv6-insecure"])
def apart(request, tmp_path):
    family, transport = request.param.split("-")
    with host_cluster(tmp_path / "hosts", SHAPE, ipv6=family == "ipv6", tls=transport == "tls") as cluster:
        yield cluster


async def test_two_hosts_live_through_moves_drains_kills_and_a_cut(apart, oracle):
    streams = PrefixStreams(apart, oracle)
    streams.begin(4)
    async with apart.client() as client:
        reader = Reader(client.generate([7, 8, 9], LONG, request_id="long"))
        await reader.until(60)

        for _ in range(2):  # there and back, with blocks
            here = await asyncio.to_thread(owner_of, apart, "long")
            there = {"w0": "w1", "w1": "w0"}[here]
            moved = await asyncio.to_thread(migrate, apart, "long", there)
            assert (moved.worker_id, await asyncio.to_thread(owner_of, apart, "long")) == (there, there)
            assert moved.num_sent_blocks > 0
            await reader.until(reader.num_tokens + 40)

        here = await asyncio.to_thread(owner_of, apart, "long")
        last = (await asyncio.to_thread(drain, apart, here))[-1]
        assert last.num_left == 0
        assert last.num_migrated > 0
        await reader.until(reader.num_tokens + 40)
        await streams.until(4)
        await asyncio.to_thread(drain, apart, here, undo=True)
        await asyncio.to_thread(apart.wait_ready)

        for name in ("w1", "w0", "r1", "r0"):
            await asyncio.to_thread(apart.kill, name)
            await reader.until(reader.num_tokens + 40, timeout_s=60)
            await streams.until(4)
            apart.spawn(name)
            await asyncio.to_thread(apart.wait_ready)
        for name in ("w0", "w1"):  # its prefixes came from the other host when it started again
            assert re.search(r"[1-9]\d* blocks of prefixes have come from 1 other", apart.processes[name].tail()), name

        await asyncio.to_thread(apart.hosts.cut)
        await asyncio.sleep(CUT_S)
        await reader.until(reader.num_tokens + 40, timeout_s=60)
        await streams.until(4)
        assert await asyncio.to_thread(owner_of, apart, "long") == "w0"
        assert [name for name, worker in apart.workers().items() if worker.available] == ["w0"]
        await asyncio.to_thread(apart.hosts.heal)
        await asyncio.to_thread(apart.wait_ready)
        moved = await asyncio.to_thread(migrate, apart, "long", "w1")
        assert moved.worker_id == "w1"
        await reader.until(reader.num_tokens + 40)
        await streams.until(4)

        tokens = list(reader.tokens[0])
        await client.cancel("long")
        await asyncio.gather(reader.task, return_exceptions=True)
    await streams.stop()
    assert tokens == oracle.tokens([7, 8, 9], len(tokens))
    await asyncio.to_thread(apart.wait_idle)
