"""Clients that leave at any moment, whatever the store does meanwhile, leave no request behind."""

import asyncio
import os
import random
from contextlib import AsyncExitStack

import pytest
from effort import draws
from live.cluster import Shape
from live.fixtures import whole

from octavo.request.ids import new_request_id
from octavo.v1 import admin_pb2, inference_pb2, inference_pb2_grpc
from octavo.wire.channel import open_channel

AT_ONCE = 8
NUM_CANCELS = int(os.environ.get("OCTAVO_TEST_CANCELS", draws(100, 10_000)))
PAUSE_S = 0.08  # of each caller, at most: about 170 calls a second, which a busy machine accepts as fast as they come
LATEST_S = 0.012  # by then `accept` is under way, or the first events have come
SHAPE = Shape(step_delay_ms=15, router_args=("--grace-ms", "1000"))
SETTLED_S = 1.0 + 2.0  # the grace, and time for the sweep


@pytest.fixture
def leaving(clusters):
    yield from whole(clusters(SHAPE))


@pytest.mark.scaled
@pytest.mark.night
@pytest.mark.timeout(3600)
async def test_no_request_outlives_a_client_that_left_while_it_was_accepted(leaving, seed):
    """By raw calls, without retries, of requests that would run for minutes."""
    rng, num_begun, num_cancelled = random.Random(seed), 0, 0

    async def leave_often(stubs):
        nonlocal num_begun, num_cancelled
        for _ in range(-(-NUM_CANCELS // AT_ONCE)):
            asked = {"raw_text": b"Hello", "sampling": {"max_tokens": 8000, "ignore_eos": True}}
            request = inference_pb2.GenerateRequest(request_id=new_request_id(), **asked)
            num_begun += 1
            call = stubs[num_begun % len(stubs)].Generate(request)
            reading = asyncio.create_task(call.read())
            await asyncio.wait([reading], timeout=rng.uniform(0.0, LATEST_S))
            num_cancelled += call.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await asyncio.sleep(rng.uniform(0.0, PAUSE_S))

    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(open_channel(endpoint)) for endpoint in leaving.endpoints]
        stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
        await asyncio.gather(*(leave_often(stubs) for _ in range(AT_ONCE)))
    await asyncio.sleep(SETTLED_S)
    alive = leaving.admin().ListSequences(admin_pb2.ListSequencesRequest(limit=10_000), timeout=30).sequences
    print(f"{num_begun} calls, {num_cancelled} cancelled; {len(alive)} alive {SETTLED_S} s later")
    assert not alive
    assert num_cancelled > 0.9 * num_begun
