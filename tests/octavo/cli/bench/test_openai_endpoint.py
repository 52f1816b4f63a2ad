"""OpenAI's interface as servers really speak it: what is sent, what is read, and how failures are named."""

import pytest
from scripted_endpoint import chat_events, completion_event, completion_events

from octavo.cli.bench.endpoint_base import BenchRequest, RequestFailed, RequestOptions
from octavo.cli.bench.openai_endpoint import OpenAiEndpoint

TEXT = RequestOptions(temperature=0.0, ignore_eos=True, chat=False)
CHAT = RequestOptions(temperature=0.5, ignore_eos=False, chat=True)


async def parts(server, options=TEXT, prompt="hi", max_tokens=3, **more):
    endpoint = OpenAiEndpoint(server.url, None, options, **more)
    await endpoint.open(5.0)
    try:
        return [part async for part in endpoint.stream(BenchRequest(prompt, max_tokens))]
    finally:
        await endpoint.close()


async def failure(server, **more):
    with pytest.raises(RequestFailed) as caught:
        await parts(server, **more)
    return caught.value.reason, caught.value.message


async def test_a_completion_is_asked_for_and_read(server):
    server.answer = lambda body: completion_events(["a", "b", "c"], usage=3)
    found = await parts(server, extra={"top_k": 1})
    assert [part.text for part in found if part.text] == ["a", "b", "c"]
    assert (found[-1].totals.prompt_tokens, found[-1].totals.output_tokens) == (9, 3)
    assert server.paths == ["/v1/completions"]
    assert server.bodies[0] == {
        "model": "tiny",
        "prompt": "hi",
        "max_tokens": 3,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "top_k": 1,
    }


async def test_a_chat_begins_with_its_first_text(server):
    server.answer = lambda body: chat_events(["a", "b"], usage=2)
    found = await parts(server, CHAT)
    assert found[0].text == ""
    assert "".join(part.text for part in found) == "ab"
    assert server.paths == ["/v1/chat/completions"]
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert "ignore_eos" not in server.bodies[0]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    await parts(server, CHAT, prompt=messages)
    assert server.bodies[1]["messages"] == messages


async def test_failures_have_reasons(server):
    server.status = 429
    assert await failure(server) == ("HTTP 429", "the queue is full")
    server.error = {"error": "plain words"}
    assert await failure(server) == ("HTTP 429", "plain words")
    server.error = ["anything"]
    assert await failure(server) == ("HTTP 429", '["anything"]')
    server.status = 200
    server.answer = lambda body: [completion_event("a")]
    assert (await failure(server))[0] == "stream cut"
    server.answer = lambda body: [completion_event("a"), {"error": {"message": "out of memory"}}]
    assert await failure(server) == ("error event", "out of memory")
    server.answer = lambda body: ["{nonsense"]
    assert await failure(server) == ("bad event", "{nonsense")
