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


async def test_completions(client):
    whole = await client.completions.create(model="fake", prompt=PROMPT, temperature=0, max_tokens=20, logprobs=1)
    assert whole.usage.completion_tokens == 20
    assert len(whole.choices[0].logprobs.tokens) == 20
    stream = await client.completions.create(
        model="fake", prompt=PROMPT, temperature=0, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens


async def test_chats(client):
    options = {"model": "fake", "messages": HI, "temperature": 0, "max_completion_tokens": 10}
    raw = await client.chat.completions.with_raw_response.create(**options, logprobs=True, top_logprobs=2)
    whole = raw.parse()
    assert raw.headers["x-request-id"] == whole.id
    assert whole.choices[0].finish_reason == "length"
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    chunks = [chunk async for chunk in await client.chat.completions.create(**options, stream=True)]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content


async def test_the_package_assembles_a_streamed_chat(client):
    async with client.chat.completions.stream(model="fake", messages=HI, max_tokens=5) as stream:
        with pytest.raises(openai.LengthFinishReasonError) as caught:  # it has the five tokens
            await stream.get_final_completion()
    assert caught.value.completion.choices[0].message.role == "assistant"


async def test_errors_are_those_of_the_package(client):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="fake", prompt="x", temperature=11)
    assert caught.value.param == "temperature"
    assert caught.value.request_id
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="gpt-5", messages=HI)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.embeddings.create(model="fake", input=["x", ""])
    assert caught.value.param == "input[1]"
