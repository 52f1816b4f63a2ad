"""A worker of several ranks beside one process: streams go between them and say the same, however the group ends."""

import asyncio
import os
import signal
import time

import pytest
from folder_llama import folder_llama
from guard.processes import exists, ranks_of
from live.cluster import Cluster, Shape
from live.fixtures import whole
from live.moves import migrate
from live.process import wait_until
from live.reader import Reader

from gpu_worker.serving.process.progress_monitor import HANG_STATUS
from octavo.client import SamplingParams
from octavo.v1 import admin_pb2

LONG = SamplingParams(temperature=0.7, seed=5, max_tokens=1500, ignore_eos=True)
PROMPTS = [[number, *range(30, 90)] for number in range(6)]
pytestmark = pytest.mark.timeout(300)  # workers import torch, and others may need the cores
SOON_S = 2.0  # a second, and time to look on a busy machine


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return folder_llama(tmp_path_factory.mktemp("grouped"))


@pytest.fixture
def mixed(clusters, folder):
    """A group of two, and one process."""
    model = ("--model", str(folder), "--threads", "1", "--kv-cache-bytes", "8MiB", "--swap-bytes", "0")
    model += ("--standby", "--standby-tokens", "64")
    ranks = tuple(("--tensor-parallel", number) for number in "21")
    shape = Shape(routers=1, workers=2, runner="model", start_s=180.0, worker_args=model, each_worker=ranks)
    yield from whole(clusters(shape))


@pytest.fixture
def by_role(clusters, folder):
    """A group that computes prompts, and one process that goes on with them."""
    model = ("--model", str(folder), "--threads", "1", "--kv-cache-bytes", "8MiB", "--swap-bytes", "0")
    kinds = (("--tensor-parallel", "2", "--role", "prefill"), ("--role", "decode"))
    shape = Shape(routers=1, workers=2, runner="model", start_s=180.0, worker_args=model, each_worker=kinds)
    yield from whole(clusters(shape))


def params(number: int) -> SamplingParams:
    return SamplingParams(temperature=number % 2 * 0.8, seed=number, max_tokens=400, ignore_eos=True)


async def undisturbed(client) -> list[list[int]]:
    readers = [Reader(client.generate(prompt, params(number))) for number, prompt in enumerate(PROMPTS)]
    await asyncio.gather(*(reader.task for reader in readers))
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
        # Nobody has these prompts yet: both workers get some of them.
        readers = [Reader(client.generate(prompt, params(number))) for number, prompt in enumerate(PROMPTS)]
        await asyncio.gather(*(reader.until(40, 60) for reader in readers))
        front = mixed.processes["w0"].pid
        ranks = ranks_of(front)
        assert len(ranks) == 1
        assert [(rank.rank, rank.pid) for rank in mixed.workers()["w0"].ranks] == [(0, front), (1, ranks[0])]
        assert not mixed.workers()["w1"].ranks
        # The other worker keeps blocks of the group's sequences.
        await asyncio.to_thread(wait_until, lambda: keeps_blocks(mixed, "w1"), 30, "no standby")
        if victim == "front":
            mixed.kill("w0")
        elif victim == "rank":
            os.kill(ranks[0], signal.SIGKILL)
        else:
            os.kill(ranks[0], signal.SIGSTOP)
        lease_s = mixed.shape.lease_ms / 1000 if victim == "stopped rank" else 0.0
        assert await seconds_until_gone([front, *ranks]) < lease_s + SOON_S
        await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers)), 120)
        assert [reader.tokens[0] for reader in readers] == await undisturbed(client)
        assert set(os.listdir("/dev/shm")) <= shared


@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=pytest.mark.long)])
async def test_a_front_that_stops_and_goes_on_takes_no_token(mixed, busy):
    """It gives up if its rank has waited for it in a step for too long; else it serves again."""
    async with mixed.client() as client:
        reader = Reader(client.generate([8, *PROMPTS[0]], LONG, request_id=f"stops-{busy}"))
        if busy:
            await reader.until(20, 60)
            await asyncio.to_thread(migrate, mixed, f"stops-{busy}", "w0")
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
            await asyncio.to_thread(wait_until, lambda: not front.running, 20, "the front lives without its rank")
            assert front.exit_code == HANG_STATUS
            assert busy
        await asyncio.to_thread(mixed.revive)
        assert lost or ranks_of(front.pid) == [rank]
        again = Reader(client.generate([8, *PROMPTS[0]], LONG, request_id=f"again-{busy}"))
        await again.until(20, 60)
        await asyncio.to_thread(migrate, mixed, f"again-{busy}", "w0")  # which computes as before
        await again.task
        assert reader.tokens == again.tokens


def keeps_blocks(cluster: Cluster, name: str) -> bool:
    return cluster.load(name).num_standby_blocks > 0


@pytest.mark.long
async def test_a_group_computes_prompts_for_others(by_role):
    async with by_role.client() as client:
        readers = [Reader(client.generate(prompt, params(number))) for number, prompt in enumerate(PROMPTS)]
        await asyncio.gather(*(reader.until(20, 60) for reader in readers))
        owners = {each.owner for each in by_role.admin().ListSequences(admin_pb2.ListSequencesRequest()).sequences}
        assert owners == {by_role.workers()["w1"].incarnation}
        await asyncio.gather(*(reader.task for reader in readers))
        first = [reader.tokens[0] for reader in readers]
        by_role.kill("w0")
        assert await undisturbed(client) == first


async def test_a_stream_moves_with_its_blocks_between_groups_of_any_size(mixed):
    async with mixed.client() as client:
        alone = Reader(client.generate([7, *PROMPTS[0]], LONG))
        await alone.task
        reader = Reader(client.generate([7, *PROMPTS[0]], LONG, request_id="moves"))
        for place, name in enumerate(["w0", "w1", "w0"]):
            await reader.until(100 * (place + 1), 60)
            moved = await asyncio.to_thread(migrate, mixed, "moves", name)
            assert moved is None or moved.num_blocks > 0
        await asyncio.wait_for(reader.task, 120)
        assert reader.tokens == alone.tokens
