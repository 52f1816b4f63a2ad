"""A cluster for faults, an endless supply of streams that check themselves, and the knobs of nightly runs."""

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from effort import draws, patience
from live.cluster import Cluster, Shape
from live.fixtures import clusters, pytest_runtest_makereport, whole
from live.history import History
from live.oracle import Expected, Oracle, text_of

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


class Traffic:
    """NUM_STREAMS clients, each with one stream after the other of every kind, until `stop`. A wrong token is an
    error, and so is a stream that takes longer than STREAM_S, or longer still on a machine that is busy."""

    def __init__(self, cluster: Cluster, oracle: Oracle, seed: int) -> None:
        self.num_streams = 0
        self.num_reattaches = 0
        self._client = cluster.client()
        self._oracle = oracle
        self._random = random.Random(seed)
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._beams: list[Expected] = []

    async def start(self) -> None:
        history = await self._run(BEAMS_PROMPT, BEAMS)
        for branch in sorted(history.tokens):
            tokens, text = tuple(history.tokens[branch]), history.texts[branch]
            self._beams.append(Expected(tokens, text, history.finishes[branch]))
        self._tasks = [asyncio.create_task(self._client_loop(number)) for number in range(NUM_STREAMS)]

    async def stop(self) -> None:
        """Lets what runs come to its end."""
        self._stopping = True
        try:
            await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._client.close()

    def check(self) -> None:
        """Raises what has gone wrong so far."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def _client_loop(self, number: int) -> None:
        while not self._stopping:
            if number == 0 and self._random.random() < 0.5:
                prompt, params, expected = BEAMS_PROMPT, BEAMS, self._beams
            else:
                prompt, params = self._request(number)
                expected = self._oracle.outputs(prompt, params)
            history = await self._run(prompt, params)
            history.check(expected)
            self.num_streams += 1

    def _request(self, number: int) -> tuple[list[int], SamplingParams]:
        rng = self._random
        prompt = [rng.randrange(1, 1000) for _ in range(rng.choice([1, 15, 16, 17, 40, 200]))]
        seed, length = rng.randrange(2**64), rng.randrange(40, 110)
        match number % 8:
            case 0:
                return prompt, SamplingParams(temperature=1.0, seed=seed, n=1, best_of=3, max_tokens=length // 2)
            case 1:
                return prompt, SamplingParams(temperature=0.7, seed=seed, n=2, max_tokens=length)
            case 2:
                text = text_of(self._oracle.tokens(prompt, length)[length // 2 :])
                stop = tuple(character for character in text if character.isascii())[:1]
                return prompt, SamplingParams(temperature=0.0, stop=stop, max_tokens=length)
            case 3 | 4:
                return prompt, SamplingParams(temperature=1.3, seed=seed, max_tokens=length)
            case _:
                return prompt, SamplingParams(temperature=0.0, max_tokens=length)

    async def _run(self, prompt: list[int], params: SamplingParams) -> History:
        history = History()
        stream = self._client.generate(prompt, params)
        try:
            async with asyncio.timeout(patience(STREAM_S)), stream:
                async for event in stream:
                    history.add(event)
        except TimeoutError:
            raise AssertionError(f"{stream.request_id} got no further than {history} in time") from None
        self.num_reattaches += stream.num_reattaches
        return history


@pytest.fixture
async def traffic(cluster: Cluster, oracle: Oracle, seed: int) -> Any:
    """Streams under way."""
    traffic = Traffic(cluster, oracle, seed)
    await traffic.start()
    yield traffic
    await traffic.stop()
