"""A primary and a replica: what waits for the replica survives the primary, and clients find whichever is promoted."""

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis
from waiting import until

from octavo.cli.doctor import store_check
from octavo.local.embedded import EmbeddedStore
from octavo.process.retry import until_answered
from octavo.request.errors import Mismatch, StoreUnavailable
from octavo.request.ids import Incarnation
from octavo.request.record import NewSequence
from octavo.store import redis_server
from octavo.store.calls import AppendItem, AppendStatus, QueueLimits, TakeReason, TakeRequest
from octavo.store.codec import lifeline_channel
from octavo.store.redis import RedisStore
from octavo.store.redis_server import RedisOptions


class ClusterNode(EmbeddedStore):
    def _arguments(self) -> list[str]:
        return [*super()._arguments(), "--cluster-enabled", "yes"]


W1 = Incarnation("worker1")


class Pair:
    """Two servers, the second one a replica of the first one."""

    def __init__(self, folder: Path, ports: list[int], binary: Path | None) -> None:
        self.servers = [EmbeddedStore(folder / str(port), port=port, binary=binary) for port in ports]
        self.clients = [redis.Redis(port=port) for port in ports]
        self.ports = ports

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.ports[0]},127.0.0.1:{self.ports[1]}/0"

    async def start(self) -> None:
        for server, client in zip(self.servers, self.clients, strict=True):
            await server.start()
            await client.config_set("repl-diskless-sync-delay", 0)
        await self.follow(1, 0)

    async def follow(self, follower: int, primary: int) -> None:
        await self.clients[follower].replicaof("127.0.0.1", str(self.ports[primary]))
        await until(lambda: self.link_is_up(follower))

    async def link_is_up(self, follower: int) -> bool:
        return (await self.clients[follower].info("replication")).get("master_link_status") == "up"

    def signal(self, index: int, what: signal.Signals) -> None:
        os.kill(self.servers[index].pid or 0, what)

    async def stop(self) -> None:
        for server, client in zip(self.servers, self.clients, strict=True):
            await client.aclose()
            if server.pid is not None:
                await server.kill()
            await server.stop()


def free_ports(count: int) -> list[int]:
    """Different ports: all are held until the last one is found."""
    with ExitStack() as held:
        listeners = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


@pytest.fixture(params=["valkey", pytest.param("redis", marks=pytest.mark.redis)])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    binary = Path(shutil.which("redis-server") or "redis-server") if request.param == "redis" else None
    made = Pair(tmp_path, free_ports(2), binary)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def store(pair: Pair) -> AsyncIterator[Any]:
    opened = RedisStore(pair.url, RedisOptions(replicas=1, replica_timeout_ms=300))
    await opened.open()
    yield opened
    await opened.close()


async def begin(store: Any, new: NewSequence) -> None:
    taking = TakeRequest(new.seq_id, 0, W1, "t", TakeReason.QUEUED)
    await until_answered(lambda: store.accept(new, QueueLimits()), patience_s=20)
    await until_answered(lambda: store.take_ownership(taking), patience_s=20)


async def append(store: Any, new: NewSequence, first: int, tokens: list[int]) -> AppendStatus:
    (reply,) = await store.append_batch(W1, [AppendItem(new.seq_id, 1, 0, first, tokens)])
    return reply.status


async def test_a_write_counts_once_replicas_have_it(pair: Pair, store: Any, new: Any) -> None:
    sequence = new("s", max_tokens=100)
    await begin(store, sequence)
    pair.signal(1, signal.SIGSTOP)
    with pytest.raises(StoreUnavailable, match="too few replicas: 0 of 1"):
        await append(store, sequence, 0, [1, 2])
    other = RedisStore(pair.url.partition(",")[0] + "/0", RedisOptions(replicas=1, replica_timeout_ms=300))
    with pytest.raises(StoreUnavailable, match="too few replicas"):  # on a connection that has written nothing
        await append(other, sequence, 0, [1, 2])
    await other.close()
    assert await store.read(sequence.seq_id) is not None  # what only reads waits for nobody
    pair.signal(1, signal.SIGCONT)
    status = await until_answered(lambda: append(store, sequence, 0, [1, 2]), patience_s=20)
    assert status is AppendStatus.DUP
    assert await pair.clients[1].strlen(f"octavo:seq:{sequence.seq_id}:0") == 8


async def test_answers_survive_the_primary_after_a_promotion(pair: Pair, store: Any, new: Any) -> None:
    sequence = new("s", max_tokens=1000)
    await begin(store, sequence)
    generation, answered = store.generation, 0
    for index in range(50):
        status = await until_answered(partial(append, store, sequence, index, [index]), patience_s=20)
        assert status in (AppendStatus.OK, AppendStatus.DUP)
        answered += 1
    await pair.servers[0].kill()
    with pytest.raises(StoreUnavailable):
        await store.read(sequence.seq_id)
    await pair.clients[1].replicaof("NO", "ONE")
    snapshot = await until_answered(lambda: store.read(sequence.seq_id, from_indexes=[0]), patience_s=20)
    assert snapshot.outputs == (tuple(range(answered)),)
    assert store.generation > generation
    with pytest.raises(StoreUnavailable, match="too few replicas"):  # until the primary has a replica again
        await append(store, sequence, answered, [7])

    await pair.servers[0].start()  # the old primary comes back by itself, and calls itself one
    late = RedisStore(pair.url)
    (output,) = (await late.read(sequence.seq_id, from_indexes=[0])).outputs
    assert output[:answered] == tuple(range(answered))
    await late.close()
    await pair.follow(0, 1)
    status = await until_answered(lambda: append(store, sequence, answered, [7]), patience_s=20)
    assert status in (AppendStatus.OK, AppendStatus.DUP)


async def test_a_lifeline_goes_along_when_primary_and_replica_change_places(
    pair: Pair, store: Any, new: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that was the primary keeps its connections, and answers pings."""
    monkeypatch.setattr(redis_server, "PING_S", 0.1)
    times_held: list[None] = []
    holding = asyncio.create_task(store.hold_lifeline(W1, lambda: times_held.append(None)))

    async def hears(index: int) -> bool:
        return dict(await pair.clients[index].pubsub_numsub(lifeline_channel(W1)))[lifeline_channel(W1).encode()] == 1

    await until(lambda: hears(0))
    await pair.clients[1].replicaof("NO", "ONE")
    await pair.clients[0].replicaof("127.0.0.1", str(pair.ports[1]))
    await begin(store, new("s"))
    await until(lambda: hears(1))
    assert not await hears(0) and len(times_held) == 2
    holding.cancel()
    await asyncio.wait([holding])


async def test_without_a_primary_the_error_names_every_server(pair: Pair) -> None:
    await pair.servers[0].kill()
    alone = RedisStore(pair.url)
    with pytest.raises(StoreUnavailable, match=f":{pair.ports[0]}: .*:{pair.ports[1]}: a replica"):
        await alone.open()
    await alone.close()


async def test_a_node_of_a_cluster_is_refused(tmp_path: Path) -> None:
    server = ClusterNode(tmp_path / "node", port=free_ports(1)[0])
    await server.start()
    store = RedisStore(server.url)
    with pytest.raises(Mismatch, match="node of a Redis Cluster"):
        await store.open()
    await store.close()
    report = await store_check.store(server.url)
    assert (report.result, "node of a Redis Cluster" in report.detail) == ("bad", True)
    await server.stop()
