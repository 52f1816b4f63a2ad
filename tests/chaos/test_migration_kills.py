"""kill -9 of the source or the target at each step of a migration: the stream goes on with the right tokens."""

import asyncio
import random
import signal
import time
from collections.abc import Iterator

import grpc
import pytest
from effort import draws, patience
from live.client_loops import read_history
from live.cluster import ROOT, Cluster, Shape
from live.fixtures import running
from live.process import Process

from octavo.client import SamplingParams
from octavo.process.failpoints import NAMES
from octavo.v1 import admin_pb2

pytestmark = pytest.mark.long

# A warm-up would come to some of the places before any migration does.
SHAPE = Shape(routers=1, workers=2, step_delay_ms=8, lease_ms=2000, worker_args=("--warm-up-ms", "0"))
PARAMS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
PROMPT_TOKENS = 60
NUM_TRIES = 3
# Where the way to a place leads through another failure.
BEFORE = {
    "target.requeue": "target.admit=error",
    "target.aborted": "source.frozen=error",
    "source.aborting": "source.frozen=error",
    "source.aborted": "source.frozen=error",
}


@pytest.fixture
def two_workers(tmp_path) -> Iterator[Cluster]:
    with running(tmp_path, SHAPE) as cluster:
        yield cluster


def arm(cluster: Cluster, name: str) -> None:
    """Starts all workers anew, which die when they come to that place."""
    texts = ",".join([*filter(None, [BEFORE.get(name)]), f"{name}=kill"])
    for worker in cluster.worker_endpoints:
        if cluster.processes[worker].running:
            cluster.kill(worker)
        command = [*cluster._command(worker), "--failpoints", texts]
        cluster.processes[worker] = Process(worker, command, cluster.directory / f"{worker}.log", ROOT)
        cluster.spawn(worker)
    cluster.wait_ready()


def dead_workers(cluster: Cluster) -> list[str]:
    return [name for name in cluster.worker_endpoints if cluster.processes[name].exit_code == -signal.SIGKILL]


class Stream:
    """One stream that is moved again and again until a worker dies of it, and how long it once stood still."""

    def __init__(self, cluster: Cluster, prompt: list[int]) -> None:
        self.request_id = f"moved-{random.randbytes(6).hex()}"
        self.longest_s = 0.0
        self._cluster = cluster
        self._prompt = prompt
        self._first = asyncio.Event()
        self._last = 0.0

    async def run(self, expected: object) -> bool:
        """Whether a worker has died. The stream is whole in any case."""
        client = self._cluster.client()
        stream = client.generate(self._prompt, PARAMS, request_id=self.request_id)
        reading = asyncio.create_task(read_history(stream, patience(60), self._note_event))
        reading.add_done_callback(lambda _: self._first.set())
        await self._first.wait()
        while not reading.done() and not dead_workers(self._cluster):
            await asyncio.to_thread(self._migrate)
        (await reading).check(expected)
        await client.close()
        return bool(dead_workers(self._cluster))

    def _migrate(self) -> None:
        try:
            self._cluster.admin().Migrate(admin_pb2.MigrateRequest(request_id=self.request_id), timeout=10)
        except grpc.RpcError:
            time.sleep(0.02)  # it has died, or the sequence has ended or has just been taken

    def _note_event(self, _: object) -> None:
        now = time.monotonic()
        self.longest_s = max(self.longest_s, now - self._last) if self._last else 0.0
        self._last = now
        self._first.set()


@pytest.mark.scaled
@pytest.mark.night
@pytest.mark.timeout(3600)
async def test_a_worker_dies_at_each_step_of_a_migration(two_workers, oracle, seed):
    names = sorted(NAMES)
    random.Random(seed).shuffle(names)
    for name in names[: draws(1, len(names))]:
        await asyncio.to_thread(arm, two_workers, name)
        for attempt in range(NUM_TRIES):
            prompt = [attempt + 1 + n % 7 for n in range(PROMPT_TOKENS)]
            stream = Stream(two_workers, prompt)
            if await stream.run(oracle.outputs(prompt, PARAMS)):
                break
        assert dead_workers(two_workers), f"no migration came to {name}"
        print(f"{name}: {dead_workers(two_workers)} died; the stream stood still for {stream.longest_s:.1f} s at most")
        await asyncio.to_thread(two_workers.revive)
        await asyncio.to_thread(two_workers.wait_idle)
