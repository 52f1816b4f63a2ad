"""A worker with 64 sequences drains: they go to the others with their blocks, soon, and their streams go on."""

import asyncio
import time
from collections.abc import Iterator

import pytest
from effort import draws, patience
from live.client_loops import read_history
from live.cluster import Cluster, Shape
from live.fixtures import running
from live.history import History

from octavo.client import AsyncClient, SamplingParams
from octavo.v1 import admin_pb2, admin_pb2_grpc
from octavo.wire.channel import open_channel

pytestmark = pytest.mark.long

NUM_SEQUENCES = 64
BAR_S = 10.0  # on a machine that has nothing else to do
NUM_TOKENS = {"witness": 500, "model": 250}  # of each stream; few end before they have moved
BEFORE = 40  # tokens of each stream before the drain: two full blocks of output and more
LOADED = {
    "witness": Shape(routers=1, workers=3, step_delay_ms=30, worker_args=("--max-batch-sequences", "128")),
    "model": Shape(
        routers=1,
        workers=2,
        runner="model",
        step_delay_ms=0,
        lease_ms=5000,
        worker_args=("--model", "smollm2", "--device", "cpu", "--dtype", "float32", "--threads", "1"),
    ),
}


@pytest.fixture(params=["witness", pytest.param("model", marks=pytest.mark.long)])
def cell(request, tmp_path) -> Iterator[Cluster]:
    with running(tmp_path, LOADED[request.param]) as cluster:
        yield cluster


async def drain(admin: admin_pb2_grpc.AdminStub, name: str, *, undo: bool = False) -> admin_pb2.DrainWorkerResponse:
    """The last progress of a drain, or of its end."""
    call = admin.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id=name, undo=undo, grace_ms=120_000))
    return [progress async for progress in call][-1]


class Streams:
    """Streams of different prompts, and the longest silence of each while they are timed."""

    def __init__(self, client: AsyncClient, count: int, params: SamplingParams) -> None:
        self.params = params
        self.prompts = [[1 + number % 900, *range(2, 30)] for number in range(count)]
        self.counts, self.last, self.longest = [0] * count, [0.0] * count, [0.0] * count
        self.timed = False
        self.readings = [asyncio.create_task(self._read(client, number)) for number in range(count)]

    async def _read(self, client: AsyncClient, number: int) -> History:
        def note(event) -> None:
            now = time.monotonic()
            self.counts[number] += len(event.token_ids)
            if self.timed and self.last[number]:
                self.longest[number] = max(self.longest[number], now - self.last[number])
            self.last[number] = now

        return await read_history(client.generate(self.prompts[number], self.params), patience(240), note)

    async def until(self, num_tokens: int) -> None:
        async with asyncio.timeout(patience(240)):
            while min(self.counts) < num_tokens:
                for reading in self.readings:
                    if reading.done():
                        await reading
                await asyncio.sleep(0.05)


@pytest.mark.scaled
@pytest.mark.timeout(900)
async def test_a_worker_with_64_sequences_is_soon_empty_and_they_move_with_their_blocks(cell, oracle):
    """64 sequences in `make test-long`, 16 in `make test`."""
    count = draws(16, NUM_SEQUENCES)
    victim, *others = cell.worker_endpoints
    runner = cell.shape.runner
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS[runner], ignore_eos=True)
    async with cell.client() as client, open_channel(cell.admin_endpoints[0]) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        for other in others:
            await drain(admin, other)
        streams = Streams(client, count, params)
        await streams.until(BEFORE)
        for other in others:
            await drain(admin, other, undo=True)
        await asyncio.to_thread(cell.wait_ready)
        streams.timed, began = True, time.monotonic()
        progress = await drain(admin, victim)
        took = time.monotonic() - began
        num_ended = sum(reading.done() for reading in streams.readings)
        await streams.until(min(max(streams.counts) + 10, NUM_TOKENS[runner]))
        streams.timed = False
        silences = sorted(streams.longest)
        print(
            f"{count} sequences left in {took:.2f} s: {progress.num_migrated} moved, "
            f"{progress.num_released} released, {num_ended} ended;"
            f" longest silence p50 {silences[count // 2]:.2f} s, most {silences[-1]:.2f} s"
        )
        assert progress.num_left == 0
        assert progress.num_released == 0
        assert count - num_ended <= progress.num_migrated <= count
        assert progress.num_migrated > count / 2
        assert took <= patience(2 * BAR_S)
        await drain(admin, victim, undo=True)
        for number, reading in enumerate(streams.readings):
            history = await reading
            if runner == "witness":
                history.check(oracle.outputs(streams.prompts[number], params))
    await asyncio.to_thread(cell.wait_idle)
