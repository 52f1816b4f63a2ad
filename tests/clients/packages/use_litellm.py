"""LiteLLM as a library: chats, streams, schemas, tools, completions, responses, vectors, scores; also as Anthropic."""

import json

import litellm
from cases import ASKED_WHO, BASE, CITY, MODEL, ROUTER, STORY, case, run
from typed import Person

OPENAI = {"model": f"openai/{MODEL}", "api_base": BASE, "api_key": "none", "num_retries": 9}
EVEN = {**OPENAI, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather of a city", "parameters": CITY}}


def text_of(stream):
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


@case
def chat():
    answer = litellm.completion(messages=STORY, max_tokens=40, **EVEN)
    return answer.choices[0].message.content, answer.usage.completion_tokens


@case
def anthropic_stream():
    asked = {"model": f"anthropic/{MODEL}", "api_base": ROUTER, "api_key": "none", "temperature": 0, "max_tokens": 60}
    return text_of(litellm.completion(messages=STORY, stream=True, **asked))


@case
def schema():
    text = litellm.completion(messages=ASKED_WHO, response_format=Person, **EVEN).choices[0].message.content
    return Person.model_validate_json(text).model_dump()


@case
def tools():
    question = [{"role": "user", "content": "How is the weather in Oslo?"}]
    answer = litellm.completion(messages=question, tools=[TOOL], tool_choice="required", **EVEN).choices[0].message
    assert answer.tool_calls
    return [(call.function.name, json.loads(call.function.arguments)["city"]) for call in answer.tool_calls]


@case
def completion():
    asked = {**EVEN, "model": f"text-completion-openai/{MODEL}"}
    return litellm.text_completion(prompt="Once upon a time", max_tokens=24, **asked).choices[0].text


@case
def responses():
    answer = litellm.responses(input="Tell me of the sea.", max_output_tokens=32, **EVEN)
    return [part.text for item in answer.output if item.type == "message" for part in item.content]


@case
def scores():
    asked = {"model": f"hosted_vllm/{MODEL}", "api_base": BASE, "api_key": "none"}
    return [item["index"] for item in litellm.rerank(query="The sea", documents=["A cat.", "A ship."], **asked).results]


run(
    stream=lambda: text_of(litellm.completion(messages=STORY, max_tokens=100, stream=True, **EVEN)),
    hosted_vllm=lambda: (
        litellm.completion(messages=STORY, max_tokens=24, **{**EVEN, "model": f"hosted_vllm/{MODEL}"})
        .choices[0]
        .message.content
    ),
    vectors=lambda: [item["embedding"][:8] for item in litellm.embedding(input=["The sea.", "A ship."], **OPENAI).data],
)
