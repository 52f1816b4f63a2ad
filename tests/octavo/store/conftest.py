"""Private servers to test on: Valkey from its wheel always, redis-server 7 with `pytest --redis`."""

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from guard.processes import lasting

from octavo.local.embedded import EmbeddedStore
from octavo.request.ids import Incarnation, RequestId, SequenceId, sequence_id
from octavo.request.record import NewSequence
from octavo.store import codec, library
from octavo.store.calls import QueueLimits, TakeReason, TakeReply, TakeRequest, TakeStatus
from octavo.store.memory import MemoryState, MemoryStore
from octavo.store.redis import RedisStore
from octavo.store.redis_server import RedisOptions

CLOCK_KEY = "octavo:test-clock"
CLOCK = f"local function now_ms() return tonumber(redis.call('GET', '{CLOCK_KEY}')) end"
START_MS = 1_000_000_000_000

# With hand-set time
TEST_SOURCE = library.join({**library.parts(), "00_clock.lua": CLOCK})


REDIS = pytest.param("redis", marks=pytest.mark.redis)


def redis_binary() -> Path:
    found = shutil.which("redis-server")
    assert found, "no redis-server is on PATH: tools/redis.sh installs Debian's"
    return Path(found)


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    """The event loop of what outlives a test: servers, and state machines, which are not asynchronous themselves."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def servers(
    runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], EmbeddedStore]]:
    """Starts a server of a kind at its first use."""
    running: dict[str, EmbeddedStore] = {}

    def get(kind: str) -> EmbeddedStore:
        if kind not in running:
            binary = redis_binary() if kind == "redis" else None
            embedded = EmbeddedStore(tmp_path_factory.mktemp(kind), binary=binary)
            runner.run(embedded.start())
            running[kind] = embedded
        return running[kind]

    with lasting(lambda: [embedded.pid for embedded in running.values() if embedded.pid is not None]):
        yield get
    for embedded in running.values():
        runner.run(embedded.stop())


class Clock:
    now_ms = START_MS


class Bench:
    """A store to test with a clock to turn and a server to restart, whichever kind it is."""

    def __init__(self, clock: Clock, store: MemoryStore | RedisStore, another: Callable[..., Any]) -> None:
        self.clock = clock
        self.store = store
        self._make = another
        self._opened = [store]

    def another(self) -> Any:
        """One more process on the same server."""
        self._opened.append(self._make())
        return self._opened[-1]

    async def close(self) -> None:
        for store in self._opened:
            await store.close()

    async def run(self, request: NewSequence, owner: Incarnation = Incarnation("worker1")) -> int:
        """Accepts and places a request; the epoch."""
        await self.store.accept(request, QueueLimits())
        taken = await self.take_ownership(request.seq_id, 0, owner, "first", TakeReason.QUEUED)
        assert taken.status is TakeStatus.OK
        return taken.epoch

    async def crash(self, seq_id: SequenceId, epoch: int, to: Incarnation) -> TakeReply:
        """The owner at that epoch has begun to run the sequence and died, and another worker takes over."""
        snapshot = await self.store.read(seq_id)
        await self.store.announce(seq_id, epoch, snapshot.record.owner)
        return await self.take_ownership(seq_id, epoch, to, f"crash{epoch}", TakeReason.CONNECTION)

    async def take_ownership(
        self, seq_id: SequenceId, epoch: int, owner: Incarnation, take_id: str, reason: TakeReason
    ) -> TakeReply:
        return await self.store.take_ownership(TakeRequest(seq_id, epoch, owner, take_id, reason))

    async def used_quota(self, tenant: str) -> tuple[int, tuple[int, ...] | None]:
        """The tenant's streams that count, and what its bucket holds; None: there is none, so it is full."""
        if isinstance(self.store, MemoryStore):
            bucket = self.store.shared.buckets.buckets.get(tenant)
            return self.store.shared.num_streams(tenant), None if bucket is None else tuple(bucket)
        client = self.store.server.client
        bucket = await client.get(f"octavo:spent:{tenant}")
        num_streams = await client.zcard(f"octavo:streams:{tenant}")
        return num_streams, None if bucket is None else tuple(int(number) for number in bucket.split())

    async def num_accounts(self, model: str) -> int:
        """How many accounts of tenants the queue has."""
        if isinstance(self.store, MemoryStore):
            return len(self.store.shared.fair_queues[model].accounts)
        fields = await self.store.server.client.hkeys(f"octavo:accounts:{model}")
        return sum(not field.startswith((b"all", b"n:")) for field in fields)

    async def kept_ms(self, seq_id: SequenceId) -> set[int]:
        """For how long the parts of a sequence are kept from now on, in ms: the record, its journal and its notes."""
        if isinstance(self.store, MemoryStore):
            return {self.store.shared._entries[seq_id].expires_ms - self.clock.now_ms}
        key = codec.record_key(seq_id)
        return {await self.store.server.client.pttl(name) for name in (key, f"{key}:0", f"{key}:notes")}

    async def listening(self, router: Incarnation) -> None:
        """Returns when somebody hears that router's notices."""
        while not await self._heard(router):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def _heard(self, router: Incarnation) -> bool:
        if isinstance(self.store, MemoryStore):
            return router in self.store.shared.subscribers.values()
        [(_, count)] = await self.store.server.client.pubsub_numsub(codec.notice_channel(router))
        return bool(count)

    @asynccontextmanager
    async def lifeline(self, worker: Incarnation) -> AsyncIterator[None]:
        """Another process, that worker, lives inside, and the store knows it."""
        process = self.another()
        await process.open()
        held = asyncio.Event()
        holding = asyncio.create_task(process.hold_lifeline(worker, held.set))
        while not await self._has_lifeline(worker):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert held.is_set()
        yield
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        while await self._has_lifeline(worker):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def _has_lifeline(self, worker: Incarnation) -> bool:
        if isinstance(self.store, MemoryStore):
            return worker in self.store.shared.lifelines
        [(_, count)] = await self.store.server.client.pubsub_numsub(codec.lifeline_channel(worker))
        return bool(count)

    async def advance(self, ms: int) -> None:
        self.clock.now_ms += ms
        if isinstance(self.store, RedisStore):
            await self.store.server.client.set(CLOCK_KEY, self.clock.now_ms, ex=3600)

    async def restart(self) -> None:
        """As another server process would find the data; a real restart is tested in test_durability.py."""
        if isinstance(self.store, MemoryStore):
            self.store.shared.restart()
            return
        for key in await self.store.server.client.keys("octavo:gen"):
            generation, _, frozen = (await self.store.server.client.get(key)).split()
            await self.store.server.client.set(key, b"%s %s %s" % (generation, b"0" * 40, frozen), ex=3600)


