"""Private servers to test on: Valkey from its wheel always, redis-server 7 with `pytest --redis`."""

import asyncio
import shutil
import socket
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from guard.processes import lasting

from octavo.local.embedded import EmbeddedStore
from octavo.request.ids import Incarnation, RequestId, sequence_id
from octavo.request.record import NewSequence
from octavo.store import codec, library
from octavo.store.calls import AppendItem, QueueLimits, TakeReason, TakeRequest, TakeStatus
from octavo.store.memory import MemoryState, MemoryStore
from octavo.store.redis import RedisStore
from octavo.store.redis_server import RedisOptions

CLOCK_KEY = "octavo:test-clock"
CLOCK = f"local function now_ms() return tonumber(redis.call('GET', '{CLOCK_KEY}')) end"
TEST_SOURCE = library.join({**library.parts(), "00_clock.lua": CLOCK})  # with hand-set time
REDIS = pytest.param("redis", marks=pytest.mark.redis)
W1 = Incarnation("worker1")


@pytest.fixture(scope="session")
def runner():
    """The event loop of what outlives a test: servers, and state machines, which are not asynchronous themselves."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def servers(runner, tmp_path_factory):
    """Starts a server of a kind at its first use."""
    running: dict[str, EmbeddedStore] = {}

    def get(kind):
        if kind not in running:
            found = shutil.which("redis-server")
            assert found or kind != "redis", "no redis-server is on PATH: tools/redis.sh installs Debian's"
            binary = Path(str(found)) if kind == "redis" else None
            running[kind] = EmbeddedStore(tmp_path_factory.mktemp(kind), binary=binary)
            runner.run(running[kind].start())
        return running[kind]

    with lasting(lambda: [embedded.pid for embedded in running.values() if embedded.pid is not None]):
        yield get
    for embedded in running.values():
        runner.run(embedded.stop())


class Clock:
    now_ms = 1_000_000_000_000


class Bench:
    """A store to test with a clock to turn and a server to restart, whichever kind it is."""

    def __init__(self, clock, store, another):
        self.clock, self.store, self._make, self._opened = clock, store, another, [store]
        self.client = store.server.client if isinstance(store, RedisStore) else None  # it may do everything

    def another(self):
        """One more process on the same server."""
        self._opened.append(self._make())
        return self._opened[-1]

    async def close(self):
        for store in self._opened:
            await store.close()

    async def run(self, request, owner=W1):
        """Accepts and places a request; the epoch."""
        await self.store.accept(request, QueueLimits())
        taken = await self.take(request.seq_id, 0, owner, TakeReason.QUEUED, "first")
        assert taken.status is TakeStatus.OK
        return taken.epoch

    async def take(self, seq_id, epoch, owner, reason=TakeReason.CONNECTION, take_id="t", **more):
        return await self.store.take_ownership(TakeRequest(seq_id, epoch, owner, take_id, reason, **more))

    async def crash(self, seq_id, epoch, to):
        """The owner at that epoch has begun to run the sequence and died, and another worker takes over."""
        await self.store.announce(seq_id, epoch, (await self.record(seq_id)).owner)
        return await self.take(seq_id, epoch, to, take_id=f"crash{epoch}")

    async def append(self, seq_id, epoch, first, tokens, owner=W1, branch=0, **more):
        [reply] = await self.store.append_batch(owner, [AppendItem(seq_id, epoch, branch, first, tokens, **more)])
        return reply

    async def record(self, seq_id):
        return (await self.store.read(seq_id)).record

    async def used_quota(self, tenant):
        """The tenant's streams that count, and what its bucket holds; None: there is none, so it is full."""
        if self.client is None:
            bucket = self.store.shared.buckets.buckets.get(tenant)
            return self.store.shared.num_streams(tenant), None if bucket is None else tuple(bucket)
        bucket = await self.client.get(f"octavo:spent:{tenant}")
        num_streams = await self.client.zcard(f"octavo:streams:{tenant}")
        return num_streams, None if bucket is None else tuple(int(number) for number in bucket.split())

    async def num_accounts(self, model):
        """How many accounts of tenants the queue has."""
        if self.client is None:
            return len(self.store.shared.fair_queues[model].accounts)
        fields = await self.client.hkeys(f"octavo:accounts:{model}")
        return sum(not field.startswith((b"all", b"n:")) for field in fields)

    async def kept_ms(self, seq_id):
        """For how long the parts of a sequence are kept from now on, in ms: the record, its journal and its notes."""
        if self.client is None:
            return {self.store.shared._entries[seq_id].expires_ms - self.clock.now_ms}
        key = codec.record_key(seq_id)
        return {await self.client.pttl(name) for name in (key, f"{key}:0", f"{key}:notes")}

    async def keys_for_ever(self):
        """What a server would never forget."""
        keys = await self.client.keys("*")
        return [key for key in keys if key != b"octavo:test-held" and await self.client.pttl(key) == -1]

    async def listening(self, router):
        """Returns when somebody hears that router's notices."""
        while not await self._is_heard(codec.notice_channel(router)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def _is_heard(self, channel):
        if self.client is None:
            *_, name = channel.split(":")
            return name in self.store.shared.subscribers.values() or name in self.store.shared.lifelines
        [(_, count)] = await self.client.pubsub_numsub(channel)
        return bool(count)

    @asynccontextmanager
    async def lifeline(self, worker):
        """Another process, that worker, lives inside, and the store knows it."""
        process, channel = self.another(), codec.lifeline_channel(worker)
        await process.open()
        held = asyncio.Event()
        holding = asyncio.create_task(process.hold_lifeline(worker, held.set))
        while not await self._is_heard(channel):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert held.is_set()
        yield
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        while await self._is_heard(channel):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def advance(self, ms):
        self.clock.now_ms += ms
        if self.client is not None:
            await self.client.set(CLOCK_KEY, self.clock.now_ms, ex=3600)

    async def restart(self):
        """As another server process would find the data; a real restart is tested in test_durability.py."""
        if self.client is None:
            self.store.shared.restart()
            return
        for key in await self.client.keys("octavo:gen"):
            generation, _, frozen = (await self.client.get(key)).split()
            await self.client.set(key, b"%s %s %s" % (generation, b"0" * 40, frozen), ex=3600)


def memory_bench():
    clock = Clock()
    state = MemoryState(lambda: clock.now_ms)
    return Bench(clock, MemoryStore(state), partial(MemoryStore, state))


async def redis_bench(url, user=""):
    """An empty store with hand-set time; with a user, calls of the library are made in its name."""
    patient = RedisOptions(connect_timeout_s=30, call_timeout_s=60)  # a test on a busy machine waits for its turn
    another = partial(RedisStore, url, patient, source=TEST_SOURCE)
    bench = Bench(Clock(), another(), another)
    await bench.client.flushall()
    await bench.client.function_flush()  # another test may have left the library with a clock of another kind
    await bench.advance(0)
    await bench.store.open()
    if user:
        bench._make = partial(RedisStore, url.replace("unix://", f"unix://{user}@"), patient, source=TEST_SOURCE)
        bench.store = bench.another()
        await bench.store.open()
    return bench


@pytest.fixture
def make_memory_bench():
    return memory_bench


@pytest.fixture
def make_redis_bench():
    return redis_bench


@pytest.fixture(params=["memory", "valkey", REDIS])
def store_url(request, servers):
    """The URL of the server; empty for memory. (Not async: a server is started outside the test's loop.)"""
    return "" if request.param == "memory" else servers(request.param).url


@pytest.fixture
async def bench(store_url):
    bench = await redis_bench(store_url) if store_url else memory_bench()
    yield bench
    await bench.close()


@pytest.fixture(params=["valkey", REDIS])
def server(request, servers):
    return servers(request.param)


@pytest.fixture
async def server_bench(server):
    """A bench on a server of either kind, for what only a server has."""
    bench = await redis_bench(server.url)
    yield bench
    await bench.close()


@pytest.fixture
def store(server_bench):
    return server_bench.store


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="session")
def new():
    """A small request; keyword arguments change it."""

    def make(name="a", **changes):
        fields = {
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
