"""A new worker has the prefixes of the others before it serves, and starts in time whatever they do."""

import asyncio
import time

import pytest
from prefixes import PREFIX, PROMPT, SIZE, compute, lets_go
from worker_pair import PairedWorker, WorkerPair, worker_pair

from octavo.process import failpoints
from octavo.request import hashing


async def join(pair: WorkerPair, **settings: object) -> PairedWorker:
    return await pair.add("new", warms_up=True, **settings)


async def test_the_first_request_of_a_warm_worker_computes_only_its_end() -> None:
    async with worker_pair() as pair:
        await compute(pair, pair.a, PROMPT)
        new = await join(pair)
        cached = await compute(pair, new, (*PREFIX, 90, 91))
        assert cached == len(PREFIX)
        await lets_go(pair)


async def test_the_blocks_of_several_workers_come_and_half_of_the_device_stays_free() -> None:
    async with worker_pair() as pair:
        prompts = [tuple(range(first, first + 40)) for first in (1, 101, 201, 301)]
        for number, prompt in enumerate(prompts):
            await compute(pair, (pair.a, pair.b)[number % 2], prompt)
        new = await join(pair, num_blocks=44)
        assert 0 < new.worker.fetcher.num_fetched <= 22
        assert [await compute(pair, new, prompt) for prompt in prompts[2:]] == [36, 36], "what each of them ran last"
        await lets_go(pair)


@pytest.mark.parametrize("action", ["hang", "error"])
async def test_others_that_fail_do_not_keep_a_worker_from_starting(action: str) -> None:
    async with worker_pair() as pair:
        await compute(pair, pair.a, PROMPT)
        armed = failpoints.arm("source.pinned", action)
        began = time.monotonic()
        new = await join(pair, warm_up_ms=600)
        assert armed.reached.is_set()
        assert time.monotonic() - began < 8.0
        cached = await compute(pair, new, PROMPT)
        assert cached == 0
        await lets_go(pair)


async def test_the_hottest_blocks_come_first_and_each_before_those_behind_it() -> None:
    async with worker_pair() as pair:
        await compute(pair, pair.a, tuple(range(300, 340)))
        await compute(pair, pair.a, PROMPT)
        client = pair.a.worker.supplier._blocks
        hashes = await client.hottest_blocks(100)
        info = pair.a.runner.info
        own = hashing.block_hashes(hashing.root_key(info.fingerprint, info.layout), PREFIX, SIZE)
        assert [each for each in hashes if each in own] == own
        assert hashes.index(own[0]) < SIZE, "the prompt that ran last stands before the older one"
        assert await client.hottest_blocks(3) == hashes[:3]


async def test_a_worker_that_is_asked_to_end_while_it_warms_up_ends() -> None:
    async with worker_pair() as pair:
        await compute(pair, pair.a, PROMPT)
        armed = failpoints.arm("source.pinned", "hang")
        new = PairedWorker("new", pair.store, warms_up=True)
        starting = asyncio.create_task(new.start())
        await armed.reached.wait()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await new.worker.leave(asyncio.Event())
        assert await new.worker.stop()
        assert not new.worker.workload.tables.device.num_reserved
        await lets_go(pair)
