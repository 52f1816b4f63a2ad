"""Streams with low-rank adapters on workers with a real model: killed, moved, and while a name gets another adapter."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from effort import draws, patience
from live.cluster import Cluster, Shape
from live.fixtures import running
from loras import save_tiny_model, write_lora

from octavo.client import AsyncClient, SamplingParams
from octavo.request.errors import ServingError
from octavo.request.ids import new_request_id
from octavo.v1 import admin_pb2

NUM_ADAPTERS, NUM_STREAMS, NUM_TOKENS, STREAM_S = 8, 18, 600, 120.0
LONG = SamplingParams(temperature=0, max_tokens=1200, ignore_eos=True, logprobs=1)
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
DRAWN = SamplingParams(temperature=1.0, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, and adapters a0, a1, … of it."""
    where = tmp_path_factory.mktemp("adapters")
    model = save_tiny_model(where / "tiny")
    for number in range(NUM_ADAPTERS + 1):
        write_lora(where / f"a{number}", model, seed=number, rank=(4, 8, 16)[number % 3])
    return where


@pytest.fixture(scope="module")
def cluster(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    options = ("--model", str(folders / "tiny"), "--threads", "1", "--kv-cache-bytes", "64MiB", "--swap-bytes", "0")
    kinds = ("--tensor-parallel", "2"), ()  # a group, and one process
    shape = Shape(runner="model", worker_args=options, each_worker=kinds)
    with running(tmp_path_factory.mktemp("cluster"), shape) as cluster:
        for number in range(NUM_ADAPTERS):
            add(cluster, f"a{number}", folders / f"a{number}")
        yield cluster
        cluster.revive()


def add(cluster: Cluster, name: str, folder: Path, router: int = 0) -> None:
    cluster.admin(router).AddAdapter(admin_pb2.AddAdapterRequest(name=name, source=str(folder)), timeout=20)


@dataclass(slots=True)
class Stream:
    """What a client has got: tokens, and the bits of their log probabilities."""

    model: str
    prompt: list[int]
    params: SamplingParams = PARAMS
    name: str = field(default_factory=new_request_id)
    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    moves: str = ""  # what happened to it, in the words of its timeline

    async def read(self, client: AsyncClient) -> None:
        async with asyncio.timeout(patience(STREAM_S)):
            async for event in client.generate(self.prompt, self.params, request_id=self.name, model=self.model):
                self.tokens += event.token_ids
                self.scores += [score.chosen.logprob for score in event.logprobs]
        self.moves = " ".join(each.what for each in (await client.get(self.name)).timeline)

    async def has(self, count: int) -> None:
        async with asyncio.timeout(patience(STREAM_S)):
            while len(self.tokens) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_bits_are_the_same_when_workers_die_and_sequences_move(cluster: Cluster) -> None:
    models = [f"a{number}" for number in range(NUM_ADAPTERS)] + ["tiny"]
    undisturbed, disturbed = (
        [
            Stream(models[i % 9], [(7 * i + 3 * j) % 256 for j in range(20 + 5 * i)], DRAWN if i % 2 else PARAMS)
            for i in range(NUM_STREAMS)
        ]
        for _ in range(2)
    )
    async with cluster.client() as client:
        await asyncio.gather(*(stream.read(client) for stream in undisturbed))
        assert all(len(stream.tokens) == len(stream.scores) == NUM_TOKENS for stream in undisturbed)
        assert len({tuple(stream.tokens[:20]) for stream in undisturbed[: len(models)]}) == len(models)
        reading = asyncio.gather(*(stream.read(client) for stream in disturbed))
        for stream in disturbed[::6]:
            await stream.has(20)
            with suppress(ServingError):  # it has just ended, or moves already
                await asyncio.to_thread(cluster.migrate, stream.name, router=1)
        await asyncio.to_thread(cluster.kill, "w0")
        await reading
    seen = [stream.moves for stream in disturbed]
    assert any("migrated" in line for line in seen) and any(line.count("taken") > 1 for line in seen), seen
    await asyncio.to_thread(cluster.revive)
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert one.tokens == other.tokens, one.model
        # A worker that dies when an output has just ended takes the last scores along: no journal has them.
        assert one.scores[: len(other.scores)] == other.scores, one.model
    assert sum(len(stream.scores) == len(stream.tokens) for stream in disturbed) > NUM_STREAMS // 2


async def test_a_stream_moves_to_a_worker_that_cannot_read_its_adapter(
    cluster: Cluster, folders: Path, tmp_path: Path
) -> None:
    """The source has it in memory, and gives it. So does the worker that it was given to."""
    lent = tmp_path / "lent"
    shutil.copytree(folders / f"a{NUM_ADAPTERS}", lent)
    add(cluster, "lent", lent)
    moved, alone = (Stream("lent", list(range(30)), LONG) for _ in range(2))
    async with cluster.client() as client:
        reading = asyncio.create_task(moved.read(client))
        await moved.has(20)
        shutil.rmtree(lent)
        for _ in range(2):
            await asyncio.to_thread(cluster.migrate, moved.name)
            await moved.has(len(moved.tokens) + 20)
        await reading
        await alone.read(client)
    assert moved.moves.count("migrated") == 2
    assert (moved.tokens, moved.scores) == (alone.tokens, alone.scores)


@pytest.mark.scaled
async def test_no_stream_mixes_versions_of_a_name(cluster: Cluster, folders: Path) -> None:
    """The name gets another adapter all the while, over both routers. Each stream has the output of one of them."""
    prompt, params = list(range(40)), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    versions = [f"a{number}" for number in range(4)]
    async with cluster.client() as client:
        alone = [Stream(name, prompt, params) for name in versions]
        for stream in alone:
            await stream.read(client)
        outputs = [tuple(stream.tokens) for stream in alone]
        assert len(set(outputs)) == len(versions)
        add(cluster, "shared", folders / versions[0])
        num_replaced = 0

        async def replace() -> None:
            nonlocal num_replaced
            while True:
                num_replaced += 1
                folder = folders / versions[num_replaced % len(versions)]
                await asyncio.to_thread(add, cluster, "shared", folder, num_replaced % 2)

        replacing = asyncio.create_task(replace())
        streams = [Stream("shared", prompt, params) for _ in range(draws(30, 1000))]
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(stream.read(client))
                await asyncio.sleep(0.005)
        replacing.cancel()
    seen = Counter(outputs.index(tuple(stream.tokens)) for stream in streams)
    print(dict(seen), num_replaced)
    assert num_replaced > draws(2, 10) and len(seen) > 1
