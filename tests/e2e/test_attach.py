"""A stream begun on one router goes on at any other, from any index; and what Generate and Attach refuse."""

import asyncio

import grpc
import pytest
from live.history import History

from octavo.client import SamplingParams
from octavo.client.events import event_of
from octavo.request import errors
from octavo.v1 import inference_pb2, inference_pb2_grpc
from octavo.wire import statuses
from octavo.wire.channel import open_channel

GREEDY = SamplingParams(temperature=0, max_tokens=60)


@pytest.fixture
async def routers(cluster):
    """A raw stub per router: no retries, no dropped duplicates."""
    channels = [open_channel(endpoint) for endpoint in cluster.endpoints]
    yield [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
    for channel in channels:
        await channel.close()


def make_request(prompt, params=GREEDY, **more):
    request = inference_pb2.GenerateRequest(raw_text=bytes(prompt), **more)
    request.sampling.temperature = params.temperature
    request.sampling.max_tokens = params.max_tokens
    return request


def attach(request_id, *next_indexes):
    return inference_pb2.AttachRequest(request_id=request_id, next_indexes=next_indexes)


async def events(call):
    """All messages of a raw stream, checked as a history of their own."""
    seen, history = [], None
    async with asyncio.timeout(60):
        async for message in call:
            event = event_of(message)
            history = history or History(starts=[event.first_index])
            history.add(event)
            seen.append(event)
    assert sum(event.finished is not None for event in seen) == 1
    assert seen[-1].finished is not None
    return seen


def joined(seen):
    return [t for event in seen for t in event.token_ids], "".join(event.text for event in seen)


def prompt_of(rng, length=20):
    return bytes(rng.randrange(32, 127) for _ in range(length))


async def test_from_any_index_on_any_router_while_running_and_after(routers, oracle, rng):
    """By request id and by every resume token; tokens and text continue to the byte."""
    prompt = prompt_of(rng)
    expected = oracle.outputs(list(prompt), GREEDY)[0]
    first, tokens, joins = routers[0].Generate(make_request(prompt)), [], []
    async for message in first:
        tokens.append((message.resume_token, message.first_index + len(message.token_ids), message.text))
        router = routers[len(tokens) % 2]
        joins.append((len(tokens), asyncio.create_task(events(router.Attach(attach_token(message))))))
        request_id = message.request_id
    text = ""
    for count, join in joins:  # begun while it ran
        text += tokens[count - 1][2]
        check_rest(await join, tokens[count - 1][1], text, expected)
    text = ""
    for token, next_index, delta in tokens:  # after it has ended
        text += delta
        seen = await events(routers[1].Attach(inference_pb2.AttachRequest(resume_token=token)))
        check_rest(seen, next_index, text, expected)
    for index in range(0, 61, 6):
        seen = await events(routers[index % 2].Attach(attach(request_id, index)))
        assert seen[0].first_index == index
        assert joined(seen)[0] == list(expected.token_ids[index:])
        if index == 0:
            assert joined(seen)[1] == expected.text


def attach_token(message):
    return inference_pb2.AttachRequest(resume_token=message.resume_token)


def check_rest(seen, next_index, text, expected):
    got_tokens, got_text = joined(seen)
    assert seen[0].first_index == next_index
    assert got_tokens == list(expected.token_ids[next_index:])
    assert text + got_text == expected.text


async def test_what_is_refused(routers, rng):
    request = make_request(prompt_of(rng), SamplingParams(temperature=0, max_tokens=3), request_id="mine")
    async for _ in routers[0].Generate(request):
        pass
    other = inference_pb2.GenerateRequest()
    other.CopyFrom(request)
    other.sampling.max_tokens = 4
    calls = [
        (errors.RequestExists, "", routers[1].Generate(other)),
        (errors.NotFound, "", routers[0].Attach(attach("nobody"))),
        (errors.InvalidArgument, "next_indexes", routers[0].Attach(attach("mine", 0, 0))),
        (errors.InvalidArgument, "at", routers[0].Attach(inference_pb2.AttachRequest())),
        (errors.InvalidArgument, "request_id", routers[0].Attach(attach("\n"))),
        (errors.HistoryLost, "", routers[0].Attach(attach("mine", 4))),
        (errors.InvalidArgument, "resume_token", routers[1].Attach(inference_pb2.AttachRequest(resume_token=b"x"))),
    ]
    for error, field, call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call:
                pass
        found = statuses.error_from(raised.value)
        assert type(found) is error, (found, field)
        assert found.metadata.get("field", "") == field
