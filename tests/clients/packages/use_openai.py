"""OpenAI's own package for Python: chats, streams, parsed models, tools, completions, responses, vectors."""

import io
import json
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import NamedTemporaryFile

import openai
from cases import ASKED_WHO, BASE, CITY, MODEL, STORY, WHO, case, run
from typed import Person

client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=9)
EVEN = {"model": MODEL, "temperature": 0}


TOOL = {"name": "weather", "description": "The weather of a city", "parameters": CITY, "strict": True}
ASK = {
    "messages": [{"role": "user", "content": "How is the weather in Oslo?"}],
    "tools": [{"type": "function", "function": TOOL}],
}


@case
def chat():
    answer = client.chat.completions.create(messages=STORY, max_tokens=48, **EVEN)
    return answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage.completion_tokens


@case
def stream():
    texts, usage = [], None
    asked = {"max_tokens": 150, "stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.chat.completions.create(messages=STORY, **asked, **EVEN):
        texts += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    return "".join(texts), usage.completion_tokens


@case
def agent_of_the_docs():
    """The program of docs/agents.md, as it stands there but for the address."""
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text(encoding="utf-8")
    program = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    program = re.sub(r"http://[\d.:]+/v1", BASE, program).replace("max_tokens=200", "max_tokens=200, temperature=0")
    with NamedTemporaryFile("w", suffix=".py") as file, redirect_stdout(io.StringIO()):
        file.write(program)
        file.flush()
        made = runpy.run_path(file.name)
    called = [message["content"] for message in made["messages"] if message["role"] == "tool"]
    return called, made["final"].choices[0].message.parsed.model_dump()


@case
def parse_stream():
    with client.chat.completions.stream(messages=ASKED_WHO, response_format=Person, **EVEN) as events:
        return events.get_final_completion().choices[0].message.parsed.model_dump()


@case
def json_object():
    answer = client.chat.completions.create(
        messages=ASKED_WHO, response_format={"type": "json_object"}, max_tokens=200, **EVEN
    )
    return isinstance(json.loads(answer.choices[0].message.content), dict), answer.choices[0].message.content


@case
def tools():
    found = []
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = client.chat.completions.create(tool_choice=choice, **ASK, **EVEN)
        calls = [call.function for call in answer.choices[0].message.tool_calls]
        assert calls and all(
            call.name == "weather" and json.loads(call.arguments)["city"] in ("Oslo", "Rome") for call in calls
        )
        found.append([call.arguments for call in calls])
    return found


@case
def tool_stream():
    with client.chat.completions.stream(tool_choice="required", **ASK, **EVEN) as events:
        [*_, last] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    return last.name, last.parsed_arguments or json.loads(last.arguments)


@case
def completion():
    answer = client.completions.create(prompt="Once upon a time", max_tokens=24, logprobs=2, **EVEN)
    return answer.choices[0].text, answer.choices[0].logprobs.token_logprobs


@case
def responses():
    answer = client.responses.create(input="Tell me of the sea.", max_output_tokens=32, **EVEN)
    more = client.responses.create(input="And of ships.", max_output_tokens=32, previous_response_id=answer.id, **EVEN)
    parsed = client.responses.parse(input=WHO, text_format=Person, **EVEN).output_parsed
    return answer.output_text, more.output_text, parsed.model_dump()


@case
def responses_stream():
    with client.responses.stream(input="Tell me of the sea.", max_output_tokens=100, **EVEN) as events:
        numbers, texts = [], []
        for event in events:
            numbers.append(event.sequence_number)
            texts += [event.delta] if event.type == "response.output_text.delta" else []
        assert numbers == list(range(len(numbers)))
    return "".join(texts), len(numbers)


@case
def vectors():
    answer = client.embeddings.create(model=MODEL, input=["The sea.", "A ship."], dimensions=8)
    return [item.embedding for item in answer.data]


@case
def errors():
    try:
        client.chat.completions.create(**{**EVEN, "temperature": 11}, messages=STORY)
    except openai.BadRequestError as error:
        return error.code, error.param


run(
    parse=lambda: (
        client.chat.completions.parse(messages=ASKED_WHO, response_format=Person, **EVEN)
        .choices[0]
        .message.parsed.model_dump()
    ),
)
