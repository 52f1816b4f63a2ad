"""`octavo up` with a worker for prompts and one for outputs: streams go from one to the other, and say the same."""

import asyncio
import json
import sys

import pytest
from guard.processes import descendants, exists
from live.cluster import ROOT
from live.process import Process, wait_until
from live.reader import Reader
from waiting import until

from octavo.client import AsyncClient, FinishReason, SamplingParams
from octavo.v1 import admin_pb2, admin_pb2_grpc
from octavo.wire.channel import open_channel

NUM_STREAMS = 6
PROMPTS = [[number, *range(1, 400)] for number in range(NUM_STREAMS)]
LONG = SamplingParams(temperature=0, max_tokens=500)
OPTIONS = (
    *("--workers", 2, "--prefill-workers", 1, "--decode-workers", 1, "--grpc-port", 0),
    *("--runner", "witness", "--step-delay-ms", 10, "--max-batch-tokens", 128, "--lease-ms", 2000, "--json"),
)


class SplitUp:
    """A running `octavo up`, a client of it, and its Admin service."""

    def __init__(self, process):
        self.process = process
        self.state = json.loads(next(line for line in process.log.read_text().splitlines() if line.startswith("{")))
        self.router = self.state["routers"][0]
        self.pids = {worker["worker_id"]: worker["pid"] for worker in self.state["workers"]}

    def client(self):
        return AsyncClient([self.router["endpoint"]])

    async def until_met(self):
        """The router would place on both workers."""
        async with open_channel(self.router["admin_endpoint"]) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)

            async def met():
                workers = (await admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=10)).workers
                return sum(worker.available for worker in workers) == 2

            await until(met, 60)

    async def running(self):
        """The names of the owners of the sequences that are listed, and the epochs."""
        async with open_channel(self.router["admin_endpoint"]) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)
            workers = (await admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=10)).workers
            names = {worker.incarnation: worker.worker_id for worker in workers}
            listed = (await admin.ListSequences(admin_pb2.ListSequencesRequest(), timeout=10)).sequences
            return [(names.get(each.owner, ""), each.epoch) for each in listed if each.owner]

    async def until_running(self, condition):
        async def fulfilled():
            return condition(await self.running())

        await until(fulfilled, 60)


@pytest.fixture
def up(tmp_path):
    command = [sys.executable, "-m", "octavo.cli", "up", *map(str, OPTIONS), "--state-dir", str(tmp_path / "state")]
    process = Process("up", command, tmp_path / "up.log", ROOT)
    process.start()
    children = []
    try:
        wait_until(lambda: '"ready": true' in process.log.read_text(), 90, "octavo up is not ready")
        children = descendants(process.pid)
        yield SplitUp(process)
        children += descendants(process.pid)
    finally:
        process.stop()
    for pid in children:
        wait_until(lambda pid=pid: not exists(pid), 40, f"process {pid} is left")


async def check_end(readers, oracle):
    await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers)), 120)
    for prompt, reader in zip(PROMPTS, readers, strict=True):
        assert reader.tokens == {0: list(oracle.tokens(prompt, LONG.max_tokens))}
        assert reader.finish == {0: FinishReason.LENGTH}


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_each_stream_moves_once_and_says_the_same(up, oracle):
    await up.until_met()
    async with up.client() as client:
        readers = [Reader(client.generate(prompt, LONG)) for prompt in PROMPTS]
        await up.until_running(lambda found: len(found) == NUM_STREAMS and set(found) == {("worker-1", 2)})
        await asyncio.gather(*(reader.until(200, 60) for reader in readers))
        assert set(await up.running()) <= {("worker-1", 2)}
        await check_end(readers, oracle)
        assert not any(reader.stream.num_reattaches for reader in readers)
