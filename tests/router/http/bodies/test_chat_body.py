"""POST /v1/chat/completions: bodies, and answers in the shape of chats."""

import asyncio
import json

import pytest
from hostile_templates import HOSTILE

from octavo.request.errors import InvalidArgument
from octavo.text import template_renderer
from octavo.text.chat import ChatTemplate
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer
from octavo.v1 import inference_pb2
from router.http.bodies.chat_body import read_chat
from router.streaming.prompts.chat_threads import LARGE

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "description": "tells", "parameters": {"type": "object"}}}


async def test_a_chat_is_answered_whole_and_in_chunks(world, call, templates):
    await world.start()
    body = {"messages": HI, "temperature": 0, "max_completion_tokens": 12}
    whole = (await call("POST", PATH, body)).object
    assert whole["object"] == "chat.completion"
    assert whole["id"].startswith("chatcmpl-")
    (choice,) = whole["choices"]
    assert choice["message"]["role"] == "assistant"
    assert whole["usage"]["completion_tokens"] == 12
    chunks = (await call("POST", PATH, {**body, "stream": True})).chunks
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert "".join(delta["content"] for delta in deltas) == choice["message"]["content"]


async def test_a_hostile_template_costs_its_caller_alone(world, call, monkeypatch):
    """Its chats are refused, and a chat of another size goes on meanwhile."""
    monkeypatch.setattr(template_renderer, "SECONDS", 2.0)
    hostile, honest = ChatTemplate(HOSTILE["=="], {}), ChatTemplate("{{ messages[0].content }}", {})

    def apply_chat(self, messages, begin_answer=True, tools=(), details=()):
        template = hostile if len(messages[0][1]) > LARGE else honest
        return self.encode(template.render(messages, begin_answer))

    monkeypatch.setattr(ByteTokenizer, "apply_chat", apply_chat)
    await world.start()
    body = {"messages": [{"role": "user", "content": "x" * (LARGE + 1)}], "max_tokens": 3}
    refused = asyncio.create_task(call("POST", PATH, body))
    answers = [await call("POST", PATH, {"messages": HI, "max_tokens": 3}) for _ in range(3)]
    assert [answer.status for answer in answers] == [200] * 3
    assert not refused.done()
    assert (await refused).status == 400
    assert "takes more than 2.0 s" in refused.result().object["error"]["message"]


async def test_a_continued_chat_has_the_shape_of_chats(world, call, templates):
    await world.start()
    whole = (await call("POST", PATH, {"messages": HI, "temperature": 0, "max_tokens": 9})).object
    again = (await call("GET", f"/v1/requests/{whole['id']}")).object
    assert {**again, "created": 0} == {**whole, "created": 0}
    other = (await call("GET", f"/v1/requests/{whole['id']}?chat=false")).object
    assert other["choices"][0]["text"] == whole["choices"][0]["message"]["content"]


async def test_tools_and_their_calls_get_to_the_template(world, call, templates):
    await world.start()
    made = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"where": "Oslo"}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}]},
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [made], "refusal": None},
        {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "weather"},
    ]
    answer = await call("POST", PATH, {"messages": messages, "tools": [TOOL], "tool_choice": "auto", "max_tokens": 2})
    assert answer.status == 200
    ((turns, begins, tools, details, _),) = templates
    assert turns == [("system", "Be\nbrief"), ("user", "Hi"), ("assistant", ""), ("tool", "rain")]
    assert begins
    assert tools == [TOOL]
    assert details[2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"where": "Oslo"}}
    assert details[3] == {"tool_call_id": "c1", "name": "weather"}
    await call("POST", PATH, {"messages": HI, "tools": [TOOL], "tool_choice": "none", "max_tokens": 2})
    assert templates[-1][2:4] == ([], [])


