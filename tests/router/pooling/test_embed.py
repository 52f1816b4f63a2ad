"""Embed and Score on whole routers and workers: the vectors of the model, whichever worker computes or dies."""

import asyncio
from array import array

import grpc
import pytest

from gpu_worker.pooling.vectors import vector_of
from gpu_worker.scheduling.state.pooling import PoolingEnd
from gpu_worker.testing.fake_runner import fold, state_vector
from octavo.net.security.api_keys import line_of, new_key
from octavo.pooling.params import PoolingParams, PoolKind
from octavo.pooling.vectors import cosine
from octavo.request import errors
from octavo.v1 import inference_pb2, types_pb2
from octavo.wire.statuses import error_from
from router.fleet.worker_link import WorkerLink

LAST = PoolingParams()
PROMPTS = [[3 + i % 900, 5, *range(7, 7 + i % 40)] for i in range(200)]


def request(prompts=PROMPTS, **fields):
    inputs = [inference_pb2.EmbedInput(token_ids=types_pb2.TokenIds(ids=prompt)) for prompt in prompts]
    return inference_pb2.EmbedRequest(inputs=inputs, **fields)


def expected(prompts=PROMPTS, params=LAST):
    found = []
    for prompt in prompts:
        states = [state_vector(fold(prompt[: length + 1])) for length in range(len(prompt))]
        total = [sum(column) for column in zip(*states, strict=True)]
        mean = params.kind is PoolKind.MEAN
        end = PoolingEnd(array("d", total) if mean else array("f", states[-1]))
        found.append(vector_of(end, params, len(prompt)).tolist())
    return found


def vectors(response):
    return [list(each.values) for each in response.embeddings]


async def error_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return error_from(raised.value)


async def test_vectors_are_in_order_and_as_asked(world):
    await world.start(2)
    stub = world.stub()
    response = await stub.Embed(request())
    assert vectors(response) == expected()
    assert response.model == "fake" and response.usage.prompt_tokens == sum(map(len, PROMPTS))
    mean = PoolingParams(PoolKind.MEAN, dimensions=5)
    assert vectors(await stub.Embed(request(pooling="POOLING_MEAN", dimensions=5))) == expected(params=mean)
    text = inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text="Hi")], normalize=False)
    assert vectors(await stub.Embed(text)) == [state_vector(fold(list(b"Hi")))]
    scores = await stub.Score(inference_pb2.ScoreRequest(left=["q"], right=["a", "q", "b"]))
    a, q, b = expected([[97], [113], [98]])
    assert list(scores.scores) == [cosine(q, a), cosine(q, q), cosine(q, b)]
    assert scores.usage.prompt_tokens == 3  # each text once


async def test_a_prompt_that_kills_is_given_up_and_no_other(world, monkeypatch):
    """The killers here are links that break: three workers "die" by whoever gets the prompt with token 999."""
    await world.start(2, max_batch_sequences=8)
    pool = WorkerLink.pool

    def breaking(self, prompts, *arguments, **options):
        async def broken():
            raise errors.Unreachable("it died")
            yield []

        return broken() if any(999 in prompt for prompt in prompts) else pool(self, prompts, *arguments, **options)

    monkeypatch.setattr(WorkerLink, "pool", breaking)
    stub = world.stub()
    poison, others = await asyncio.gather(error_of(stub.Embed(request([[999, 1]]))), stub.Embed(request(PROMPTS[:50])))
    assert isinstance(poison, errors.PoisonSuspected)
    assert vectors(others) == expected(PROMPTS[:50])


async def test_who_leaves_or_runs_out_of_time_leaves_nothing(world):
    await world.start(1, step_s=0.05, max_batch_tokens=64, max_batch_sequences=8)
    stub, worker = world.stub(), world.workers[0]
    dispatcher, gate = world.routers[0].pooling.dispatcher, world.routers[0].pooling.gate
    call = stub.Embed(request())
    await world.until(lambda: dispatcher.num_vectors)
    call.cancel()
    assert isinstance(await error_of(stub.Embed(request(), timeout=0.5)), errors.DeadlineExceeded)
    await world.until(lambda: not (worker.workload.sequences or worker.vectors.num_open or gate.num_prompts))
    assert not len(dispatcher._queue)
    await world._stop_worker(worker)
    await world.until(lambda: not world.routers[0].models.find_by_name("fake").workers)
    assert isinstance(await error_of(stub.Embed(request())), errors.NoWorkers), "without a worker it is refused at once"


