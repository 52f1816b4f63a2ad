"""Streams with low-rank adapters on workers with a real model: killed, moved, and while a name gets another adapter."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from effort import patience
from live.cluster import Cluster, Shape
from live.fixtures import running
from loras import save_tiny_model, write_lora

from octavo.client import AsyncClient, SamplingParams
from octavo.request.errors import ServingError
from octavo.request.ids import new_request_id
from octavo.v1 import admin_pb2

NUM_ADAPTERS, NUM_STREAMS, STREAM_S = 8, 18, 120.0
PARAMS = SamplingParams(temperature=0, max_tokens=1200, ignore_eos=True, logprobs=1)
DRAWN = SamplingParams(temperature=1.0, seed=7, max_tokens=1200, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, and adapters a0, a1, … of it."""
    where = tmp_path_factory.mktemp("adapters")
    model = save_tiny_model(where / "tiny")
    for number in range(NUM_ADAPTERS + 2):
        write_lora(where / f"a{number}", model, seed=number, rank=(4, 8, 16)[number % 3])
    return where


@pytest.fixture(scope="module")
def cluster(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    options = ("--model", str(folders / "tiny"), "--threads", "1", "--kv-cache-bytes", "64MiB", "--swap-bytes", "0")
    shape = Shape(routers=2, workers=2, runner="model", worker_args=options)
    with running(tmp_path_factory.mktemp("cluster"), shape) as cluster:
        for number in range(NUM_ADAPTERS):
            add(cluster, f"a{number}", folders / f"a{number}")
        yield cluster
        cluster.revive()


def add(cluster: Cluster, name: str, folder: Path) -> admin_pb2.Adapter:
    request = admin_pb2.AddAdapterRequest(name=name, source=str(folder))
    return cluster.admin().AddAdapter(request, timeout=20).adapter


@dataclass(slots=True)
class Stream:
    """What a client has got: tokens, and the bits of their log probabilities."""

    model: str
    prompt: list[int]
    params: SamplingParams
    name: str = field(default_factory=new_request_id)
    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    async def read(self, client: AsyncClient) -> None:
        async with asyncio.timeout(patience(STREAM_S)):
            async for event in client.generate(self.prompt, self.params, request_id=self.name, model=self.model):
                self.tokens += event.token_ids
                self.scores += [score.chosen.logprob for score in event.logprobs]

    async def has(self, count: int) -> None:
        async with asyncio.timeout(patience(STREAM_S)):
            while len(self.tokens) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def new_streams() -> list[Stream]:
    models = [f"a{number}" for number in range(NUM_ADAPTERS)] + ["tiny"]
    return [
        Stream(models[i % len(models)], [(7 * i + 3 * j) % 256 for j in range(20 + 5 * i)], DRAWN if i % 2 else PARAMS)
        for i in range(NUM_STREAMS)
    ]


async def run_all(cluster: Cluster, streams: list[Stream], disturb: "asyncio.Future[None] | None" = None) -> None:
    async with cluster.client() as client, asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(stream.read(client))
        if disturb is not None:
            await disturb


async def timelines(cluster: Cluster, streams: list[Stream]) -> list[str]:
    async with cluster.client() as client:
        return [" ".join(each.what for each in (await client.get(stream.name)).timeline) for stream in streams]


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_bits_are_the_same_when_workers_die_and_sequences_move(cluster: Cluster, folders: Path) -> None:
    undisturbed, disturbed = new_streams(), new_streams()
    await run_all(cluster, undisturbed)
    assert all(len(stream.tokens) == len(stream.scores) == 1200 for stream in undisturbed)
    by_model = {stream.model: stream.tokens for stream in undisturbed[: NUM_ADAPTERS + 1]}
    assert len({tuple(tokens[:20]) for tokens in by_model.values()}) == NUM_ADAPTERS + 1

    async def disturb() -> None:
        for stream in disturbed[::6]:
            await stream.has(20)
            request = admin_pb2.MigrateRequest(request_id=stream.name)
            with suppress(grpc.RpcError):  # it has just ended, or moves already
                await asyncio.to_thread(cluster.admin(1).Migrate, request, timeout=20)
        await asyncio.to_thread(cluster.kill, "w0")

    await run_all(cluster, disturbed, asyncio.ensure_future(disturb()))
    seen = await timelines(cluster, disturbed)
    assert sum("migrated" in line for line in seen) >= 1, seen
    assert sum(line.count("taken") > 1 for line in seen) >= 1, seen
    await asyncio.to_thread(cluster.revive)
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert one.tokens == other.tokens, one.model
        # A worker that dies when an output has just ended takes the last scores along: no journal has them.
        assert one.scores[: len(other.scores)] == other.scores, one.model
    num_whole = sum(len(stream.scores) == len(stream.tokens) for stream in disturbed)
    assert num_whole > NUM_STREAMS // 2, num_whole


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_name_gets_another_adapter_and_what_runs_keeps_its_own(cluster: Cluster, folders: Path) -> None:
    prompt = list(range(40))
    alone = Stream("a1", prompt, PARAMS)
    async with cluster.client() as client:
        await alone.read(client)
        before = Stream("a1", prompt, PARAMS)
        reading = asyncio.create_task(before.read(client))
        await before.has(20)
        old, new = folders / "a1", folders / f"a{NUM_ADAPTERS}"
        digest = await asyncio.to_thread(add, cluster, "a1", new)
        after = Stream("a1", prompt, PARAMS)
        routers = [await asyncio.to_thread(listed, cluster, router) for router in (0, 1)]
        assert all(found["a1"] == digest.digest for found in routers)
        await after.read(client)
        await reading
        assert before.tokens == alone.tokens != after.tokens
        await asyncio.to_thread(add, cluster, "a1", old)
        cluster.admin().RemoveAdapter(admin_pb2.RemoveAdapterRequest(name="a2"), timeout=20)
        await asyncio.to_thread(listed, cluster, 1)
        with pytest.raises(ServingError, match="no model 'a2' here"):
            await Stream("a2", prompt, PARAMS).read(client)
        await asyncio.to_thread(add, cluster, "a2", folders / "a2")


def listed(cluster: Cluster, router: int) -> dict[str, str]:
    """The digests by name. The router has read them anew."""
    found = cluster.admin(router).ListAdapters(admin_pb2.ListAdaptersRequest(), timeout=20)
    return {adapter.name: adapter.digest for adapter in found.adapters}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_worker_that_cannot_read_an_adapter_says_why(cluster: Cluster, folders: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    shutil.copytree(folders / f"a{NUM_ADAPTERS + 1}", gone)
    add(cluster, "gone", gone)
    (gone / "adapter_config.json").unlink()
    async with cluster.client() as client:
        with pytest.raises(ServingError, match=r"no adapter_config\.json there"):
            await Stream("gone", [1, 2, 3], SamplingParams(max_tokens=3)).read(client)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_stream_moves_to_a_worker_that_cannot_read_its_adapter(
    cluster: Cluster, folders: Path, tmp_path: Path
) -> None:
    """The source has it in memory, and gives it. So does the worker that it was given to."""
    lent = tmp_path / "lent"
    shutil.copytree(folders / f"a{NUM_ADAPTERS + 1}", lent)
    add(cluster, "lent", lent)
    moved, alone = (Stream("lent", list(range(30)), PARAMS) for _ in range(2))
    async with cluster.client() as client:
        reading = asyncio.create_task(moved.read(client))
        await moved.has(20)
        shutil.rmtree(lent)
        for count in (1, 2):
            request = admin_pb2.MigrateRequest(request_id=moved.name)
            await asyncio.to_thread(cluster.admin().Migrate, request, timeout=20)
            await moved.has(len(moved.tokens) + 20)
            assert (await timelines(cluster, [moved]))[0].count("migrated") == count
        await reading
        await alone.read(client)
    assert (moved.tokens, moved.scores) == (alone.tokens, alone.scores)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_none_of_a_thousand_streams_mixes_versions_of_a_name(cluster: Cluster, folders: Path) -> None:
    """The name gets another adapter all the while, over both routers. Each stream has the output of one of them."""
    prompt, params = list(range(40)), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    versions = [f"a{number}" for number in range(4)]
    async with cluster.client() as client:
        alone = [Stream(name, prompt, params) for name in versions]
        for stream in alone:
            await stream.read(client)
        outputs = [tuple(stream.tokens) for stream in alone]
        assert len(set(outputs)) == len(versions)
        await asyncio.to_thread(add, cluster, "shared", folders / versions[0])
        streams = [Stream("shared", prompt, params) for _ in range(1000)]
        num_replaced = 0

        async def replace() -> None:
            nonlocal num_replaced
            while True:
                num_replaced += 1
                source = str(folders / versions[num_replaced % len(versions)])
                request = admin_pb2.AddAdapterRequest(name="shared", source=source)
                await asyncio.to_thread(cluster.admin(num_replaced % 2).AddAdapter, request, timeout=20)

        replacing = asyncio.create_task(replace())
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(stream.read(client))
                await asyncio.sleep(0.005)
        replacing.cancel()
    seen = Counter(outputs.index(tuple(stream.tokens)) for stream in streams)
    print(dict(seen), num_replaced)
    assert num_replaced > 10 and len(seen) == len(versions)
