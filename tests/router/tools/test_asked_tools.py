"""Forced calls: whatever a model would rather say, what comes are calls that validate."""

import json
import random

import pytest

from gpu_worker.constraints.grammars import Grammars
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.errors import InvalidArgument
from octavo.request.sampling import Constraint, Shape
from octavo.text.grammar import check_grammar
from octavo.v1 import types_pb2
from router.tools.asked_tools import AskedTools, forced_grammar, read_choice
from router.tools.formats import BY_NAME, DEFAULT, FORMATS
from router.tools.tool_message import ToolMessage

WEATHER = {
    "properties": {"city": {"enum": ["Oslo", "Rom\u00e9"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": json.dumps(WEATHER), "stop": '{"additionalProperties": false}'}
STOP, NONE = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_UNSPECIFIED


@pytest.mark.parametrize(
    ("choice", "forced", "is_parallel"),
    [
        (None, (), True),
        ("auto", (), True),
        ("required", ("weather", "stop"), True),
        ({"type": "function", "function": {"name": "stop"}}, ("stop",), False),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"name": "stop"}]}}, (), True),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "stop"}}]}},
            ("stop",),
            True,
        ),
    ],
)
def test_a_choice_says_what_must_be_called(choice, forced, is_parallel):
    asked = read_choice(choice, SCHEMAS, True)
    assert (asked.forced, asked.is_parallel) == (forced, is_parallel)


def test_no_tool_may_be_called_where_none_is_there_or_the_choice_says_so():
    assert read_choice("none", SCHEMAS, True) is read_choice("auto", {}, True) is None
    for choice, schemas in (("required", {}), ("never", SCHEMAS), (3, SCHEMAS), ({"name": "weather"}, SCHEMAS)):
        with pytest.raises(InvalidArgument) as caught:
            read_choice(choice, schemas, True)
        assert caught.value.field == "tool_choice"


@pytest.mark.parametrize("name", [each.name for each in FORMATS if each.can_force])
def test_whatever_a_forced_output_says_is_calls_that_validate(name: str):
    rng, form = random.Random(4), BY_NAME[name]
    tools = read_choice("required", SCHEMAS, True)
    constraint = Constraint(Shape.LARK, forced_grammar(tools, form, []))
    check_grammar(constraint)
    grammar = Grammars(FakeRunner().info).compile(constraint)
    for _ in range(20):
        tokens, matcher = [], grammar.matcher()
        while len(tokens) < 600:
            mask = matcher.mask(tokens, 0)
            left = [i for i in range(256) if mask[i >> 3] >> (i & 7) & 1]
            if 0 in left:
                break
            tokens.append(rng.choice(left))
        message = ToolMessage(tools, form, "r", 0).whole(bytes(tokens).decode(), STOP)
        assert message["content"] is None and message["tool_calls"]
        for call in message["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "weather":
                assert arguments["city"] in ("Oslo", "Rom\u00e9") and 1 <= arguments["days"] <= 9


def test_special_tokens_stand_in_a_grammar_by_their_names():
    tools = AskedTools({"stop": {}}, ("stop",))
    grammar = forced_grammar(tools, BY_NAME["phi4_mini"], ["<|tool_call|>", "<|/tool_call|>"])
    assert 'tool_0: <|tool_call|> "[{\\"name\\": \\"stop\\", \\"arguments\\": " args_0 "}]" <|/tool_call|>' in grammar


def test_a_form_whose_arguments_are_no_json_is_not_forced():
    with pytest.raises(InvalidArgument, match=r"glm.*cannot be forced"):
        forced_grammar(AskedTools({"stop": {}}, ("stop",)), BY_NAME["glm"], [])


def test_ids_of_calls_follow_from_request_branch_and_place():
    text = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>' * 2
    tools = AskedTools({"stop": {}})
    message = ToolMessage(tools, DEFAULT, "r", 1)
    deltas = [message.delta(piece, NONE) for piece in text] + [message.delta("", STOP)]
    streamed = [call for delta in deltas for call in delta.get("tool_calls", ())]
    whole = ToolMessage(tools, DEFAULT, "r", 1).whole(text, STOP)["tool_calls"]
    assert [call.pop("index") for call in streamed] == [0, 1] and streamed == whole
    assert len({call["id"] for call in whole}) == 2
    assert whole[0]["id"] != ToolMessage(tools, DEFAULT, "r", 0).whole(text, STOP)["tool_calls"][0]["id"]
