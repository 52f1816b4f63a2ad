"""Cancel, disconnect, deadlines, queue: what ends or holds back a request, and that it frees what it held."""

import asyncio
import time
from contextlib import asynccontextmanager

import grpc
import pytest
from waiting import until

from octavo.client import FinishReason, SamplingParams
from octavo.request import errors
from octavo.v1 import admin_pb2, inference_pb2, inference_pb2_grpc
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


# Cancel


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


async def waiting(cluster, count):
    """Whether that many requests are in the queue or wait on the worker."""
    reply = await asyncio.to_thread(lambda: cluster.admin().ListWorkers(admin_pb2.ListWorkersRequest(), timeout=10))
    return reply.num_queued + sum(worker.load.num_waiting for worker in reply.workers) >= count


# Disconnect


async def test_a_client_that_leaves_cancels_after_the_grace(tight):
    async with tight.client() as client:
        stream = await begun(client)
        await stream.aclose()
        assert (await client.get(stream.request_id)).state == "RUNNING"  # within the grace
        await until(lambda: has_state(client, stream.request_id, "CANCELLED"))


async def has_state(client, request_id, state):
    return (await client.get(request_id)).state == state


# Deadlines


async def test_a_deadline_ends_a_running_request_with_what_it_has(tight, oracle):
    async with tight.client() as client:
        done = await client.complete(b"abc", LONG, deadline_s=1.5)
        assert done.finish_reason is FinishReason.DEADLINE
        assert 0 < len(done.token_ids) < 4000
        assert list(done.token_ids) == oracle.tokens(list(b"abc"), len(done.token_ids))


# The queue


async def answered(client, call, request_id) -> bool:
    """Whether the request has been accepted or refused."""
    try:
        return call.done() or bool(await client.get(request_id))
    except errors.NotFound:
        return False


async def test_a_full_queue_says_when_to_come_back(tight):
    async with raw(tight) as stub, tight.client() as client:
        runs = await begun(client)
        calls, error = [], None
        for number in range(12):  # some wait on the worker, four in the queue
            request = message(b"abcdef", max_tokens=10)
            request.request_id = f"many-{number}"
            calls.append(asyncio.ensure_future(stub.Complete(request)))
            await until(lambda number=number: answered(client, calls[-1], f"many-{number}"))
            if calls[-1].done():
                error, _ = await refused(calls.pop())
                break
        assert isinstance(error, errors.QueueFull)
        assert error.retry_after_ms > 0
        assert len(calls) >= 4
        await client.cancel(runs.request_id)
        await rest(runs)
        for reply in await asyncio.gather(*calls):  # those accepted are served
            assert len(reply.outputs[0].token_ids) == 10
        with pytest.raises(errors.NotFound):  # what was refused has left nothing
            await client.get(f"many-{len(calls)}")


# Without workers, without a store


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
