"""A primary and a replica: what waits for the replica survives the primary, and clients find whichever is promoted."""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest
import redis.asyncio as redis
from waiting import until

from octavo.cli.doctor import store_check
from octavo.local import ports
from octavo.local.embedded import EmbeddedStore
from octavo.process.retry import until_answered
from octavo.request.errors import Mismatch, StoreUnavailable
from octavo.request.ids import Incarnation
from octavo.store import redis_server
from octavo.store.calls import AppendItem, AppendStatus, QueueLimits, TakeReason, TakeRequest
from octavo.store.codec import lifeline_channel
from octavo.store.redis import RedisStore
from octavo.store.redis_server import RedisOptions

W1 = Incarnation("worker1")


class Pair:
    """Two servers, the second one a replica of the first one."""

    def __init__(self, folder, binary):
        self.ports = ports.pick(2)
        self.servers = [EmbeddedStore(folder / str(port), port=port, binary=binary) for port in self.ports]
        self.clients = [redis.Redis(port=port) for port in self.ports]
        self.url = f"redis://127.0.0.1:{self.ports[0]},127.0.0.1:{self.ports[1]}/0"

    async def start(self):
        for server, client in zip(self.servers, self.clients, strict=True):
            await server.start()
            await client.config_set("repl-diskless-sync-delay", 0)
        await self.follow(1, 0)

    async def follow(self, follower, primary):
        await self.clients[follower].replicaof("127.0.0.1", str(self.ports[primary]))
        await until(lambda: self.link_is_up(follower))

    async def link_is_up(self, follower):
        return (await self.clients[follower].info("replication")).get("master_link_status") == "up"

    async def stop(self):
        for server, client in zip(self.servers, self.clients, strict=True):
            await client.aclose()
            if server.pid is not None:
                await server.kill()
            await server.stop()


class Story:
    """One sequence, and the store that it is in."""

    def __init__(self, store, sequence):
        self.store, self.seq_id = store, sequence.seq_id
        self.sequence = sequence

    async def begin(self):
        taking = TakeRequest(self.seq_id, 0, W1, "t", TakeReason.QUEUED)
        await until_answered(lambda: self.store.accept(self.sequence, QueueLimits()), patience_s=20)
        await until_answered(lambda: self.store.take_ownership(taking), patience_s=20)

    async def append(self, first, tokens, store=None):
        [reply] = await (store or self.store).append_batch(W1, [AppendItem(self.seq_id, 1, 0, first, tokens)])
        return reply.status

    async def append_at_last(self, first, tokens):
        return await until_answered(lambda: self.append(first, tokens), patience_s=20)


@pytest.fixture(params=["valkey", pytest.param("redis", marks=pytest.mark.redis)])
async def pair(request, tmp_path):
    binary = Path(shutil.which("redis-server") or "redis-server") if request.param == "redis" else None
    made = Pair(tmp_path, binary)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def story(pair, new):
    opened = RedisStore(pair.url, RedisOptions(replicas=1, replica_timeout_ms=300))
    await opened.open()
    made = Story(opened, new("s", max_tokens=1000))
    await made.begin()
    yield made
    await opened.close()


async def test_a_write_counts_once_replicas_have_it(pair, story):
    os.kill(pair.servers[1].pid, signal.SIGSTOP)
    with pytest.raises(StoreUnavailable, match="too few replicas: 0 of 1"):
        await story.append(0, [1, 2])
    other = RedisStore(pair.url.partition(",")[0] + "/0", RedisOptions(replicas=1, replica_timeout_ms=300))
    with pytest.raises(StoreUnavailable, match="too few replicas"):  # on a connection that has written nothing
        await story.append(0, [1, 2], other)
    await other.close()
    assert await story.store.read(story.seq_id) is not None  # what only reads waits for nobody
    os.kill(pair.servers[1].pid, signal.SIGCONT)
    assert await story.append_at_last(0, [1, 2]) is AppendStatus.DUP
    assert await pair.clients[1].strlen(f"octavo:seq:{story.seq_id}:0") == 8


async def test_answers_survive_the_primary_after_a_promotion(pair, story):
    store, generation, tokens = story.store, story.store.generation, tuple(range(50))
    for index in tokens:
        assert await story.append_at_last(index, [index]) in (AppendStatus.OK, AppendStatus.DUP)
    await pair.servers[0].kill()
    with pytest.raises(StoreUnavailable, match=f":{pair.ports[0]}: .*:{pair.ports[1]}: a replica"):
        await store.read(story.seq_id)
    await pair.clients[1].replicaof("NO", "ONE")
    snapshot = await until_answered(lambda: store.read(story.seq_id, from_indexes=[0]), patience_s=20)
    assert snapshot.outputs == (tokens,)
    assert store.generation > generation
    with pytest.raises(StoreUnavailable, match="too few replicas"):  # until the primary has a replica again
        await story.append(len(tokens), [7])

    await pair.servers[0].start()  # the old primary comes back by itself, and calls itself one
    late = RedisStore(pair.url)
    (output,) = (await late.read(story.seq_id, from_indexes=[0])).outputs
    assert output[: len(tokens)] == tokens
    await late.close()
    await pair.follow(0, 1)
    assert await story.append_at_last(len(tokens), [7]) in (AppendStatus.OK, AppendStatus.DUP)


async def test_a_lifeline_goes_along_when_primary_and_replica_change_places(pair, story, monkeypatch):
    """A replica that was the primary keeps its connections, and answers pings."""
    monkeypatch.setattr(redis_server, "PING_S", 0.1)
    times_held, channel = [], lifeline_channel(W1)
    holding = asyncio.create_task(story.store.hold_lifeline(W1, lambda: times_held.append(None)))

    async def hears(index):
        return dict(await pair.clients[index].pubsub_numsub(channel))[channel.encode()] == 1

    await until(lambda: hears(0))
    await pair.clients[1].replicaof("NO", "ONE")
    await pair.clients[0].replicaof("127.0.0.1", str(pair.ports[1]))
    await story.begin()
    await until(lambda: hears(1))
    assert not await hears(0) and len(times_held) == 2
    holding.cancel()
    await asyncio.wait([holding])


async def test_a_node_of_a_cluster_is_refused(tmp_path):
    port, cluster_port = ports.pick(2)

    class ClusterNode(EmbeddedStore):
        def _arguments(self):
            return [*super()._arguments(), "--cluster-enabled", "yes", "--cluster-port", str(cluster_port)]

    server = ClusterNode(tmp_path / "node", port=port)
    await server.start()
    store = RedisStore(server.url)
    with pytest.raises(Mismatch, match="node of a Redis Cluster"):
        await store.open()
    await store.close()
    report = await store_check.store(server.url)
    assert (report.result, "node of a Redis Cluster" in report.detail) == ("bad", True)
    await server.stop()