async def test_further_fields_of_messages_get_to_the_template(world, call, templates):
    await world.start()
    messages = [{"role": "user", "content": None, "mood": {"calm": 1}, "x": None}]
    assert (await call("POST", PATH, {"messages": messages, "max_tokens": 2})).status == 200
    assert templates[-1][0] == [("user", "")]
    assert templates[-1][3] == [{"mood": {"calm": 1}}]
    deep = json.loads("[" * 40 + "]" * 40)
    refused = await call("POST", PATH, {"messages": [{"role": "user", "content": "x", "mood": deep}], "max_tokens": 2})
    assert (refused.status, refused.error["param"]) == (400, "messages[0]")
    assert "32 deep" in refused.error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_is_continued_and_echoed(world, call, monkeypatch, stream):
    template = ChatTemplate("{% for each in messages %}[{{ each.content }}]{% endfor %}", {})

    def apply_chat(self, messages, begin_answer=True, tools=(), details=(), continue_final_message=False):
        return self.encode(template.render(messages, begin_answer, tools, details, {}, continue_final_message))

    monkeypatch.setattr(ByteTokenizer, "apply_chat", apply_chat)
    await world.start()
    turns = [*HI, {"role": "assistant", "content": "It is"}]
    body = {"messages": turns, "temperature": 0, "max_tokens": 5, "continue_final_message": True, "echo": True}
    answer = await call("POST", PATH, {**body, "stream": stream})
    plain = (await call("POST", "/v1/completions", {"prompt": "[Hi][It is", "temperature": 0, "max_tokens": 5})).object
    if stream:
        text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in answer.chunks)
    else:
        text = answer.object["choices"][0]["message"]["content"]
    assert text == "It is" + plain["choices"][0]["text"]
    both = await call("POST", PATH, {**body, "add_generation_prompt": True})
    assert (both.status, both.error["param"]) == (400, "continue_final_message")


async def test_models_without_a_template_refuse_chats(world, call):
    await world.start()
    answer = await call("POST", PATH, {"messages": HI})
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert "chat template" in answer.error["message"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": [7]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
        ({"echo": "yes"}, "echo"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"priority": 1.5}, "priority"),
        ({"top_k": -2}, "top_k"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"function_call": {"name": "x"}}, "function_call"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"functions": []}, "functions"),
    ],
)
def test_fields_that_change_answers_are_refused(more, param):
    with pytest.raises(InvalidArgument) as caught:
        read_chat({"messages": HI, **more})
    assert caught.value.field == param


@pytest.mark.parametrize(
    ("body", "shape", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {}}}},
         "json_schema", "{}"),
        ({"structured_outputs": {"json": '{"type": "integer"}'}}, "json_schema", '{"type": "integer"}'),
        ({"structured_outputs": {"json": {"type": "integer"}}}, "json_schema", '{"type": "integer"}'),
        ({"structured_outputs": {"json": '{"properties": {}}'}}, "json_schema",
         '{"properties": {}, "additionalProperties": false}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {}}}}},
         "json_schema", '{"properties": {}, "additionalProperties": false}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"grammar": "start: A"}}, "lark", "start: A"),
        ({"structured_outputs": {"json_object": True}}, "json_object", True),
        ({"structured_outputs": {"choice": ["a", "é"]}}, "choice", ["a", "é"]),
    ],
)  # fmt: skip
def test_forms_of_outputs_become_constraints(body, shape, value):
    constraint = read_chat({"messages": HI, **body}).request.sampling.constraint
    assert constraint.WhichOneof("shape") == shape
    found = getattr(constraint, shape)
    assert (list(found.texts) if shape == "choice" else found) == value


def test_a_tool_without_parameters_is_called_without_arguments():
    asked = read_chat(
        {"messages": HI, "tools": [{"type": "function", "function": {"name": "now"}}], "tool_choice": "required"}
    )
    assert asked.tools.schemas["now"] == {"type": "object", "properties": {}, "additionalProperties": False}


def test_a_body_becomes_the_request_that_grpc_takes():
    asked = read_chat(
        {
            "model": "m",
            "messages": HI,
            "temperature": 0.5,
            "seed": -1,
            "stop": "x",
            "n": 2.0,
            "logit_bias": {"7": -100},
            "presence_penalty": 1,
            "response_format": {"type": "text"},
            "user": "u",
            "stream": True,
            "stream_options": {"include_usage": True, "include_obfuscation": False},
            "priority": "bulk",
            "request_id": "r",
        }
    )
    request = asked.request
    assert (asked.stream, asked.include_usage, asked.chosen_id) == (True, True, True)
    assert (request.model, request.request_id, request.priority) == ("m", "r", inference_pb2.PRIORITY_BULK)
    assert request.sampling.seed == 2**64 - 1
    assert list(request.sampling.stop) == ["x"]
    assert request.sampling.n == 2
    assert dict(request.sampling.logit_bias) == {7: -100.0}
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [("user", "Hi")]
    assert not request.sampling.HasField("top_p") and not request.sampling.HasField("constraint")


def test_texts_and_pictures_of_a_message_are_parts_in_their_order():
    url = "data:image/png;base64,AAAA"
    content = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "text", "text": "b"},
    ]
    [message] = read_chat({"messages": [{"role": "user", "content": content}]}).request.chat.messages
    assert [part.WhichOneof("part") for part in message.parts] == ["text", "picture_url", "text"]
    assert message.parts[1].picture_url == url and not message.content
