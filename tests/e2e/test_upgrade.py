"""Two releases side by side: routers and workers of the last release are replaced by those of this one, and back, under
live streams. What the last release is here says tests/support/last_release.py; docs/deployment.md has the order."""

import asyncio
import sys
from pathlib import Path

import grpc
import last_release
import pytest
from live.client_loops import ClientLoops, read_history
from live.cluster import ROOT, Cluster, Shape
from live.process import Process, wait_until
from live.reader import Reader

from octavo.client import SamplingParams
from octavo.errors import Unimplemented
from octavo.store import library, open_store
from octavo.v1 import admin_pb2

PROGRAM = str(Path(last_release.__file__))
PROGRAMS = {"router": "router", "gpu_worker": "worker"}
STREAM_S = 90.0
SHAPE = Shape(step_delay_ms=10, router_args=("--drain-ms", "1500"), worker_args=("--drain-ms", "5000"))


class MixedCluster(Cluster):
    """Processes of two releases. All begin as those of the last one."""

    def __init__(self, directory: Path, shape: Shape) -> None:
        super().__init__(directory, shape)
        self.of_this_release: set[str] = set()

    def _command(self, name: str) -> list[str]:
        python, _, module, *arguments = super()._command(name)
        if name in self.of_this_release:
            return [python, "-m", module, *arguments]
        return [sys.executable, PROGRAM, PROGRAMS[module], *arguments]

    def upgrade(self, name: str) -> None:
        """SIGTERM to a process of the last release; one of this release takes its place."""
        self.of_this_release.add(name)
        self.replace(name)

    def downgrade(self, name: str) -> None:
        self.of_this_release.remove(name)
        self.replace(name)

    def refusal(self, router: int, worker: str) -> str:
        """Why a router does not use a worker."""
        found = self.workers(router).get(worker)
        return found.reason if found else ""

    def uses(self, router: int, worker: str) -> bool:
        found = self.workers(router).get(worker)
        return found is not None and found.available

    async def library_revision(self) -> int:
        store = open_store(self.store.url)
        try:
            return int(await store.server.client.fcall("octavo1_revision", 0))
        finally:
            await store.close()


class ShortStreams(ClientLoops):
    """Clients with one short stream after the other; each must say what the oracle says."""

    def __init__(self, cluster: Cluster, oracle) -> None:
        super().__init__(cluster.client())
        self._oracle, self.num_streams = oracle, 0

    async def stream_once(self, number: int) -> None:
        self.num_streams += 1
        prompt, params = [number + 1, self.num_streams], SamplingParams(temperature=0.0, max_tokens=60)
        history = await read_history(self.client.generate(prompt, params), STREAM_S)
        history.check(self._oracle.outputs(prompt, params))


@pytest.fixture
def mixed(tmp_path):
    cluster = MixedCluster(tmp_path, SHAPE)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_a_deployment_is_upgraded_and_put_back_under_live_streams(mixed, oracle):
    assert await mixed.library_revision() == last_release.REVISION
    streams = ShortStreams(mixed, oracle)
    streams.begin(3)
    num_tokens = 20_000  # more than it gets: it lives through everything, and is cancelled
    async with mixed.client() as client:
        reader = Reader(client.generate([7, 8, 9], SamplingParams(temperature=0.0, max_tokens=num_tokens)))
        for step, names in ((mixed.upgrade, ("r0", "r1", "w0", "w1")), (mixed.downgrade, ("w0", "w1", "r1", "r0"))):
            for name in names:
                await reader.until(reader.num_tokens + 30, timeout_s=60)
                await asyncio.to_thread(step, name)
                await asyncio.to_thread(mixed.wait_ready)
                streams.check()
                assert await mixed.library_revision() == library.REVISION
            begun = streams.num_streams
            while streams.num_streams < begun + 6:
                streams.check()
                await asyncio.sleep(0.05)
        await reader.until(reader.num_tokens + 30, timeout_s=60)
        tokens = list(reader.tokens[0])
        reader.task.cancel()
        await asyncio.gather(reader.task, return_exceptions=True)
    await streams.stop()
    assert tokens == oracle.tokens([7, 8, 9], len(tokens))


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_what_each_mix_of_two_releases_does(mixed, oracle):
    """The last release at r0, w0 and w1; then r1 and w1 are upgraded."""
    await asyncio.to_thread(mixed.upgrade, "r1")
    await asyncio.to_thread(mixed.wait_ready)
    prompt, params = [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=200)
    for router in (0, 1):
        async with mixed.client([router]) as client:
            history = await read_history(client.generate(prompt, params), STREAM_S)
            history.check(oracle.outputs(prompt, params))
    async with mixed.client([1]) as client:
        reader = Reader(client.generate([4], SamplingParams(temperature=0.0, max_tokens=2000), request_id="stays"))
        await reader.until(5)
        with pytest.raises(grpc.RpcError) as raised:
            mixed.admin(1).Migrate(admin_pb2.MigrateRequest(request_id="stays"), timeout=20)
        assert raised.value.code().name == Unimplemented.code.name
        await client.cancel("stays")
        await asyncio.gather(reader.task, return_exceptions=True)

    await asyncio.to_thread(mixed.upgrade, "w1")
    wait_until(lambda: mixed.refusal(0, "w1"), 60, "the last router does not meet the worker of this release")
    wait_until(lambda: mixed.uses(1, "w1"), 60, "the router does not use the worker of its release")
    assert mixed.refusal(0, "w1").startswith("speaks internal revision 3, this router 2")
    assert mixed.uses(1, "w0")
    for router in (0, 1):
        async with mixed.client([router]) as client:
            history = await read_history(client.generate([router, 5], params), STREAM_S)
            history.check(oracle.outputs([router, 5], params))


def test_a_program_that_the_library_does_not_serve_ends_and_says_so(tmp_path):
    text = library.source()
    for old, new in (
        (f"local REVISION = {library.REVISION}\n", f"local REVISION = {library.REVISION + 2}\n"),
        (f"local SERVES = {library.SERVES}\n", f"local SERVES = {library.REVISION + 1}\n"),
    ):
        assert old in text
        text = text.replace(old, new)
    cluster = Cluster(tmp_path, Shape(routers=1, workers=1))
    cluster.store.start()
    try:
        asyncio.run(load(cluster.store.url, text))
        for name in ("r0", "w0"):
            process = Process(name, cluster._command(name), tmp_path / f"{name}.log", ROOT)
            process.start()
            wait_until(lambda process=process: not process.running, 60, f"{name} does not end")
            assert process.exit_code == 1, process.tail()
            assert f"serves programs from revision {library.REVISION + 1} on" in process.tail()
    finally:
        cluster.store.stop()


async def load(url: str, text: str) -> None:
    store = open_store(url)
    await store.server.client.function_load(text, replace=True)
    await store.close()
