"""A request on which workers die takes at most three of them with it, and nobody else's stream."""

import asyncio
import random
import threading
import time

import pytest
from live.cluster import Shape
from live.fixtures import whole
from live.oracle import Oracle
from live.process import wait_until
from live.traffic import Traffic

from octavo.client import SamplingParams
from octavo.request import errors

pytestmark = pytest.mark.long

POISON = 666
POISONED = ("--die-on-token", str(POISON))
SHAPE = Shape(workers=4, routers=1, runner="fake", step_delay_ms=15, worker_args=POISONED)


class Supervisor:
    """Starts workers again that have died, as `octavo up` does, and counts."""

    def __init__(self, cluster):
        self.num_deaths = 0
        self._cluster = cluster
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._stop.wait(0.05):
            for name in self._cluster.worker_endpoints:
                if not self._cluster.processes[name].running:
                    self.num_deaths += 1
                    time.sleep(0.1)
                    self._cluster.spawn(name)

    def stop(self):
        self._stop.set()
        self._thread.join()


@pytest.fixture
def supervised(clusters):
    for cluster in whole(clusters(SHAPE)):
        supervisor = Supervisor(cluster)
        yield cluster, supervisor
        supervisor.stop()


def poisonous_prompts(oracle):
    """Poison in the prompt; and a prompt whose output comes to it after some tokens."""
    yield [1, 2, POISON, 3], 0
    prompt = next(p for p in ([7, n] for n in range(100_000)) if POISON in oracle.tokens(p, 40)[10:])
    yield prompt, oracle.tokens(prompt, 40).index(POISON) + 1


def is_quiet(cluster):
    """The supervisor has brought everybody back, and no live sequence has had a worker die with it: sixteen tokens
    prove it harmless."""
    try:
        return cluster.is_ready() and not any(each.crashes for each in cluster.sequences().values())
    except AssertionError:  # a process has ended
        return False


@pytest.mark.timeout(300)
async def test_poison_is_given_up_and_innocents_survive(supervised, seed):
    cluster, supervisor = supervised
    oracle, rng, params = Oracle("fake"), random.Random(seed), SamplingParams(temperature=0, max_tokens=120)

    def draw(number):
        while True:
            prompt = [rng.randrange(1, 600) for _ in range(30)]
            [output] = oracle.outputs(prompt, params)
            if POISON not in output.token_ids:
                return prompt, params, [output]

    async with cluster.client() as client:
        innocents = Traffic(cluster.client(), draw, 120)
        innocents.begin(6)
        await asyncio.sleep(0.5)
        for prompt, num_tokens in poisonous_prompts(oracle):
            before, got = supervisor.num_deaths, []
            with pytest.raises(errors.PoisonSuspected):
                async with asyncio.timeout(90):
                    async for event in client.generate(prompt, SamplingParams(temperature=0, max_tokens=60)):
                        got += event.token_ids
            assert got == oracle.tokens(prompt, 60)[:num_tokens]
            await asyncio.to_thread(wait_until, lambda: is_quiet(cluster), 60, "suspicions stay")
            assert 1 <= supervisor.num_deaths - before <= 3
            innocents.check()
        await innocents.stop()
