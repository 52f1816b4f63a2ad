"""Tools and their calls, as chat templates get them."""

import json

import pytest

from octavo.request.chat_tools import (
    MAX_TOOLS,
    MessageDetails,
    Tool,
    ToolCall,
    details_for_template,
    tools_for_template,
)
from octavo.request.errors import InvalidArgument


def test_tools_and_calls_have_the_form_that_templates_expect():
    tools = tools_for_template([Tool("weather", "tells", '{"type": "object"}'), Tool("time", "", "")], max_bytes=100)
    assert tools == [
        {"type": "function", "function": {"name": "weather", "description": "tells", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "time"}},
    ]
    details = details_for_template(
        [MessageDetails(), MessageDetails("ann", "c1", [ToolCall("c2", "weather", '{"where": 1}')])], max_bytes=100
    )
    call = {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": {"where": 1}}}
    assert details == [{}, {"name": "ann", "tool_call_id": "c1", "tool_calls": [call]}]


DEEP = ['{"a":' * 50 + "1" + "}" * 50, '{"a":' * 5000 + "1" + "}" * 5000]
PARAMETERS = ["{", "[]", '{"a": NaN}', '{"a": "\\ud800"}', *DEEP]
REFUSED = [
    *((Tool(name, "", ""), "chat.tools[0].name") for name in ("<|im_end|>", "")),
    *((Tool("x", "", text), "chat.tools[0].parameters_json") for text in PARAMETERS),
    (Tool("x", "y" * 100_000, ""), "chat.tools"),
    *((text, "chat.messages[0].tool_calls[0].arguments_json") for text in ("[1]", *DEEP, '{"a": NaN}')),
]


@pytest.mark.parametrize(("given", "field"), REFUSED, ids=range(len(REFUSED)))
def test_a_tool_or_a_call_that_cannot_be_one_is_refused_by_name(given, field):
    with pytest.raises(InvalidArgument) as caught:
        if isinstance(given, Tool):
            tools_for_template([given], max_bytes=90_000)
        else:
            details_for_template([MessageDetails(tool_calls=[ToolCall("", "x", given)])], max_bytes=100_000)
    assert caught.value.field == field


def test_tools_calls_and_their_bytes_are_bounded():
    with pytest.raises(InvalidArgument, match="too many"):
        tools_for_template([Tool("x", "", "")] * (MAX_TOOLS + 1), max_bytes=10_000)
    call = ToolCall("", "x", json.dumps({"a": "b" * 100}))
    with pytest.raises(InvalidArgument, match="cannot fit"):
        details_for_template([MessageDetails(tool_calls=[call])], max_bytes=50)
    with pytest.raises(InvalidArgument, match="too many"):
        details_for_template([MessageDetails(tool_calls=[call] * (MAX_TOOLS + 1))], max_bytes=10**6)


@pytest.mark.parametrize("text", ['{"city": "Os', "x", '{"a": 1} b'])
def test_arguments_that_a_model_wrote_as_no_json_get_to_the_template_as_they_are(text):
    (shown,) = details_for_template([MessageDetails(tool_calls=[ToolCall("", "x", text)])], max_bytes=100)
    assert shown["tool_calls"][0]["function"]["arguments"] == text
