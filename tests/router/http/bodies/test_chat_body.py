"""POST /v1/chat/completions: bodies, and answers in the shape of chats."""

import json

import pytest

from octavo.text.chat import ChatTemplate
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer
from router.http.bodies.chat_body import read_chat

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "description": "tells", "parameters": {"type": "object"}}}


async def test_tools_calls_and_further_fields_get_to_the_template(templates, post):
    made = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"where": "Oslo"}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": None, "mood": {"calm": 1}, "x": None},
        {"role": "assistant", "content": None, "tool_calls": [made], "refusal": None},
        {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "weather"},
    ]
    answer = await post(PATH, {"messages": messages, "tools": [TOOL], "tool_choice": "auto", "max_tokens": 2})
    assert answer.status == 200
    ((turns, begins, tools, details, _),) = templates
    assert turns == [("system", "Be\nbrief"), ("user", ""), ("assistant", ""), ("tool", "rain")]
    assert begins and tools == [TOOL]
    assert details[1] == {"mood": {"calm": 1}}
    assert details[2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"where": "Oslo"}}
    assert details[3] == {"tool_call_id": "c1", "name": "weather"}
    await post(PATH, {"messages": HI, "tools": [TOOL], "tool_choice": "none", "max_tokens": 2})
    assert templates[-1][2:4] == ([], [])
    deep = json.loads("[" * 40 + "]" * 40)
    refused = await post(PATH, {"messages": [{"role": "user", "content": "x", "mood": deep}], "max_tokens": 2})
    assert (refused.status, refused.error["param"]) == (400, "messages[0]")


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


def test_a_body_becomes_the_request_that_grpc_takes():
    usual = {"response_format": {"type": "text"}, "user": "u", "tools": [{"function": {"name": "now"}}]}
    asked = read_chat(
        {"messages": HI, "seed": -1, "stop": "x", "n": 2.0, "top_k": -1, "tool_choice": "required", **usual}
    )
    request = asked.request
    assert (request.sampling.seed, list(request.sampling.stop), request.sampling.n) == (2**64 - 1, ["x"], 2)
    assert request.sampling.HasField("top_k") and request.sampling.top_k == 0
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [("user", "Hi")]
    assert not request.sampling.HasField("top_p") and not request.sampling.HasField("constraint")
    assert asked.tools.schemas["now"] == {"type": "object", "properties": {}, "additionalProperties": False}
