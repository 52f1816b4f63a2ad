"""A worker that is killed is known to be dead at once, however long its lease is."""

import random
from pathlib import Path

import pytest
from live.cluster import Shape
from live.fixtures import running
from live.oracle import Oracle
from live.reader import Reader

from octavo.client import SamplingParams

# A renewal would be missed after 200 s, and the test has ended by then.
SHAPE = Shape(routers=1, workers=2, step_delay_ms=10, lease_ms=600_000)
PARAMS = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)


@pytest.mark.timeout(150)
async def test_a_stream_goes_on_although_its_dead_owner_has_a_lease(
    tmp_path: Path, oracle: Oracle, rng: random.Random
) -> None:
    prompt = rng.choices(range(1, 900), k=50)
    with running(tmp_path / "cluster", SHAPE) as cluster:
        async with cluster.client() as client:
            reader = Reader(client.generate(prompt, PARAMS))
            await reader.until(100)
            (name,) = (name for name, worker in cluster.workers().items() if worker.load.num_running)
            cluster.kill(name)
            await reader.until(PARAMS.max_tokens, 60)
            await reader.task
        assert reader.tokens == {0: list(oracle.tokens(prompt, PARAMS.max_tokens))}
        cluster.revive()
