"""Migration and Swap of live streams, as operators and grpcurl ask for them: each says what it would have said."""

import asyncio
import itertools

import pytest
from live.cluster import Shape
from live.fixtures import whole
from live.grpcurl import grpcurl, objects
from live.reader import Reader

from octavo.client import FinishReason, SamplingParams

BLOCK_SIZE = 16
PROMPT = list(range(200, 300))
LONG = SamplingParams(temperature=0, max_tokens=1500)
NUMBERS = itertools.count()  # clusters live on: a request id is used once
aside = asyncio.to_thread


def new_streams(client, count, params=LONG):
    """Prompts that no test had before, so that no worker has a block of them in its cache; and their readers by id."""
    prompts = {f"moves-{number}": [number, *PROMPT] for number in itertools.islice(NUMBERS, count)}
    return prompts, {id: Reader(client.generate(p, params, request_id=id)) for id, p in prompts.items()}


async def check_ends(oracle, prompts, readers, max_tokens=LONG.max_tokens):
    await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers.values())), 180)
    for id, prompt in prompts.items():
        assert readers[id].tokens == {0: list(oracle.tokens(prompt, max_tokens))}
        assert readers[id].finish == {0: FinishReason.LENGTH}
        assert readers[id].stream.num_reattaches == 0


async def test_a_stream_moves_by_hand_and_by_an_operator(cluster, client, oracle):
    """By grpcurl, which prints the progress, and back by Admin, which tells what it took."""
    prompts, readers = new_streams(client, 1)
    [(id, reader)] = readers.items()
    await reader.until(40)
    status, source = (await aside(cluster.sequences))[id], await aside(cluster.owner, id)
    workers = await aside(cluster.workers)
    (target,) = (name for name in workers if name != source)
    names = {"seq_id": status.seq_id, "epoch": status.epoch}
    endpoint, method = cluster.worker_endpoints[source], "octavo.internal.v1.Worker/Migrate"

    def call(ok=True, **data):
        return grpcurl(endpoint, method, data={**names, **data}, ok=ok)

    assert "FailedPrecondition" in await aside(call, ok=False, epoch=7)
    printed = objects(await aside(call, target=workers[target].incarnation))
    assert (printed[-1]["outcome"], int(printed[-1]["epoch"])) == ("MIGRATION_OUTCOME_MOVED", 2)
    assert all("outcome" not in each for each in printed[:-1])
    assert printed[-1]["num_sent_blocks"] > 0
    again = objects(await aside(call))
    assert again[-1] == printed[-1]  # a late repetition is told what became of it
    moved = await aside(cluster.migrate, id)
    assert (moved.epoch, moved.worker_id, await aside(cluster.owner, id)) == (3, source, source)
    assert moved.num_blocks >= (len(prompts[id]) + 40) // BLOCK_SIZE - 1
    assert 0 < moved.num_sent_blocks <= moved.num_blocks and moved.num_sent_bytes > 0
    assert 0 < moved.stopped_ms <= moved.total_ms
    here, there = await aside(lambda: [cluster.load(name) for name in (target, source)])
    assert (here.num_sequences, here.num_used_blocks, there.num_sequences) == (0, 0, 1)
    await check_ends(oracle, prompts, readers)


async def test_a_stream_pauses_and_goes_on(cluster, client, oracle):
    prompts, readers = new_streams(client, 1)
    [(id, reader)] = readers.items()
    await reader.until(20)
    num_out = await aside(cluster.swap, id, "OUT")
    assert num_out >= 3
    assert await aside(cluster.swap, id, "OUT") == 0, "out already"
    await asyncio.sleep(0.5)  # the tokens from before are here by now
    num_tokens = reader.num_tokens
    await asyncio.sleep(4.0)  # longer than a preempted sequence is kept from its blocks
    assert reader.num_tokens == num_tokens < LONG.max_tokens, "it came back by itself"
    loads = [cluster.load(name) for name in cluster.worker_endpoints]
    assert (sum(load.num_swapped for load in loads), sum(load.num_used_blocks for load in loads)) == (1, 0)
    assert await aside(cluster.swap, id, "IN") == num_out
    await reader.until(num_tokens + 20)
    assert await aside(cluster.swap, id, "DROP") > num_out
    await check_ends(oracle, prompts, readers)


async def test_a_drain_moves_the_streams_of_its_worker(cluster, client, oracle):
    prompts, readers = new_streams(client, 9)
    await asyncio.gather(*(reader.until(20, 60) for reader in readers.values()))
    busy = max(cluster.worker_endpoints, key=lambda name: cluster.load(name).num_sequences)
    num_here = cluster.load(busy).num_sequences
    assert num_here >= 3
    last = (await aside(cluster.drain, busy))[-1]
    assert (last.num_left, last.num_released, last.num_migrated) == (0, 0, num_here)
    await check_ends(oracle, prompts, readers)
    cluster.drain(busy, undo=True)


@pytest.fixture
def evening(clusters):
    """Routers that even the load of two workers."""
    yield from whole(clusters(Shape(step_delay_ms=25, router_args=("--rebalance",))))


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_router_that_is_told_to_evens_the_load(evening, oracle):
    """All streams begin on one worker, and some go on on the other one: one after the other, since pairs rest."""
    await aside(evening.drain, "w1")
    async with evening.client() as client:
        prompts, readers = new_streams(client, 10, SamplingParams(temperature=0, max_tokens=2500))
        await asyncio.gather(*(reader.until(30, 60) for reader in readers.values()))
        assert evening.load("w0").num_sequences == 10
        await aside(lambda: evening.drain("w1", undo=True))
        async with asyncio.timeout(100):
            while (await aside(evening.load, "w1")).num_sequences < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        assert not any(reader.task.done() for reader in readers.values())
        await check_ends(oracle, prompts, readers, 2500)


@pytest.fixture
def by_role(clusters):
    """A worker for prompts and one for outputs."""
    shape = Shape(routers=1, step_delay_ms=10, each_worker=(("--role", "prefill"), ("--role", "decode")))
    yield from whole(clusters(shape))


@pytest.mark.long
async def test_each_stream_moves_once_from_a_worker_for_prompts_to_one_for_outputs(by_role, oracle):
    async with by_role.client() as client:
        prompts, readers = new_streams(client, 6)
        await asyncio.gather(*(reader.until(200, 60) for reader in readers.values()))
        owner = by_role.workers()["w1"].incarnation
        assert {(each.owner, each.epoch) for each in by_role.sequences().values()} == {(owner, 2)}
        await check_ends(oracle, prompts, readers)
