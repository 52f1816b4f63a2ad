"""A worker of two hosts in the service: when one of them is asked to go, the worker drains, and both end as one."""

import asyncio
import os
import signal
import sys

import pytest
from folder_llama import folder_llama
from live.cluster import ROOT, Cluster, Shape
from live.process import Process, wait_until
from live.reader import Reader

from octavo.client import SamplingParams
from octavo.local import ports

pytestmark = pytest.mark.timeout(300)  # workers import torch, and others may need the cores
PROMPTS = [[number, *range(30, 90)] for number in range(4)]


class HostsCluster(Cluster):
    """w0 is a group on two hosts, of which the follower is the other one."""

    def __init__(self, directory, shape):
        super().__init__(directory, shape)
        (port,) = ports.pick(1)
        self._meeting = ["MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}", "WORLD_SIZE=2"]
        command = ["/usr/bin/env", *self._meeting, "RANK=1", sys.executable, "-m", "gpu_worker", "--launcher=torchrun"]
        self.follower = Process("follower", command, directory / "follower.log", ROOT)

    def start(self):
        self.follower.start()
        super().start()

    def _command(self, name):
        command = super()._command(name)
        return ["/usr/bin/env", *self._meeting, "RANK=0", *command] if name == "w0" else command

    def _process(self, name):
        return Process(name, self._command(name), self.directory / f"{name}.log", ROOT)


@pytest.fixture(params=["--tensor-parallel", "--pipeline-parallel"])
def cluster(tmp_path, request):
    model = ("--model", str(folder_llama(tmp_path / "model")), "--threads", "1", "--kv-cache-bytes", "8MiB")
    kinds = ((request.param, "2", "--launcher", "torchrun"), ())
    cluster = HostsCluster(
        tmp_path / "cluster",
        Shape(routers=1, workers=2, runner="model", start_s=180.0, worker_args=model, each_worker=kinds),
    )
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        cluster.follower.stop()


def params(number: int) -> SamplingParams:
    return SamplingParams(temperature=number % 2 * 0.8, seed=number, max_tokens=300, ignore_eos=True)


def streams(client) -> list[Reader]:
    return [Reader(client.generate(prompt, params(number))) for number, prompt in enumerate(PROMPTS)]


async def test_a_host_that_is_asked_to_go_has_the_worker_drain(cluster):
    assert [rank.rank for rank in cluster.workers()["w0"].ranks] == [0, 1]
    async with cluster.client() as client:
        undisturbed = streams(client)
        await asyncio.gather(*(reader.task for reader in undisturbed))
        readers = streams(client)
        await asyncio.gather(*(reader.until(20, 60) for reader in readers))
        os.kill(cluster.follower.pid, signal.SIGTERM)
        await asyncio.gather(*(reader.task for reader in readers))
        assert [reader.tokens for reader in readers] == [reader.tokens for reader in undisturbed]
        front = cluster.processes["w0"]
        await asyncio.to_thread(wait_until, lambda: not front.running and not cluster.follower.running, 30, "it stays")
        assert (front.exit_code, cluster.follower.exit_code) == (0, 0)
