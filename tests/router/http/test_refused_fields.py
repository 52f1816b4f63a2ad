"""What would change an answer is refused by the name of its field, in the bodies of all three APIs for chats."""

import functools
import json

import pytest

from octavo.request.errors import InvalidArgument
from router.http import requests
from router.http.bodies.chat_body import read_chat
from router.http.bodies.completion_body import read_completion
from router.http.messages.message_body import read_message
from router.http.responses import stored_endpoint
from router.http.responses.response_body import read_response

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
OF_MESSAGES = {"name": "weather", "input_schema": {"type": "object"}}
OF_RESPONSES = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
NAMED = {"type": "function", "function": {"name": "x"}}
REGEX = {"structured_outputs": {"regex": "a"}}
DEEP = json.loads("[" * 40 + "]" * 40)
DEEPEST = functools.reduce(lambda inner, _: [inner], range(100_000), [])


def said(*parts, role="user"):
    return {"messages": [{"role": role, "content": list(parts)}]}


CHAT = [
    ({"messages": None}, "messages"),
    ({"messages": [7]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (said({"type": "image_url"}), "messages[0].content[0].image_url"),
    ({"messages": [{"role": "assistant", "content": "x", "reasoning": 3}]}, "messages[0].reasoning"),
    ({"echo": "yes"}, "echo"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"priority": 1.5}, "priority"),
    ({"top_k": -2}, "top_k"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": NAMED}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
    ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
    ({**REGEX, "response_format": {"type": "json_object"}}, "response_format"),
    ({"function_call": {"name": "x"}}, "function_call"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"functions": []}, "functions"),
    ({"reasoning_effort": "most"}, "reasoning_effort"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"x": "y" * (16 << 10)}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"x": DEEP}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"x": DEEPEST}}, "chat_template_kwargs"),
    ({"include_reasoning": "no"}, "include_reasoning"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"json": {"x": "\ud800"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"properties": {"x": DEEPEST}}}}, "structured_outputs.json"),
    ({"bad_words": 7}, "bad_words"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias"),
    (
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": DEEPEST}}]},
        "tools[0].function.parameters",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages[0].tool_calls[0].function"),
]
MESSAGES = [
    ({"max_tokens": None}, "max_tokens"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"system": "\ud800"}, "system"),
    (said({"type": "image", "source": {"type": "file"}}), "messages[0].content[0].source.type"),
    (said({"type": "image", "source": {"type": "base64", "data": "eA=="}}), "messages[0].content[0].source.media_type"),
    (said({"type": "image", "source": {"type": "url"}}), "messages[0].content[0].source.url"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    (said({"type": "image"}), "messages[0].content[0].source"),
    (said({"type": "tool_use"}), "messages[0].content[0]"),
    (said("x", role="robot"), "messages[0].role"),
    ({"messages": [*HI, {"role": "assistant", "content": "x"}]}, "messages"),
    (said({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [OF_MESSAGES], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    ({"tools": [OF_MESSAGES], "tool_choice": "auto"}, "tool_choice"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"n": 2}, "n"),
    ({"thinking": {"type": "deep"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}}}, **REGEX}, "output_config.format.type"),
    ({"mood": 1}, "mood"),
]
RESPONSES = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": said({"type": "input_image"})["messages"]}, "input[0].content[0].image_url"),
    ({"input": said({"type": "input_image", "file_id": "f"})["messages"]}, "input[0].content[0].file_id"),
    ({"input": said({"type": "input_image", "detail": "fine"})["messages"]}, "input[0].content[0].detail"),
    ({"input": said({"type": "refusal", "refusal": 7})["messages"]}, "input[0].content[0].refusal"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": "x", "id": "i" * 129}]}, "input[0].id"),
    ({"input": [{"type": "reasoning", "content": 7}]}, "input[0].content"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [7]}, "tools[0]"),
    ({"tools": [OF_RESPONSES], "tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"tools": [OF_RESPONSES], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    ({"tools": [OF_RESPONSES], "tool_choice": {"type": "allowed_tools", "tools": [{"name": "x"}]}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_object"}}, **REGEX}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format.schema"),
    ({"truncation": "auto"}, "truncation"),
    ({"background": True, "store": False}, "background"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {"a" * 65: "x"}}, "metadata"),
    ({"conversation": "c"}, "conversation"),
    ({"n": 2}, "n"),
    ({"mood": 1}, "mood"),
    ({"reasoning": {"effort": "a lot"}}, "reasoning_effort"),
]


@pytest.mark.parametrize(
    ("read", "usual", "rows"),
    [
        (read_chat, {"messages": HI}, CHAT),
        (read_message, {"messages": HI, "max_tokens": 3}, MESSAGES),
        (read_response, {"input": "x"}, RESPONSES),
        (read_completion, {"prompt": "x"}, [({"echo": True, "best_of": 2, "stream": True}, "echo")]),
    ],
)
def test_what_would_change_the_answer_is_refused(read, usual, rows):
    for more, field in rows:
        with pytest.raises(InvalidArgument) as caught:
            read(usual | more)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("read", "refused", "field"),
    [
        *((requests.query_of, text, "query") for text in (b"&" * 99, b"echo=1&echo=0", b"mood=1")),
        *((stored_endpoint.query_of, text, field) for text, field in ((b"&" * 99, "query"), (b"mood=1", "mood"))),
        (stored_endpoint.query_of, b"stream=maybe", "stream"),
    ],
)
def test_a_query_is_refused_as_a_body_is(read, refused, field):
    with pytest.raises(InvalidArgument) as caught:
        read({"query_string": refused})
    assert caught.value.field == field


def test_places_in_lists_and_streams_are_refused_by_name():
    for place in ("9" * 10, "1,-1", "no token"):
        with pytest.raises(InvalidArgument, match=r"^after: "):
            requests.attach_request("r", place)
    for query, field in (({"order": "up"}, "order"), ({"limit": "101"}, "limit"), ({"limit": "x"}, "limit")):
        with pytest.raises(InvalidArgument, match=f"^{field}: "):
            stored_endpoint.listed([], query)
