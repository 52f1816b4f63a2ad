"""Beam searches whose workers die: a search is in no journal before its end, so each worker begins it again."""

import asyncio

import pytest
from live.cluster import Cluster, Shape
from live.fixtures import whole
from live.process import wait_until

from octavo.client import SamplingParams
from octavo.v1 import inference_pb2

pytestmark = pytest.mark.long

SHAPE = Shape(workers=3, routers=1, step_delay_ms=5, lease_ms=2000)
BEAMS = SamplingParams(beam_width=3, n=2, max_tokens=150)
PROMPT = list(range(1, 50))
NUM_KILLS = 3  # so many in a row would be poison


@pytest.fixture
def cluster(clusters):
    yield from whole(clusters(SHAPE))


def kill_owner(cluster: Cluster, request_id: str) -> None:
    """Kills the worker of a search once it has computed more than sixteen tokens, and starts it again."""

    def status() -> inference_pb2.GetResponse:
        return cluster.inference().Get(inference_pb2.GetRequest(request_id=request_id), timeout=10)

    def owner() -> str:
        names = {worker.incarnation: name for name, worker in cluster.workers().items()}
        found = status()
        running = found.state == inference_pb2.REQUEST_STATE_RUNNING
        return names.get(found.owner, "") if running else ""

    wait_until(lambda: owner() != "", 30, "nobody runs the search")
    name = owner()
    before = cluster.load(name).num_steps
    wait_until(lambda: cluster.load(name).num_steps > before + 40, 30, "the search does not go on")
    assert owner() == name, "the search has ended, or moved"
    cluster.kill(name)
    cluster.spawn(name)


@pytest.mark.timeout(180)
async def test_beams_outlive_workers_that_die_in_a_row(cluster):
    async with cluster.client() as client:
        expected = await client.complete(PROMPT, BEAMS)
        answer = asyncio.create_task(client.complete(PROMPT, BEAMS, request_id="searched again and again"))
        for _ in range(NUM_KILLS):
            await asyncio.to_thread(kill_owner, cluster, "searched again and again")
        async with asyncio.timeout(60):
            assert (await answer).outputs == expected.outputs
