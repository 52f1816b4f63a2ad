"""A cancel frees what a request held; without workers, and without a store, requests are refused and streams wait."""

import asyncio

import grpc
from effort import patience
from waiting import until

from octavo.client import FinishReason, SamplingParams
from octavo.request import errors
from octavo.v1 import inference_pb2, inference_pb2_grpc
from octavo.wire import statuses
from octavo.wire.channel import open_channel

SHORT = SamplingParams(temperature=0, max_tokens=5)


async def begun(client, prompt=b"abc", max_tokens=200):
    """A stream that has brought its first tokens."""
    stream = client.generate(prompt, SamplingParams(temperature=0, max_tokens=max_tokens))
    await anext(stream)
    return stream


async def check_rest(stream, oracle):
    tokens = [token async for event in stream for token in event.token_ids]
    assert tokens == oracle.tokens(list(b"abc"), 200)[-len(tokens) :]


async def test_cancel_frees_blocks_within_two_steps(tight):
    async with tight.client() as client:
        stream = await begun(client, b"x" * 100, 4000)
        assert tight.load("w0").num_used_blocks > 6
        await client.cancel(stream.request_id)
        before = tight.load("w0").num_steps
        await until(lambda: asyncio.to_thread(lambda: not tight.load("w0").num_used_blocks))
        assert tight.load("w0").num_steps <= before + 2
        last = [event async for event in stream][-1]
        assert last.finish_reason is FinishReason.CANCELLED and last.finished is not None
        assert (await client.get(stream.request_id)).state == "CANCELLED"
        await client.cancel(stream.request_id)  # has already ended: success


async def test_without_workers_or_a_store_requests_are_refused_and_streams_wait(tight, oracle):
    request = inference_pb2.GenerateRequest(text="abc", sampling={"temperature": 0, "max_tokens": 1})
    async with tight.client() as client, open_channel(tight.endpoints[0]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def refusal(timeout):
            try:
                await stub.Complete(request, timeout=timeout)
            except grpc.aio.AioRpcError as error:
                return error if error.code() == grpc.StatusCode.UNAVAILABLE else None
            return None

        for victim, kind in (("w0", errors.NoWorkers), ("store", errors.StoreUnavailable)):
            stream = await begun(client)
            tight.kill(victim)
            await until(lambda: refusal(3), 30)
            error = statuses.error_from(await refusal(patience(10)))  # nobody is kept waiting for what is away
            assert isinstance(error, kind)
            assert error.retry_after_ms > 0
            tight.spawn(victim)
            await check_rest(stream, oracle)
            done = await client.complete(b"abc", SHORT)
            assert list(done.token_ids) == oracle.tokens(list(b"abc"), 5)
