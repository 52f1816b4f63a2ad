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
    request.sampling.stop.extend(params.stop)
    if params.seed is not None:
        request.sampling.seed = params.seed
    request.sampling.n = params.n
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
            if not seen or event.branch == seen[0].branch:
                history.add(event)
            seen.append(event)
    assert sum(event.finished is not None for event in seen) == 1
    assert seen[-1].finished is not None
    return seen


def joined(seen, branch=0):
    mine = [event for event in seen if event.branch == branch]
    return [t for event in mine for t in event.token_ids], "".join(event.text for event in mine)


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


async def test_a_stop_string_across_the_cut(routers, oracle, rng):
    """Held back on one side of the cut, completed on the other."""
    found = 0
    while found < 3:
        prompt = prompt_of(rng)
        plain = oracle.outputs(list(prompt), GREEDY)[0]
        starts = [i for i in range(5, len(plain.text) - 3) if plain.text[i : i + 3].isascii()]
        if not starts:
            continue
        found += 1
        stop = plain.text[starts[0] : starts[0] + 3]
        params = SamplingParams(temperature=0, max_tokens=60, stop=(stop,))
        expected = oracle.outputs(list(prompt), params)[0]
        seen = await events(routers[0].Generate(make_request(prompt, params)))
        assert joined(seen) == (list(expected.token_ids), expected.text)
        text = ""
        for event in seen:
            text += event.text
            rest = await events(routers[1].Attach(inference_pb2.AttachRequest(resume_token=event.resume_token)))
            assert text + joined(rest)[1] == expected.text
            assert rest[-1].finish_reason == expected.finish_reason


async def test_the_end_of_a_branch_comes_again_and_nothing_else(routers, rng):
    """The branches end one after the other. With indexes the last text of a branch that had ended comes again, too."""
    for seed in range(4):
        params = SamplingParams(temperature=1.0, seed=seed, n=3, max_tokens=30, stop=("e", "a"))
        name = f"ends-{seed}"
        seen = [m async for m in routers[0].Generate(make_request(prompt_of(rng), params, request_id=name))]
        for count in range(1, len(seen) + 1):
            before, token = seen[:count], seen[count - 1].resume_token
            ended = {m.branch for m in before if m.finish_reason}
            indexes = [len(joined(before, branch)[0]) for branch in range(3)]
            by_token = [m async for m in routers[1].Attach(inference_pb2.AttachRequest(resume_token=token))]
            by_index = [m async for m in routers[1].Attach(attach(name, *indexes))]
            for branch in range(3):
                whole, begun = joined(seen, branch), joined(before, branch)
                assert together(begun, joined(by_token, branch)) == whole
                if branch not in ended:
                    assert together(begun, joined(by_index, branch)) == whole
                    continue
                for rest in (by_token, by_index):
                    (last,) = [m for m in rest if m.branch == branch]
                    assert (last.first_index, len(last.token_ids)) == (len(whole[0]), 0)
                    assert last.finish_reason


def together(one, two):
    return one[0] + two[0], one[1] + two[1]


async def test_what_is_refused(routers, rng):
    request = make_request(prompt_of(rng), SamplingParams(temperature=0, max_tokens=3), request_id="mine")
    seen = [message async for message in routers[0].Generate(request)]
    other = inference_pb2.GenerateRequest()
    other.CopyFrom(request)
    other.sampling.max_tokens = 4
    token = seen[-1].resume_token
    calls = [
        (errors.RequestExists, "", routers[1].Generate(other)),
        (errors.NotFound, "", routers[0].Attach(attach("nobody"))),
        (errors.InvalidArgument, "next_indexes", routers[0].Attach(attach("mine", 0, 0))),
        (errors.InvalidArgument, "at", routers[0].Attach(inference_pb2.AttachRequest())),
        (errors.InvalidArgument, "request_id", routers[0].Attach(attach("\n"))),
        (errors.HistoryLost, "", routers[0].Attach(attach("mine", 4))),
    ]
    damaged = [b"", b"x", token[:-1], token + b"\0", *(flipped(token, bit) for bit in range(40, 8 * len(token), 13))]
    for bad in damaged:
        call = routers[1].Attach(inference_pb2.AttachRequest(resume_token=bad))
        calls.append((errors.InvalidArgument, "resume_token", call))
    for bit in range(0, 40, 13):  # of the version and the id of the key
        call = routers[1].Attach(inference_pb2.AttachRequest(resume_token=flipped(token, bit)))
        calls.append((errors.ForeignToken, "", call))
    for error, field, call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call:
                pass
        found = statuses.error_from(raised.value)
        assert type(found) is error, (found, field)
        assert found.metadata.get("field", "") == field


def flipped(token, bit):
    data = bytearray(token)
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)