def memory_bench() -> Bench:
    clock = Clock()
    state = MemoryState(lambda: clock.now_ms)
    return Bench(clock, MemoryStore(state), partial(MemoryStore, state))


async def redis_bench(url: str) -> Bench:
    """An empty store with hand-set time."""

    patient = RedisOptions(connect_timeout_s=30, call_timeout_s=60)  # a test on a busy machine waits for its turn
    another = partial(RedisStore, url, patient, source=TEST_SOURCE)
    store = another()
    await store.server.client.flushall()
    await store.server.client.function_flush()  # another test may have left the library with a clock of another kind
    bench = Bench(Clock(), store, another)
    await bench.advance(0)
    await store.open()
    return bench


@pytest.fixture
def make_memory_bench() -> Callable[[], Bench]:
    return memory_bench


@pytest.fixture
def make_redis_bench() -> Callable[..., Any]:
    return redis_bench


@pytest.fixture(params=["memory", "valkey", REDIS])
def store_url(request: pytest.FixtureRequest, servers: Callable[[str], EmbeddedStore]) -> str:
    """The URL of the server; empty for memory. (Not async: a server is started outside the test's loop.)"""
    return "" if request.param == "memory" else servers(request.param).url


@pytest.fixture
async def bench(store_url: str) -> AsyncIterator[Bench]:
    bench = await redis_bench(store_url) if store_url else memory_bench()
    yield bench
    await bench.close()


@pytest.fixture(params=["valkey", REDIS])
def server(request: pytest.FixtureRequest, servers: Callable[[str], EmbeddedStore]) -> EmbeddedStore:
    return servers(request.param)


@pytest.fixture
async def server_bench(server: EmbeddedStore) -> AsyncIterator[Bench]:
    """A bench on a server of either kind, for what only a server has."""
    bench = await redis_bench(server.url)
    yield bench
    await bench.close()


@pytest.fixture
def store(server_bench: Bench) -> Any:
    return server_bench.store


@pytest.fixture
def make_another(server_bench: Bench) -> Callable[[], Any]:
    """Another process that calls the store in the name of the same worker."""
    return server_bench.another


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="session")
def new() -> Callable[..., NewSequence]:
    """A small request; keyword arguments change it."""

    def make(name: str = "a", **changes: Any) -> NewSequence:
        fields: dict[str, Any] = {
            "seq_id": sequence_id("tenant", RequestId(name)),
            "request_id": RequestId(name),
            "body_hash": b"\x00\xff body",
            "tenant": "tenant",
            "salt": "salt",
            "model": "model",
            "layout": "layout",
            "sampling": b"\x08\x01\xff",
            "prompt": (1, 2**32 - 1, 0),
            "prompt_chain": 2**64 - 1,
            "num_branches": 1,
            "max_tokens": 64,
            "priority": 3,
            "deadline_in_ms": 0,
            "keep_on_disconnect": False,
            "router": Incarnation("router1"),
        }
        return NewSequence(**fields | changes)

    return make
