"""Workers of several ranks beside one process: streams go between them and say the same, however the group ends."""

import asyncio
import os
import random
import signal
import sys
import time

import pytest
import random_models
from folder_llama import folder_llama, save_bytes_tokenizer
from guard.processes import exists, ranks_of
from live.cluster import ROOT, Cluster, Shape
from live.fixtures import whole
from live.process import Process, wait_until
from live.reader import Reader

from gpu_worker.serving.process.progress_monitor import HANG_STATUS
from octavo.client import SamplingParams
from octavo.local import ports

LONG = SamplingParams(temperature=0.7, seed=5, max_tokens=1500, ignore_eos=True)
PROMPTS = [[number, *range(30, 90)] for number in range(6)]
pytestmark = pytest.mark.timeout(300)  # workers import torch, and others may need the cores
SOON_S = 2.0  # a second, and time to look on a busy machine
aside = asyncio.to_thread


SIZES = ("--threads", "1", "--kv-cache-bytes", "8MiB", "--swap-bytes", "0")


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return ("--model", str(folder_llama(tmp_path_factory.mktemp("grouped"))), *SIZES)


@pytest.fixture(scope="session")
def models(model, tmp_path_factory):
    gpt = random_models.random_gpt(random.Random(1), "GPT2")
    folder = random_models.save_random(gpt, tmp_path_factory.mktemp("like_gpt"))
    save_bytes_tokenizer(folder)
    return {"llama": model, "gpt": ("--model", str(folder), *SIZES)}


def shape_of(model, *kinds):
    return Shape(routers=1, workers=2, runner="model", start_s=180.0, worker_args=model, each_worker=kinds)


@pytest.fixture
def mixed(clusters, model):
    """A group of two, and one process. Each keeps blocks of the other's sequences."""
    model += ("--standby", "--standby-tokens", "64")
    yield from whole(clusters(shape_of(model, ("--tensor-parallel", "2"), ())))


@pytest.fixture
def by_role(clusters, model):
    """A group that computes prompts, and one process that goes on with them."""
    kinds = ("--tensor-parallel", "2", "--role", "prefill"), ("--role", "decode")
    yield from whole(clusters(shape_of(model, *kinds)))


def streams(client) -> list[Reader]:
    params = {"max_tokens": 400, "ignore_eos": True}
    return [
        Reader(client.generate(prompt, SamplingParams(temperature=number % 2 * 0.8, seed=number, **params)))
        for number, prompt in enumerate(PROMPTS)
    ]


async def ends(readers) -> list[list[int]]:
    await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers)), 120)
    return [reader.tokens[0] for reader in readers]


async def seconds_until_gone(pids: list[int]) -> float:
    began = time.monotonic()
    while any(map(exists, pids)) and time.monotonic() - began < 30:  # noqa: ASYNC110  processes set no event
        await asyncio.sleep(0.01)
    return time.monotonic() - began


@pytest.mark.parametrize("victim", ["front", "rank", pytest.param("stopped rank", marks=pytest.mark.long)])
async def test_a_group_that_dies_takes_no_token_and_leaves_nothing(mixed, victim):
    async with mixed.client() as client:
        shared = set(os.listdir("/dev/shm"))
        readers = streams(client)  # nobody has these prompts yet: both workers get some of them
        await asyncio.gather(*(reader.until(40, 60) for reader in readers))
        front = mixed.processes["w0"].pid
        (rank,) = ranks_of(front)
        assert [(each.rank, each.pid) for each in mixed.workers()["w0"].ranks] == [(0, front), (1, rank)]
        assert not mixed.workers()["w1"].ranks
        await aside(wait_until, lambda: mixed.load("w1").num_standby_blocks > 0, 30, "no standby")
        if victim == "front":
            mixed.kill("w0")
        else:
            os.kill(rank, signal.SIGKILL if victim == "rank" else signal.SIGSTOP)
        lease_s = mixed.shape.lease_ms / 1000 if victim == "stopped rank" else 0.0
        assert await seconds_until_gone([front, rank]) < lease_s + SOON_S
        assert await ends(readers) == await ends(streams(client))
        assert set(os.listdir("/dev/shm")) <= shared


