"""Workers of one model and other bits: a stream goes on in its class of numerics while a worker of it is left."""

import asyncio

import pytest
from live.cluster import Cluster, Shape
from live.reader import Reader

from octavo.client import SamplingParams

CLASSES = {"w0": "cpu/a", "w1": "cpu/b", "w2": "cpu/a"}
ENDLESS = SamplingParams(temperature=0.0, max_tokens=20_000)


class MixedCluster(Cluster):
    """Each worker says that it is of its own class."""

    def _command(self, name: str) -> list[str]:
        more = ("--numerics", CLASSES[name]) if name in CLASSES else ()
        return [*super()._command(name), *more]

    def owner(self, incarnation: str) -> str:
        return next((name for name, worker in self.workers().items() if worker.incarnation == incarnation), "")


@pytest.fixture
def mixed(tmp_path):
    cluster = MixedCluster(tmp_path, Shape(routers=1, workers=3, step_delay_ms=10, lease_ms=1500))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


async def begun(cluster, client, numerics):
    """A stream that runs on a worker of that class."""
    for number in range(20):
        request_id = f"r{number}"
        reader = Reader(client.generate([number], ENDLESS, request_id=request_id))
        await reader.until(20)
        status = await client.get(request_id)
        if status.numerics == numerics:
            return reader, request_id, cluster.owner(status.owner)
        await client.cancel(request_id)
        await reader.task
    raise AssertionError(f"none of 20 streams ran on a worker of {numerics}")


async def test_a_stream_stays_in_its_class_while_one_is_left(mixed):
    assert {name: worker.numerics for name, worker in mixed.workers().items()} == CLASSES
    async with mixed.client() as client:
        reader, request_id, first = await begun(mixed, client, "cpu/a")
        (second,) = {"w0", "w2"} - {first}
        for victim, expected in ((first, (second, "cpu/a", 0)), (second, ("w1", "cpu/b", 1))):
            await asyncio.to_thread(mixed.kill, victim)
            await reader.until(reader.num_tokens + 20, timeout_s=40)
            status = await client.get(request_id)
            assert (mixed.owner(status.owner), status.numerics, status.numerics_changes) == expected
        [change] = [entry.detail for entry in status.timeline if entry.what == "numerics"]
        assert change == "cpu/a cpu/b"
        assert "goes on with other bits: cpu/b, after cpu/a" in mixed.processes["r0"].log.read_text()
        await client.cancel(request_id)
        await reader.task
