"""Streams that show pictures survive kill -9, moves and swaps, and share the blocks of equal pictures alone."""

import asyncio
import itertools

import pytest
from folder_qwen_vl import data_url, file_of, folder_qwen_vl, picture, shown, text_part
from live.cluster import Shape
from live.fixtures import whole
from live.posts import post_json
from live.reader import Reader
from redis import Redis

from octavo.client import SamplingParams
from octavo.internal.v1 import worker_pb2
from octavo.request.errors import InvalidArgument
from octavo.v1 import admin_pb2
from octavo.wire import statuses

pytestmark = pytest.mark.timeout(600)  # workers import torch and transformers, and others may need the cores
NUMBERS = itertools.count()
PARAMS = SamplingParams(temperature=0, max_tokens=220, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
WAIT_S = 120.0


@pytest.fixture(scope="session")
def qwen(tmp_path_factory):
    return folder_qwen_vl(tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def sighted(clusters, qwen):
    """Two workers of a model that takes pictures."""
    model = ("--model", str(qwen), "--threads", "1", "--kv-cache-bytes", "8MiB", "--swap-bytes", "4MiB")
    yield from whole(clusters(Shape(routers=1, workers=2, runner="model", start_s=300.0, worker_args=model)))


def chat(*parts):
    """One that no test had before, from its first block on."""
    return [{"role": "user", "content": [text_part(f"{next(NUMBERS):016d} "), *parts]}]


def status_of(cluster, request_id):
    listed = cluster.admin().ListSequences(admin_pb2.ListSequencesRequest(), timeout=10).sequences
    return next(each for each in listed if each.request_id == request_id)


def owner_of(cluster, request_id):
    owner = status_of(cluster, request_id).owner
    return next(name for name, worker in cluster.workers().items() if worker.incarnation == owner)


def swap(cluster, request_id, operation):
    """How many blocks moved, or were given back."""
    found = status_of(cluster, request_id)
    item = worker_pb2.SwapItem(seq_id=found.seq_id, epoch=found.epoch, operation=f"SWAP_OPERATION_{operation}")
    worker = cluster.worker(owner_of(cluster, request_id))
    [result] = worker.Swap(worker_pb2.SwapRequest(items=[item]), timeout=30).results
    assert not result.HasField("failure"), result
    return result.num_blocks


def other_of(name):
    return "w1" if name == "w0" else "w0"


def num_kept(cluster):
    """How many sequences the store has pictures of."""
    with Redis(unix_socket_path=cluster.store.url.removeprefix("unix://").partition("?")[0]) as redis:
        return sum(key.endswith(b":pictures") for key in redis.scan_iter(count=1000))


async def undisturbed(client, prompt):
    reader = Reader(client.generate(prompt, PARAMS))
    await asyncio.wait_for(reader.task, WAIT_S)
    return reader.tokens


async def test_streams_with_pictures_survive_what_happens_to_workers(sighted):
    """A move with its blocks, a swap, and kill -9 of the owner: the stream says what it says undisturbed."""
    prompt = chat(shown(file_of(picture(150, 90))), text_part(" and "), shown(file_of(picture(60, 130, seed=3))))
    async with sighted.client() as client:
        expected = await undisturbed(client, prompt)
        reader = Reader(client.generate(prompt, PARAMS, request_id="shows"))
        await reader.until(30, WAIT_S)
        assert await asyncio.to_thread(num_kept, sighted) == 1
        first = await asyncio.to_thread(owner_of, sighted, "shows")
        with statuses.serving_errors():
            moved = await asyncio.to_thread(
                lambda: sighted.admin().Migrate(
                    admin_pb2.MigrateRequest(request_id="shows", worker_id=other_of(first)), timeout=60
                )
            )
        assert moved.num_blocks > 0
        await reader.until(60, WAIT_S)
        for operation, num_tokens in (("OUT", 0), ("IN", 90), ("DROP", 120)):
            assert await asyncio.to_thread(swap, sighted, "shows", operation) > 0
            await reader.until(num_tokens, WAIT_S)
        sighted.kill(await asyncio.to_thread(owner_of, sighted, "shows"))
        await asyncio.wait_for(reader.task, WAIT_S)
        assert reader.tokens == expected
    assert await asyncio.to_thread(num_kept, sighted) == 0, "a sequence that has ended needs no pictures"


async def test_equal_pictures_share_blocks_and_others_do_not(sighted):
    text = text_part("which one is it, and what does it show? " * 2)
    one, other = (file_of(picture(180, 120, seed=seed)) for seed in (5, 6))
    first = chat(text, shown(one))
    content = first[0]["content"]
    async with sighted.client() as client:
        results = []
        for data in (one, one, other):
            prompt = [{"role": "user", "content": [*content[:-1], shown(data)]}]
            results.append(await asyncio.wait_for(client.complete(prompt, SHORT), WAIT_S))
    fresh, again, different = results
    assert fresh.token_ids == again.token_ids != different.token_ids
    assert again.usage.cached_tokens > different.usage.cached_tokens


def post(cluster, body):
    return post_json(cluster, "/v1/chat/completions", body, WAIT_S)


async def test_http_takes_pictures_and_refuses_what_is_none(sighted):
    good = {"messages": chat(shown(file_of(picture(90, 90)))), "max_tokens": 4, "temperature": 0}
    status, answer = await asyncio.to_thread(post, sighted, good)
    assert status == 200 and answer["usage"]["prompt_tokens"] > 9, answer
    for url, what in (
        (data_url(file_of(picture(90, 90))[:-200]), "send the whole file"),
        ("https://example.com/a.png", "picture_hosts"),
        ("file:///etc/passwd", "URL of https"),
    ):
        body = {"messages": chat({"type": "image_url", "image_url": {"url": url}})}
        status, answer = await asyncio.to_thread(post, sighted, body)
        assert status == 400 and what in answer["error"]["message"], answer
        assert answer["error"]["param"] == "messages[0].content[1].image_url", answer


async def test_a_router_refuses_pictures_of_models_of_text(cluster):
    async with cluster.client() as client:
        with pytest.raises(InvalidArgument, match="text alone"):
            await client.complete(chat(shown(file_of(picture(56, 56)))), SHORT)
