"""Clients that leave at any moment, whatever the store does meanwhile, leave no request behind."""

import asyncio
import os
import random

import pytest
from effort import draws
from live.cluster import Shape
from live.fixtures import whole

from octavo.request.ids import new_request_id
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from octavo.wire.channel import open_channel

AT_ONCE = 8
PAUSE_S = 0.08  # of each caller, at most: about 170 calls a second, which a busy machine accepts as fast as they come
LATEST_S = 0.012  # by then `accept` is under way, or the first events have come
SHAPE = Shape(step_delay_ms=15, router_args=("--grace-ms", "1000"))
SETTLED_S = 1.0 + 2.0  # the grace, and time for the sweep


@pytest.fixture
def leaving(clusters):
    """A cluster whose requests would run for minutes."""
    yield from whole(clusters(SHAPE))


@pytest.fixture
def num_cancels() -> int:
    return int(os.environ.get("OCTAVO_TEST_CANCELS", draws(100, 10_000)))


class Leavers:
    """Raw calls, without retries, that are broken off."""

    def __init__(self, cluster) -> None:
        self._channels = [open_channel(endpoint) for endpoint in [*cluster.endpoints, *cluster.admin_endpoints]]
        half = len(cluster.endpoints)
        self._stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels[:half]]
        self._admin = admin_pb2_grpc.AdminStub(self._channels[half])
        self.num_begun = 0
        self.num_cancelled = 0

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def call_for(self, seconds: float) -> None:
        """A request that would take minutes, left after that time."""
        number, self.num_begun = self.num_begun, self.num_begun + 1
        request = inference_pb2.GenerateRequest(raw_text=b"Hello", request_id=new_request_id())
        request.sampling.max_tokens = 8000
        request.sampling.ignore_eos = True
        call = self._stubs[number % len(self._stubs)].Generate(request)
        reading = asyncio.create_task(call.read())
        await asyncio.wait([reading], timeout=seconds)
        self.num_cancelled += call.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    async def alive(self) -> list[str]:
        """The requests that have not ended. Where the store does not answer, nobody knows."""
        listed = await self._admin.ListSequences(admin_pb2.ListSequencesRequest(limit=10_000), timeout=30)
        return [sequence.request_id for sequence in listed.sequences]


@pytest.fixture
async def leavers(leaving):
    made = Leavers(leaving)
    yield made
    await made.close()


@pytest.mark.scaled
@pytest.mark.night
@pytest.mark.timeout(3600)
async def test_no_request_outlives_a_client_that_left_while_it_was_accepted(leavers, num_cancels, seed):
    rng = random.Random(seed)

    async def leave_often(count: int) -> None:
        for _ in range(count):
            await leavers.call_for(rng.uniform(0.0, LATEST_S))
            await asyncio.sleep(rng.uniform(0.0, PAUSE_S))

    each = -(-num_cancels // AT_ONCE)
    await asyncio.gather(*(leave_often(each) for _ in range(AT_ONCE)))
    await asyncio.sleep(SETTLED_S)
    alive = await leavers.alive()
    print(f"{leavers.num_begun} calls, {leavers.num_cancelled} cancelled; {len(alive)} alive {SETTLED_S} s later")
    assert not alive
    assert leavers.num_cancelled > 0.9 * leavers.num_begun
