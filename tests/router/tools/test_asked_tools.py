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
from router.tools.asked_tools import AskedTools, read_choice
from router.tools.call_grammars import forced_grammar, strict_grammar
from router.tools.formats import BY_NAME, DEFAULT, FORMATS
from router.tools.reasoning import BY_NAME as REASONING
from router.tools.tool_message import ToolMessage

WEATHER = {
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Rom\u00e9"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
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


FORCED = [each.name for each in FORMATS if each.can_force]


def output_of(rng: random.Random, grammar: str, begin: str = "") -> str:
    """A random output that the grammar lets pass, from a beginning on."""
    constraint = Constraint(Shape.LARK, grammar)
    check_grammar(constraint)
    tokens, matcher = [], Grammars(FakeRunner().info).compile(constraint).matcher()
    for token in begin.encode():
        mask = matcher.mask(tokens, 0)
        assert mask[token >> 3] >> (token & 7) & 1, (begin, len(tokens))
        tokens.append(token)
    while len(tokens) < 600:
        mask = matcher.mask(tokens, 0)
        left = [i for i in range(256) if mask[i >> 3] >> (i & 7) & 1]
        if 0 in left:  # the token of the end
            break
        tokens.append(rng.choice(left))
    return bytes(tokens).decode()


def assert_valid(calls: list[dict]) -> None:
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "weather":
            assert arguments["city"] in ("Oslo", "Rom\u00e9") and 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("name", FORCED)
def test_whatever_a_forced_output_says_is_calls_that_validate(name: str):
    rng, form = random.Random(4), BY_NAME[name]
    tools = read_choice("required", SCHEMAS, True)
    for _ in range(20):
        text = output_of(rng, forced_grammar(tools, form, {}))
        message = ToolMessage(tools, form, "r", 0).whole(text, STOP)
        assert message["content"] is None and message["tool_calls"]
        assert_valid(message["tool_calls"])


@pytest.mark.parametrize("grammar_of", [forced_grammar, strict_grammar])
def test_a_call_has_no_argument_that_its_schema_does_not_name(grammar_of):
    schema = {"properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}}}
    tools = read_choice("required", {"weather": json.dumps(schema)}, False, ["weather"])
    begin = DEFAULT.open_call.replace("NAME", "weather")
    for seed in range(20):
        text = output_of(random.Random(seed), grammar_of(tools, DEFAULT, {}), begin)
        [call] = ToolMessage(tools, DEFAULT, "r", 0).whole(text, STOP)["tool_calls"]
        assert json.loads(call["function"]["arguments"]).keys() <= {"days"}


@pytest.mark.parametrize("inside", [False, True])
def test_reasoning_may_stand_before_a_forced_call(inside: bool):
    tools, think = read_choice("required", SCHEMAS, True), REASONING["think"]
    grammar = forced_grammar(tools, DEFAULT, {}, think, begins_inside=inside)
    begin = "" if inside else "<think>"
    text = output_of(random.Random(1), grammar, f"{begin}a <tool_call> b</think>\n\n<tool_call>")
    message = ToolMessage(tools, DEFAULT, "r", 0, think, begins_inside=inside).whole(text, STOP)
    assert message["reasoning"] == message["reasoning_content"] == "a <tool_call> b"
    assert message["content"] is None
    assert_valid(message["tool_calls"])


@pytest.mark.parametrize("name", [each for each in FORCED if BY_NAME[each].binds_strict])
def test_a_strict_tool_keeps_its_schema_among_other_text(name: str):
    rng, form = random.Random(5), BY_NAME[name]
    tools = read_choice("auto", SCHEMAS, True, ["weather"])
    grammar = strict_grammar(tools, form, {})
    before = "" if form.at_start else "Well, [so] <it> is\n"
    assert output_of(rng, grammar, before + "No: {name").startswith(before)
    begin, num_calls = form.open_call.replace("NAME", "weather"), 0
    for _ in range(10):
        text = output_of(rng, grammar, before + begin)
        message = ToolMessage(tools, form, "r", 0).whole(text, STOP)
        assert_valid(message["tool_calls"])
        num_calls += len(message["tool_calls"])
        assert (message["content"] or "") == before.strip()
    assert num_calls >= 10


def test_special_tokens_stand_in_a_grammar_by_their_names():
    tools = AskedTools({"stop": {}}, ("stop",))
    grammar = forced_grammar(tools, BY_NAME["phi4_mini"], {"<|tool_call|>": 1, "<|/tool_call|>": 2})
    assert 'tool_0: <|tool_call|> "[{\\"name\\": \\"stop\\", \\"arguments\\": " args_0 "}]" <|/tool_call|>' in grammar


def test_a_form_in_python_is_not_forced():
    with pytest.raises(InvalidArgument, match=r"gemma.*cannot be forced"):
        forced_grammar(AskedTools({"stop": {}}, ("stop",)), BY_NAME["gemma"], {})


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
@pytest.mark.parametrize(
    "city", [{"type": "string", "pattern": "x"}, {"anyOf": []}, {"enum": [1]}, {"type": ["string"]}]
)
def test_what_no_mark_can_keep_is_refused_by_name(name, city):
    tools = AskedTools({"weather": {"properties": {"city": city}}}, ("weather",))
    with pytest.raises(InvalidArgument, match=r"tool_choice: .*'weather' says of city"):
        forced_grammar(tools, BY_NAME[name], {})


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
def test_texts_and_values_stand_between_marks(name):
    form, schema = (
        BY_NAME[name],
        {"properties": {"what": {"type": "string"}, "list": {"type": "array"}}, "required": ["what"]},
    )
    tools = AskedTools({"find": schema}, ("find",), is_parallel=False)
    key = form.open_argument.replace("KEY", "what")
    begin, grammar = form.open_call.replace("NAME", "find") + key, forced_grammar(tools, form, {})
    text = output_of(random.Random(3), grammar, begin + 'a "<b>\n' + form.close_argument)
    (call,) = ToolMessage(tools, form, "r", 0).whole(text, STOP)["tool_calls"]
    found = json.loads(call["function"]["arguments"])
    assert found["what"].startswith('a "<b>') and isinstance(found.get("list", []), list)
    for no_text in (*form.no_text, form.close_argument.strip() + "x"):
        with pytest.raises(AssertionError):
            output_of(random.Random(3), grammar, begin + "a " + no_text)


def test_ids_of_calls_follow_from_request_branch_and_place():
    text = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>' * 2
    tools = AskedTools({"stop": {}})
    message = ToolMessage(tools, DEFAULT, "r", 1)
    deltas = [message.delta(piece, NONE) for piece in text] + [message.delta("", STOP)]
    streamed = {}
    for call in [call for delta in deltas for call in delta.get("tool_calls", ())]:
        if (place := call.pop("index")) in streamed:
            assert call.keys() == {"function"} and call["function"].keys() == {"arguments"}
            streamed[place]["function"]["arguments"] += call["function"]["arguments"]
        else:
            streamed[place] = call
    whole = ToolMessage(tools, DEFAULT, "r", 1).whole(text, STOP)["tool_calls"]
    assert list(streamed) == [0, 1] and list(streamed.values()) == whole
    assert len({call["id"] for call in whole}) == 2
    assert whole[0]["id"] != ToolMessage(tools, DEFAULT, "r", 0).whole(text, STOP)["tool_calls"][0]["id"]
