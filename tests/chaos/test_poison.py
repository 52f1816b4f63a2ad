"""A request on which workers die takes at most three of them with it, and nobody else's stream."""

import asyncio
import random
import threading
import time

import pytest
from live.client_loops import ClientLoops, read_history
from live.cluster import Shape
from live.fixtures import whole
from live.oracle import Oracle
from live.process import wait_until

from octavo.client import SamplingParams
from octavo.request import errors
from octavo.v1 import admin_pb2

pytestmark = pytest.mark.long

POISON = 666
SHAPE = Shape(
    workers=4, routers=1, runner="fake", step_delay_ms=15, worker_args=("--die-on-token", str(POISON)), lease_ms=2000
)


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


class Innocents(ClientLoops):
    """Clients with one harmless stream after the other. A stream that fails or has a wrong token is an error."""

    def __init__(self, client, oracle, seed):
        super().__init__(client)
        self._oracle, self._random = oracle, random.Random(seed)

    async def stream_once(self, number):
        prompt = [self._random.randrange(1, 600) for _ in range(30)]
        tokens = self._oracle.tokens(prompt, 120)
        if POISON not in tokens:
            params = SamplingParams(temperature=0, max_tokens=120)
            history = await read_history(self.client.generate(prompt, params), 120)
            assert history.tokens[0] == tokens


@pytest.mark.timeout(300)
async def test_poison_is_given_up_and_innocents_survive(supervised, seed):
    cluster, supervisor = supervised
    oracle = Oracle("fake")
    async with cluster.client() as client:
        innocents = Innocents(cluster.client(), oracle, seed)
        innocents.begin(6)
        await asyncio.sleep(0.5)
        for prompt, num_tokens in poisonous_prompts(oracle):
            before, got = supervisor.num_deaths, []
            with pytest.raises(errors.PoisonSuspected):
                async with asyncio.timeout(90):
                    async for event in client.generate(prompt, SamplingParams(temperature=0, max_tokens=60)):
                        got += event.token_ids
            assert got == oracle.tokens(prompt, 60)[:num_tokens]
            await asyncio.to_thread(cluster_whole, cluster)
            await asyncio.to_thread(wait_until, lambda: not suspects(cluster), 60, "suspicions stay")
            assert 1 <= supervisor.num_deaths - before <= 3
            innocents.check()
        await innocents.stop()


def suspects(cluster):
    """Live sequences that some worker has died with; sixteen tokens prove them harmless."""
    listed = cluster.admin().ListSequences(admin_pb2.ListSequencesRequest(), timeout=10).sequences
    return [sequence.seq_id for sequence in listed if sequence.crashes]


def cluster_whole(cluster):
    """The supervisor has brought everybody back."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            return cluster.wait_ready()
        except AssertionError:
            time.sleep(0.1)
    raise AssertionError("the cluster does not recover")