async def test_a_worker_refuses_prompts_one_by_one_and_ends_calls_as_it_ends(world):
    await world.start(1, step_s=0.05, max_batch_tokens=64, max_batch_sequences=8)
    (link,), (worker,) = world.routers[0].pool.links.values(), world.workers

    async def asked(prompts):
        stream = link.pool(prompts, LAST, salt="", priority=3, deadline_in_ms=0)
        return {each.index: each.failure is None async for vectors in stream for each in vectors}

    assert await asked([[1] * 20_000, [5, 7], []]) == {0: False, 1: True, 2: False}
    left = asyncio.create_task(asked(PROMPTS))
    await world.until(lambda: worker.vectors.num_open and worker.workload.sequences)
    worker.vectors.close()
    with pytest.raises(errors.Draining, match="ask another one for the rest"):
        await left
    await world.until(lambda: not (worker.workload.sequences or worker.vectors.num_open))


async def test_what_is_wrong_is_refused_by_its_field(world):
    await world.start(1)
    stub = world.stub()
    for asked, field in (
        (request([]), "inputs"),
        (request([[1], []]), "inputs[1]"),
        (request([[1] * 8192]), "inputs[0]"),
        (request([[1] * 8000] * 140), "inputs"),
        (request([[1]], dimensions=0), "dimensions"),
        (request([[1]], dimensions=17), "dimensions"),
        (request([[1]], pooling=7), "pooling"),
        (inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput()]), "inputs[0]"),
        (inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text="")]), "inputs[0]"),
        (inference_pb2.ScoreRequest(left=["a"], right=[]), "right"),
        (inference_pb2.ScoreRequest(left=["a"], right=["b"], method="dot"), "method"),
        (inference_pb2.ScoreRequest(left=["a"], right=["b"], method="qwen3"), "method"),
        (inference_pb2.ScoreRequest(left=["a"], right=["b"], instruction="x" * 5000), "instruction"),
        (inference_pb2.ScoreRequest(left=["a"], right=["b"], instruction="x"), "instruction"),
    ):
        error = await error_of((stub.Embed if isinstance(asked, inference_pb2.EmbedRequest) else stub.Score)(asked))
        assert isinstance(error, errors.InvalidArgument) and error.field == field, error
    assert not world.workers[0].engine.times.num_tokens


async def test_bounds_quotas_and_keys_hold(world, tmp_path):
    key, keys = new_key(), tmp_path / "keys"
    keys.write_text(line_of("acme", key) + "\n")
    limits = {"max_queued_requests": 250, "tenant_max_streams": 2, "tenant_tokens_per_minute": 9000}
    await world.start(
        1, step_s=0.05, max_batch_tokens=64, max_batch_sequences=8, router={"api_keys": str(keys), **limits}
    )
    stub, named = world.stub(), {"metadata": (("authorization", f"Bearer {key}"),)}
    assert isinstance(await error_of(stub.Embed(request())), errors.Unauthenticated)
    first = stub.Embed(request(), **named)
    gate = world.routers[0].pooling.gate
    await world.until(lambda: gate.num_prompts == 200)
    full = await error_of(stub.Embed(request(PROMPTS[:60]), **named))
    assert isinstance(full, errors.QueueFull) and full.retry_after_ms
    second = stub.Embed(request(PROMPTS[:10]), **named)
    await world.until(lambda: gate.num_prompts == 210)
    over = await error_of(stub.Embed(request(PROMPTS[:10]), **named))
    assert isinstance(over, errors.QuotaExceeded) and over.quota == "streams"
    world.hurry()
    assert vectors(await first) == expected() and vectors(await second) == expected(PROMPTS[:10])
    while not isinstance(over := await error_or(stub.Embed(request(), **named)), errors.QuotaExceeded):
        assert over is None
    assert over.quota == "tokens_per_minute" and over.retry_after_ms


async def error_or(call):
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error_from(error)
    return None