@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=pytest.mark.long)])
async def test_a_front_that_stops_and_goes_on_takes_no_token(mixed, busy):
    """It gives up if its rank has waited for it in a step for too long; else it serves again."""
    async with mixed.client() as client:
        reader = Reader(client.generate([8, *PROMPTS[0]], LONG, request_id=f"stops-{busy}"))
        if busy:
            await reader.until(20, 60)
            await aside(mixed.migrate, f"stops-{busy}", "w0")
        else:
            await reader.task
        front = mixed.processes["w0"]
        (rank,) = ranks_of(front.pid)
        os.kill(rank, signal.SIGSTOP)  # so that the front stops in a step if it has one, where it waits for its rank
        await asyncio.sleep(0.2)
        front.pause()
        os.kill(rank, signal.SIGCONT)
        await asyncio.wait_for(reader.task, 120)
        await asyncio.sleep(1.5 * mixed.shape.lease_ms / 1000)
        lost = not exists(rank)
        front.resume()
        if lost:
            await aside(wait_until, lambda: not front.running, 20, "the front lives without its rank")
            assert front.exit_code == HANG_STATUS
            assert busy
        await aside(mixed.revive)
        assert lost or ranks_of(front.pid) == [rank]
        again = Reader(client.generate([8, *PROMPTS[0]], LONG, request_id=f"again-{busy}"))
        for place, name in enumerate(("w0", "w1", "w0")):  # which compute as before, and take its blocks along
            await again.until(20 + 100 * place, 60)
            moved = await aside(mixed.migrate, f"again-{busy}", name)
            assert moved is None or moved.num_blocks > 0
        await again.task
        assert reader.tokens == again.tokens


@pytest.mark.long
async def test_a_group_computes_prompts_for_others(by_role):
    async with by_role.client() as client:
        readers = streams(client)
        await asyncio.gather(*(reader.until(20, 60) for reader in readers))
        owners = {each.owner for each in by_role.sequences().values()}
        assert owners == {by_role.workers()["w1"].incarnation}
        first = await ends(readers)
        by_role.kill("w0")
        assert await ends(streams(client)) == first


class HostsCluster(Cluster):
    """w0 is a group on two hosts, of which the follower is the other one."""

    def __init__(self, directory, shape):
        super().__init__(directory, shape)
        (port,) = ports.pick(1)
        self._meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        command = [sys.executable, "-m", "gpu_worker", "--launcher=torchrun"]
        self.follower = Process("follower", command, directory / "follower.log", ROOT, self._environment(1))

    def _environment(self, rank):
        return {**os.environ, **self._meeting, "RANK": str(rank)}

    def start(self):
        self.follower.start()
        super().start()

    def _process(self, name):
        environment = self._environment(0) if name == "w0" else None
        return Process(name, self._command(name), self.directory / f"{name}.log", ROOT, environment)


@pytest.fixture
def on_hosts(tmp_path, models):
    """Makes the cluster of such a worker, and one that is one process. Nothing of it is left when the test ends."""
    made = []

    def make(kind, parallel):
        shape = shape_of(models[kind], (parallel, "2", "--launcher", "torchrun"), ())
        made.append(HostsCluster(tmp_path / "cluster", shape))
        return made[0]

    yield make
    for cluster in made:
        cluster.stop()
        cluster.follower.stop()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "gpt"])
@pytest.mark.parametrize("parallel", ["--tensor-parallel", "--pipeline-parallel"])
async def test_a_host_that_is_asked_to_go_has_the_worker_drain(on_hosts, kind, parallel):
    """When one host is asked to go, the worker of both drains, and both end as one."""
    cluster = on_hosts(kind, parallel)
    cluster.start()
    assert [rank.rank for rank in cluster.workers()["w0"].ranks] == [0, 1]
    async with cluster.client() as client:
        undisturbed, readers = await ends(streams(client)), streams(client)
        await asyncio.gather(*(reader.until(20, 60) for reader in readers))
        os.kill(cluster.follower.pid, signal.SIGTERM)
        assert await ends(readers) == undisturbed
        both = (cluster.processes["w0"], cluster.follower)
        await aside(wait_until, lambda: not any(each.running for each in both), 30, "it stays")
        assert [each.exit_code for each in both] == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("lost", "parallel"),
    [("host", "--tensor-parallel"), ("stopped rank", "--tensor-parallel"), ("stopped rank", "--pipeline-parallel")],
)
async def test_a_stream_goes_on_when_a_host_of_a_model_like_gpt_is_lost(on_hosts, lost, parallel):
    """At the worker that is one process, with the same tokens. The front gives up at once, or after a lease."""
    cluster = on_hosts("gpt", parallel)
    cluster.start()
    async with cluster.client() as client:
        reader = Reader(client.generate(PROMPTS[0], LONG, request_id="lost"))
        await reader.until(20, 60)
        await aside(cluster.migrate, "lost", "w0")
        await reader.until(reader.num_tokens + 40, 60)
        assert await aside(cluster.owner, "lost") == "w0" and reader.num_tokens < LONG.max_tokens
        (there,) = ranks_of(cluster.follower.pid)
        if lost == "host":
            cluster.follower.kill()
        else:
            os.kill(there, signal.SIGSTOP)
        front = cluster.processes["w0"]
        await aside(wait_until, lambda: not front.running, 30, "the front stays")
        assert front.exit_code == HANG_STATUS
        await aside(wait_until, lambda: not exists(there), 30, "a rank stays")
        again = Reader(client.generate(PROMPTS[0], LONG))
        assert await ends([reader]) == await ends([again])
