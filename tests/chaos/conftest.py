"""A cluster for faults, an endless supply of streams that check themselves, and the knobs of nightly runs."""

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from effort import draws, patience
from live.client_loops import ClientLoops, read_history, varied_request
from live.cluster import Cluster, Shape
from live.fixtures import clusters, pytest_runtest_makereport, whole
from live.history import History
from live.oracle import Expected, Oracle

from octavo.client import SamplingParams

__all__ = ["clusters", "pytest_runtest_makereport"]

NUM_STREAMS = 8
STREAM_S = 60.0
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


class Traffic(ClientLoops):
    """NUM_STREAMS clients, each with one stream after the other of every kind, until `stop`. A wrong token is an
    error, and so is a stream that takes longer than STREAM_S, or longer still on a machine that is busy."""

    def __init__(self, cluster: Cluster, oracle: Oracle, seed: int) -> None:
        super().__init__(cluster.client())
        self.num_streams = 0
        self.num_reattaches = 0
        self._oracle = oracle
        self._random = random.Random(seed)
        self._beams: list[Expected] = []

    async def start(self) -> None:
        history = await self._run(BEAMS_PROMPT, BEAMS)
        for branch in sorted(history.tokens):
            tokens, text = tuple(history.tokens[branch]), history.texts[branch]
            self._beams.append(Expected(tokens, text, history.finishes[branch]))
        self.begin(NUM_STREAMS)

    async def stream_once(self, number: int) -> None:
        if number == 0 and self._random.random() < 0.5:
            prompt, params, expected = BEAMS_PROMPT, BEAMS, self._beams
        else:
            prompt, params = varied_request(self._random, self._oracle, number, self._random.randrange(40, 110))
            expected = self._oracle.outputs(prompt, params)
        history = await self._run(prompt, params)
        history.check(expected)
        self.num_streams += 1

    async def _run(self, prompt: list[int], params: SamplingParams) -> History:
        stream = self.client.generate(prompt, params)
        history = await read_history(stream, patience(STREAM_S))
        self.num_reattaches += stream.num_reattaches
        return history


@pytest.fixture
async def traffic(cluster: Cluster, oracle: Oracle, seed: int) -> Any:
    """Streams under way."""
    traffic = Traffic(cluster, oracle, seed)
    await traffic.start()
    yield traffic
    await traffic.stop()
