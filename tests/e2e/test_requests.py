"""A cancel frees what a request held; without workers, and without a store, requests are refused and streams wait."""

import asyncio
import time
from contextlib import asynccontextmanager

import grpc
import pytest
from waiting import until

from octavo.client import FinishReason, SamplingParams
from octavo.request import errors
from octavo.v1 import inference_pb2, inference_pb2_grpc
from octavo.wire import statuses
from octavo.wire.channel import open_channel

LONG = SamplingParams(temperature=0, max_tokens=4000)


@asynccontextmanager
async def raw(cluster, router=0):
    async with open_channel(cluster.endpoints[router]) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def message(prompt=b"abc", **sampling):
    request = inference_pb2.GenerateRequest(text=prompt)
    for name, value in {"temperature": 0, **sampling}.items():
        setattr(request.sampling, name, value)
    return request


async def refused(call):
    """The error of a call, and the seconds it took."""
    began = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return statuses.error_from(raised.value), time.monotonic() - began


async def begun(client, prompt=b"abc", params=LONG, **options):
    """A stream that has brought its first tokens."""
    stream = client.generate(prompt, params, **options)
    await anext(stream)
    return stream


async def rest(stream):
    return [event async for event in stream]


async def test_cancel_frees_blocks_within_two_steps(tight):
    async with tight.client() as client:
        stream = await begun(client, b"x" * 100)
        assert tight.load("w0").num_used_blocks > 6
        await client.cancel(stream.request_id)
        before = tight.load("w0").num_steps
        await until(lambda: asyncio.to_thread(lambda: not tight.load("w0").num_used_blocks))
        assert tight.load("w0").num_steps <= before + 2
        events = await rest(stream)
        assert events[-1].finish_reason is FinishReason.CANCELLED
        assert events[-1].finished is not None
        assert (await client.get(stream.request_id)).state == "CANCELLED"
        await client.cancel(stream.request_id)  # has already ended: success
        with pytest.raises(errors.NotFound):
            await client.cancel("nobody")


async def test_without_workers_requests_are_refused_until_one_is_back(tight, oracle):
    async with tight.client() as client, raw(tight) as stub:
        stream = await begun(client, params=SamplingParams(temperature=0, max_tokens=100))
        tight.kill("w0")

        async def gone():
            try:
                await stub.Complete(message(max_tokens=1), timeout=0.3)
            except grpc.aio.AioRpcError as error:
                return error.code() == grpc.StatusCode.UNAVAILABLE
            return False

        await until(gone)
        error, seconds = await refused(stub.Complete(message(max_tokens=1)))
        assert isinstance(error, errors.NoWorkers)
        assert error.retry_after_ms > 0
        assert seconds < 10  # refused, and not kept waiting for the worker
        tight.spawn("w0")
        tokens = [token for event in await rest(stream) for token in event.token_ids]
        assert tokens == oracle.tokens(list(b"abc"), 100)[-len(tokens) :]  # waited for it


async def test_without_a_store_admissions_are_refused_and_streams_wait(tight, oracle):
    async with tight.client() as client, raw(tight) as stub:
        stream = await begun(client, params=SamplingParams(temperature=0, max_tokens=200))
        tight.kill("store")
        error, seconds = await refused(stub.Complete(message(max_tokens=1)))
        assert isinstance(error, errors.StoreUnavailable)
        assert error.retry_after_ms > 0
        assert seconds < 20  # 2 on a quiet machine
        await asyncio.sleep(1.0)
        tight.spawn("store")
        tokens = [token for event in await rest(stream) for token in event.token_ids]
        assert tokens == oracle.tokens(list(b"abc"), 200)[-len(tokens) :]
        done = await client.complete(b"abc", SamplingParams(temperature=0, max_tokens=5))
        assert list(done.token_ids) == oracle.tokens(list(b"abc"), 5)
