"""A request that only one worker can hold outlives that worker, as others outlive theirs."""

import asyncio

import pytest
from live.cluster import Shape
from live.fixtures import whole
from live.history import History
from live.oracle import Oracle

from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.client import SamplingParams

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]

SMALL = ("--kv-cache-bytes", str(32 * WitnessRunner().info.bytes_per_block))
SHAPE = Shape(workers=2, routers=1, step_delay_ms=5, lease_ms=2000)
AWAY_S = 4.5  # longer than a lease: nothing is left of the worker then
PROMPT = list(range(1, 700))
GREEDY = SamplingParams(temperature=0, max_tokens=400)


@pytest.fixture
def cluster(clusters):
    """w0 is too small for the prompt; w1 is not."""
    for each in whole(clusters(SHAPE)):
        each.replace("w0", *SMALL)
        each.wait_ready()
        yield each
        each.replace("w0")


@pytest.mark.parametrize("how", ["killed", "paused"])
async def test_a_stream_waits_for_the_worker_that_can_hold_it(cluster, how):
    oracle = Oracle("witness")
    expected, history, later = oracle.outputs(PROMPT, GREEDY), History(), History()
    async with cluster.client() as client:
        async with asyncio.timeout(120):
            async for event in client.generate(PROMPT, GREEDY):
                history.add(event)
                if len(history.tokens[0]) == 16:
                    cluster.kill("w1") if how == "killed" else cluster.pause("w1")
                    bringing = asyncio.create_task(bring_back(cluster, how, client, later))
        history.check(expected)
        await bringing
        later.check(expected)


async def bring_back(cluster, how, client, later):
    """The worker is away for longer than its lease lasts. A new request waits for it, too."""
    bringing = asyncio.get_running_loop().call_later(AWAY_S, cluster.spawn if how == "killed" else cluster.resume, "w1")
    async for event in client.generate(PROMPT, GREEDY):
        later.add(event)
    assert bringing.when() < asyncio.get_running_loop().time(), "the small worker has run it"
