"""Streams of models with an encoder survive kill -9, moves and swaps, and share the blocks of equal prompts alone."""

import asyncio

import pytest
from encoded_types import TinyEncoded
from live.cluster import Shape
from live.fixtures import whole
from live.moves import migrate
from live.posts import post_json
from live.reader import Reader

from octavo.client import SamplingParams
from octavo.internal.v1 import worker_pb2
from octavo.request.errors import InvalidArgument
from octavo.v1 import admin_pb2

pytestmark = pytest.mark.timeout(600)  # workers import torch and transformers, and others may need the cores
GREEDY = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
WAIT_S = 120.0
END = 258  # the token after a text


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    folder, long = tmp_path_factory.mktemp("encoded"), {"max_position_embeddings": 1024}
    return {"bart": TinyEncoded("bart", folder, **long), "t5-gated": TinyEncoded("t5-gated", folder)}


@pytest.fixture
def tiny(made, request):
    return made[request.param]


@pytest.fixture
def pair(clusters, tiny):
    model = ("--model", str(tiny.directory), "--threads", "1", "--kv-cache-bytes", "8MiB", "--swap-bytes", "4MiB")
    model += ("--speculation", "off")  # else a stream ends before all has happened to it
    yield from whole(clusters(Shape(routers=1, workers=2, runner="model", start_s=300.0, worker_args=model)))


def owner_of(cluster, request_id):
    listed = cluster.admin().ListSequences(admin_pb2.ListSequencesRequest(), timeout=10).sequences
    owner = next(each.owner for each in listed if each.request_id == request_id)
    return next(name for name, worker in cluster.workers().items() if worker.incarnation == owner)


def swap(cluster, request_id, operation):
    """How many blocks moved, or were given back."""
    listed = cluster.admin().ListSequences(admin_pb2.ListSequencesRequest(), timeout=10).sequences
    found = next(each for each in listed if each.request_id == request_id)
    item = worker_pb2.SwapItem(seq_id=found.seq_id, epoch=found.epoch, operation=f"SWAP_OPERATION_{operation}")
    worker = cluster.worker(owner_of(cluster, request_id))
    [result] = worker.Swap(worker_pb2.SwapRequest(items=[item]), timeout=30).results
    assert not result.HasField("failure"), result
    return result.num_blocks


def post(cluster, body):
    return post_json(cluster, "/v1/completions", body, WAIT_S)


@pytest.mark.parametrize("tiny", ["bart", "t5-gated"], indirect=True)
async def test_streams_survive_what_happens_to_workers(pair, tiny):
    """A move with its blocks, a swap, and kill -9 of the owner: the stream says what Transformers says."""
    prompts = [[number + 3, *range(40, 90)] for number in range(3)]
    async with pair.client() as client:
        readers = [Reader(client.generate(p, GREEDY, request_id=f"s{n}")) for n, p in enumerate(prompts)]
        await asyncio.gather(*(reader.until(12, WAIT_S) for reader in readers))
        first = await asyncio.to_thread(owner_of, pair, "s0")
        moved = await asyncio.to_thread(migrate, pair, "s0", "w1" if first == "w0" else "w0")
        assert moved is not None and moved.num_blocks > 0
        for operation, num_tokens in (("OUT", 0), ("IN", 40), ("DROP", 55)):
            assert await asyncio.to_thread(swap, pair, "s0", operation) > 0
            await readers[0].until(num_tokens, WAIT_S)
        pair.kill(await asyncio.to_thread(owner_of, pair, "s0"))
        await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers)), WAIT_S)
    for prompt, reader in zip(prompts, readers, strict=True):
        output = reader.tokens[0]
        assert len(output) == GREEDY.max_tokens
        decoded = [*tiny.start, *output]
        assert tiny.logits(prompt, decoded)[len(tiny.start) - 1 : -1].argmax(-1).tolist() == output


@pytest.mark.parametrize("tiny", ["t5-gated"], indirect=True)
async def test_what_a_client_asks_and_gets(pair, tiny):
    """Texts and token ids, over gRPC and HTTP; equal prompts share blocks, and others that begin alike do not."""
    text = "translate this into another language: the house is wonderful"
    ids = [*range(20, 60)]
    async with pair.client() as client:
        told = await client.complete(text, SHORT)
        whole_text = await client.tokenize(text)
        assert whole_text == [*map(ord, text), END] and list(told.token_ids) == tiny.generate(whole_text, 8)
        assert told.usage.prompt_tokens == len(whole_text)
        results = [await client.complete(each, SHORT) for each in (ids, ids, [*ids[:-1], 99])]
        fresh, again, other = results
        assert list(fresh.token_ids) == list(again.token_ids) == tiny.generate(ids, 8)
        assert list(other.token_ids) == tiny.generate([*ids[:-1], 99], 8)
        assert (fresh.usage.cached_tokens, again.usage.cached_tokens, other.usage.cached_tokens) == (0, 32, 0)
        for params, prompt, what in (
            (SamplingParams(prompt_logprobs=1), ids, "sampling.prompt_logprobs"),
            (SHORT, [5] * 2000, "token_ids"),
        ):
            with pytest.raises(InvalidArgument, match=what):
                await client.complete(prompt, params)
        with pytest.raises(InvalidArgument, match="chat template"):
            await client.complete([{"role": "user", "content": "hello"}], SHORT)
    status, answer = await asyncio.to_thread(post, pair, {"prompt": text, "max_tokens": 8, "temperature": 0})
    assert status == 200 and answer["choices"][0]["text"] == told.text
    assert answer["usage"]["prompt_tokens"] == len(whole_text)
    status, answer = await asyncio.to_thread(post, pair, {"prompt": text, "truncate_prompt_tokens": 3})
    assert status == 400 and "truncate_prompt_tokens" in answer["error"]["message"]
