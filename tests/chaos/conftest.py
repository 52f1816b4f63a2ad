"""A cluster for faults, an endless supply of streams that check themselves, and the knobs of nightly runs."""

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from effort import draws
from live.cluster import Cluster, Shape
from live.fixtures import clusters, pytest_runtest_makereport, whole
from live.oracle import Expected, Oracle
from live.traffic import Traffic, read_history, varied_request

from octavo.client import SamplingParams

__all__ = ["clusters", "pytest_runtest_makereport"]

NUM_STREAMS = 8
BEAMS = SamplingParams(beam_width=3, n=2, max_tokens=30)
BEAMS_PROMPT = list(range(1, 50))


@pytest.fixture(scope="session")
def num_kills() -> int:
    """Processes to kill in one test: each kind once in `make test`, many in `make test-long`, hundreds a night."""
    return int(os.environ.get("OCTAVO_TEST_KILLS", draws(5, 40)))


@pytest.fixture(scope="session")
def seed() -> int:
    """Of the order and times of faults."""
    return int(os.environ.get("OCTAVO_TEST_SEED", "20261121"))


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle("witness")


@pytest.fixture
def cluster(clusters: Callable[[Shape], Cluster]) -> Iterator[Cluster]:
    """Two routers, two workers with the witness runner; streams take a second or two."""
    yield from whole(clusters(Shape(step_delay_ms=15)))


@pytest.fixture
async def traffic(cluster: Cluster, oracle: Oracle, seed: int) -> Any:
    """Streams of every kind under way, beams among them, which must say what they said undisturbed."""
    rng, beams = random.Random(seed), list[Expected]()

    def draw(number: int) -> tuple[list[int], SamplingParams, list[Expected]]:
        if number == 0 and rng.random() < 0.5:
            return BEAMS_PROMPT, BEAMS, beams
        prompt, params = varied_request(rng, oracle, number, rng.randrange(40, 110))
        return prompt, params, oracle.outputs(prompt, params)

    traffic = Traffic(cluster.client(), draw)
    first = await read_history(traffic.client.generate(BEAMS_PROMPT, BEAMS), 60)
    beams += [Expected(tuple(first.tokens[i]), first.texts[i], first.finishes[i]) for i in sorted(first.tokens)]
    traffic.begin(NUM_STREAMS)
    yield traffic
    await traffic.stop()
