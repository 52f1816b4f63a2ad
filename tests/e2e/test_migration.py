"""Live migration as clients, operators and grpcurl see it: a stream goes on elsewhere, and says the same."""

import asyncio
import itertools
from contextlib import asynccontextmanager

import pytest
from live.cluster import Shape
from live.fixtures import whole
from live.grpcurl import grpcurl, objects
from live.reader import Reader

from octavo.client import FinishReason, SamplingParams
from octavo.v1 import admin_pb2
from octavo.wire import statuses

BLOCK_SIZE = 16
PROMPT = list(range(200, 300))
LONG = SamplingParams(temperature=0, max_tokens=1500)
NUMBERS = itertools.count()  # clusters live on: a request id is used once

EVENING = Shape(routers=2, workers=2, step_delay_ms=25, router_args=("--rebalance",))


@pytest.fixture
def prompt():
    """One that no test had before, so that no worker has a block of it in its cache."""
    return [next(NUMBERS), *PROMPT]


@pytest.fixture
def evening(clusters):
    """Routers that even the load of two workers."""
    yield from whole(clusters(EVENING))


class Mover:
    """Calls Admin.Migrate of a cluster for one request, and knows where it runs."""

    def __init__(self, cluster, request_id):
        self.cluster, self.request_id = cluster, request_id

    def _status(self):
        listed = self.cluster.admin().ListSequences(admin_pb2.ListSequencesRequest(), timeout=10).sequences
        found = [each for each in listed if each.request_id == self.request_id]
        if not found:
            raise LookupError(f"{self.request_id} is not listed")
        return found[0]

    async def status(self):
        return await asyncio.to_thread(self._status)

    async def owner(self):
        """The name of the worker that runs it."""
        owner = (await self.status()).owner
        workers = await asyncio.to_thread(self.cluster.workers)
        return next(name for name, worker in workers.items() if worker.incarnation == owner)

    async def __call__(self, to="", router=0):
        request = admin_pb2.MigrateRequest(request_id=self.request_id, worker_id=to)
        with statuses.serving_errors():
            return await asyncio.to_thread(self.cluster.admin(router).Migrate, request, timeout=30)


async def test_a_stream_moves_and_says_the_same(cluster, client, oracle, prompt):
    reader = Reader(client.generate(prompt, LONG, request_id="moves"))
    await reader.until(60)
    migrate = Mover(cluster, "moves")
    source = await migrate.owner()
    moved = await migrate()
    assert (moved.epoch, moved.worker_id) == (2, await migrate.owner())
    assert moved.worker_id != source
    assert moved.num_blocks >= (len(prompt) + 60) // BLOCK_SIZE - 1
    assert 0 < moved.num_sent_blocks <= moved.num_blocks
    assert moved.num_sent_bytes > 0
    assert 0 < moved.stopped_ms <= moved.total_ms
    here, there = await asyncio.to_thread(lambda: [cluster.load(name) for name in (source, moved.worker_id)])
    assert (here.num_sequences, here.num_used_blocks) == (0, 0)
    assert there.num_sequences == 1
    await asyncio.wait_for(reader.task, 60)
    assert reader.tokens == {0: list(oracle.tokens(prompt, LONG.max_tokens))}
    assert reader.finish == {0: FinishReason.LENGTH}
    assert reader.stream.num_reattaches == 0


async def test_grpcurl_moves_a_stream_and_prints_its_progress(cluster, client, oracle, prompt):
    reader = Reader(client.generate(prompt, LONG, request_id="by hand"))
    await reader.until(40)
    migrate = Mover(cluster, "by hand")
    status, source = await migrate.status(), await migrate.owner()
    workers = await asyncio.to_thread(cluster.workers)
    (target,) = (name for name in workers if name != source)
    names = {"seq_id": status.seq_id, "epoch": status.epoch}
    endpoint, method = cluster.worker_endpoints[source], "octavo.internal.v1.Worker/Migrate"

    def call(ok=True, **data):
        return grpcurl(endpoint, method, data={**names, **data}, ok=ok)

    assert "FailedPrecondition" in await asyncio.to_thread(call, ok=False, epoch=7)
    printed = objects(await asyncio.to_thread(call, target=workers[target].incarnation))
    assert printed[-1]["outcome"] == "MIGRATION_OUTCOME_MOVED"
    assert all("outcome" not in each for each in printed[:-1])
    assert int(printed[-1]["epoch"]) == 2
    assert printed[-1]["num_sent_blocks"] > 0
    again = objects(await asyncio.to_thread(call))
    assert again[-1] == printed[-1]  # a late repetition is told what became of it
    await asyncio.wait_for(reader.task, 60)
    assert reader.tokens == {0: list(oracle.tokens(prompt, LONG.max_tokens))}


async def test_a_drain_moves_the_streams_of_its_worker(cluster, oracle):
    params = LONG
    async with cluster.client() as client:
        prompts = [[next(NUMBERS), *PROMPT] for _ in range(9)]
        readers = [Reader(client.generate(prompt, params)) for prompt in prompts]
        await asyncio.gather(*(reader.until(20, 60) for reader in readers))
        busy = max(cluster.worker_endpoints, key=lambda name: cluster.load(name).num_sequences)
        num_here = cluster.load(busy).num_sequences
        assert num_here >= 3
        progress = await drain(cluster, busy)
        assert (progress[-1].num_left, progress[-1].num_released) == (0, 0)
        assert progress[-1].num_migrated == num_here
        await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers)), 120)
        for prompt, reader in zip(prompts, readers, strict=True):
            assert reader.tokens == {0: list(oracle.tokens(prompt, params.max_tokens))}
            assert reader.stream.num_reattaches == 0
        await drain(cluster, busy, undo=True)


async def drain(cluster, name, undo=False):
    """Drains a worker, or ends that; its progress."""
    request = admin_pb2.DrainWorkerRequest(worker_id=name, grace_ms=30_000, undo=undo)
    return await asyncio.to_thread(lambda: list(cluster.admin().DrainWorker(request, timeout=60)))


@asynccontextmanager
async def load_on(cluster, oracle, count=6, max_tokens=900):
    """The request ids and streams that run meanwhile, and that have got all of their tokens, each once, in the end."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    async with cluster.client() as client:
        prompts = [[next(NUMBERS), *PROMPT] for _ in range(count)]
        ids = [f"load-{next(NUMBERS)}" for _ in prompts]
        readers = [Reader(client.generate(p, params, request_id=id)) for id, p in zip(ids, prompts, strict=True)]
        await asyncio.gather(*(reader.until(30, 60) for reader in readers))
        yield ids, readers
        await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers)), 180)
        for prompt, reader in zip(prompts, readers, strict=True):
            assert reader.tokens == {0: list(oracle.tokens(prompt, max_tokens))}


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_router_that_is_told_to_evens_the_load(evening, oracle):
    """All streams begin on one worker, and some go on on the other one: one after the other, since pairs rest."""
    await drain(evening, "w1")
    async with load_on(evening, oracle, count=10, max_tokens=2500) as (_, readers):
        assert (await asyncio.to_thread(evening.load, "w0")).num_sequences == 10
        await drain(evening, "w1", undo=True)
        async with asyncio.timeout(100):
            while (await asyncio.to_thread(evening.load, "w1")).num_sequences < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        assert not any(reader.task.done() for reader in readers)
