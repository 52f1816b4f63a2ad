"""OpenAI's own Python package, unchanged."""

import pytest
from lazily import lazily

openai = lazily("openai")
PROMPT = list(range(3, 40))
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def client(world, templates):
    await world.start()
    async with openai.AsyncOpenAI(
        base_url=f"http://{world.routers[0].http_endpoint}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_completions_and_chats_are_streamed_as_they_are_whole(client):
    options = {"model": "fake", "temperature": 0, "max_tokens": 20}
    whole = await client.completions.create(prompt=PROMPT, logprobs=1, **options)
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.tokens) == 20
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [chunk async for chunk in await client.completions.create(prompt=PROMPT, **options, **usage)]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    asked = {**options, "messages": HI}
    raw = await client.chat.completions.with_raw_response.create(**asked, logprobs=True, top_logprobs=2)
    (choice,) = (whole := raw.parse()).choices
    assert whole.object == "chat.completion" and whole.id.startswith("chatcmpl-")
    assert (raw.headers["x-request-id"], choice.finish_reason) == (whole.id, "length")
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    async with client.chat.completions.stream(**asked) as stream:
        with pytest.raises(openai.LengthFinishReasonError) as caught:  # it has all the tokens
            await stream.get_final_completion()
    assert caught.value.completion.choices[0].message.content == choice.message.content
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model="fake", prompt="x", temperature=11)
    assert refused.value.param == "temperature" and refused.value.request_id
