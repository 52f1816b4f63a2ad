"""Several prompts in one completion, against routers and workers in this process."""

import json

import pytest

from octavo.request.record import SequenceState

PATH = "/v1/completions"
PROMPTS = ["Once", "Twice", "é", "Once upon"]
BODY = {"temperature": 0, "max_tokens": 12}


def one_of(answer, field):
    return [choice[field] for choice in answer["choices"]]


@pytest.mark.parametrize("more", [{}, {"n": 2, "temperature": 0.9, "seed": 3}, {"echo": True, "logprobs": 1}])
async def test_choices_are_those_of_a_request_for_each(more, post):
    each = [(await post(PATH, {**BODY, **more, "prompt": prompt})).object for prompt in PROMPTS]
    whole = (await post(PATH, {**BODY, **more, "prompt": PROMPTS})).object
    assert one_of(whole, "text") == [text for answer in each for text in one_of(answer, "text")]
    assert one_of(whole, "logprobs") == [scores for answer in each for scores in one_of(answer, "logprobs")]
    assert one_of(whole, "index") == [*range(len(PROMPTS) * more.get("n", 1))]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert whole["usage"][name] == sum(answer["usage"][name] for answer in each)
    body = {**BODY, **more, "prompt": PROMPTS, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = (await post(PATH, body)).chunks
    texts = dict.fromkeys(range(len(whole["choices"])), "")
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert [*texts.values()] == one_of(whole, "text")
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    ids = (await post(PATH, {**BODY, "prompt": [[*prompt.encode()] for prompt in PROMPTS]})).object
    if not more:
        assert one_of(ids, "text") == one_of(whole, "text")


async def test_each_goes_on_by_itself_and_a_name_finds_all(call, post):
    body = {**BODY, "prompt": PROMPTS, "temperature": 1}
    first, again = [(await post(PATH, body, idempotency_key="mine")).object for _ in range(2)]
    assert first["choices"] == again["choices"]
    for place in range(len(PROMPTS)):
        path = "/v1/requests/mine" + (f"-{place}" if place else "")
        found = (await call("GET", path)).object
        assert one_of(found, "text") == [first["choices"][place]["text"]]
    chunks = (await post(PATH, {**BODY, "prompt": PROMPTS, "stream": True})).chunks
    mine = [chunk for chunk in chunks if chunk["choices"][0]["index"] == 2]
    rest = await call("GET", f"/v1/requests/{chunks[0]['id']}-2?stream=true&after={mine[0]['resume_token']}")
    text = "".join(chunk["choices"][0]["text"] for chunk in rest.chunks if chunk["choices"])
    assert text == "".join(chunk["choices"][0]["text"] for chunk in mine[1:])


async def test_a_client_that_leaves_cancels_all(world, connect):
    await world.start(step_s=0.02)
    connection = await connect()
    connection.send("POST", PATH, {"prompt": PROMPTS, "max_tokens": 4000, "ignore_eos": True, "stream": True})
    status, _ = await connection.head()
    assert status == 200
    assert json.loads((await connection.chunk()).split(b"\n\n")[0].removeprefix(b"data: "))["id"]
    await connection.close()
    states = {SequenceState.CANCELLED}
    await world.until(lambda: {e.record.state for e in world.entries} == states and len(world.entries) == len(PROMPTS))
    await world.until(lambda: not world.routers[0]._opener.num_sessions)
    await world.until_nothing_left()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_queue_that_holds_some_of_them_holds_none(world, call, stream):
    await world.start(router={"max_queued_requests": 2})
    world.routers[0].dispatcher._room_left = lambda model: 0
    answer = await call("POST", PATH, {**BODY, "prompt": PROMPTS, "stream": stream})
    assert (answer.status, answer.error["code"]) == (429, "queue_full")
    await world.until(lambda: [e.record.state for e in world.entries] == [SequenceState.CANCELLED] * 2)
