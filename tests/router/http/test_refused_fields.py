"""What would change an answer is refused by the name of its field, in the bodies of all three APIs for chats."""

import json

import pytest

from octavo.request.errors import InvalidArgument
from router.http.bodies.chat_body import read_chat
from router.http.messages.message_body import read_message
from router.http.responses.response_body import read_response

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
OF_MESSAGES = {"name": "weather", "input_schema": {"type": "object"}}
OF_RESPONSES = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
NAMED = {"type": "function", "function": {"name": "x"}}
REGEX = {"structured_outputs": {"regex": "a"}}
DEEP = json.loads("[" * 40 + "]" * 40)


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
    ({"include_reasoning": "no"}, "include_reasoning"),
]
MESSAGES = [
    ({"max_tokens": None}, "max_tokens"),
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
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [OF_RESPONSES], "tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_object"}}, **REGEX}, "text.format.type"),
    ({"truncation": "auto"}, "truncation"),
    ({"background": True, "store": False}, "background"),
    ({"metadata": {"a": 1}}, "metadata.a"),
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
    ],
)
def test_what_would_change_the_answer_is_refused(read, usual, rows):
    for more, field in rows:
        with pytest.raises(InvalidArgument) as caught:
            read(usual | more)
        assert caught.value.field == field
