"""Outputs and schemas that a reader must survive: they cost no more than their length, and are no error of ours."""

import json
import time

import pytest

from octavo.request.errors import InvalidArgument
from octavo.request.sampling import FinishReason
from router.tools.asked_tools import AskedTools, read_choice
from router.tools.call_grammars import forced_grammar
from router.tools.formats import BY_NAME
from router.tools.harmony import HarmonyParser
from router.tools.output_parser import OutputParser
from router.tools.parts import Content
from router.tools.reasoning import BY_NAME as REASONING
from router.tools.reasoning import ReasoningCounter
from router.tools.sections.call_texts import json_calls, keyed_calls, python_calls, xml_calls
from router.tools.tool_message import SLICE, ToolMessage

DEEP = "[" * 200_000 + "]" * 200_000


def test_arguments_without_ends_take_no_long_time():
    begun = time.monotonic()
    keyed_calls("f" + "<arg_key></arg_key><arg_value>" * 1300, {})
    with pytest.raises(ValueError, match="no call"):
        xml_calls("<function=" * 30_000, {})
    assert time.monotonic() - begun < 5


def contents(parts):
    return "".join(part.text for part in parts if isinstance(part, Content))


@pytest.mark.parametrize("parser", [OutputParser(BY_NAME["hermes"], {}), HarmonyParser(has_tools=True)])
def test_white_space_is_not_held_with_what_is_read_again(parser):
    for _ in range(100):
        assert parser.push(" " * 64) == []
        assert len(parser._held) < 64
    assert contents([*parser.push("x"), *parser.finish()]).strip() == "x"
    inside = OutputParser(BY_NAME["hermes"], {})  # of content it stays
    parts = [part for text in ("a", " ", "\n", " <", "b", "  ") for part in inside.push(text)] + inside.finish()
    assert contents(parts) == "a \n <b  "
    counter = ReasoningCounter(b"<think>", b"</think>", False)
    counter.add([b" " * 64] * 100)
    assert counter._text == b""
    counter.add([b"<think>", b"x", b"</think>"])
    assert counter.finish() == 103


def test_a_whole_text_is_divided_in_slices(monkeypatch):
    message = ToolMessage(AskedTools({}), BY_NAME["hermes"], "r", 0, REASONING["think"])
    sizes, push = list[int](), message._parser.push
    monkeypatch.setattr(message._parser, "push", lambda text: (sizes.append(len(text)), push(text))[1])
    text = "x" + "<tool_call>" * 3000
    assert message.whole(text, FinishReason.STOP)["content"] == text
    assert max(sizes) <= SLICE and sum(sizes) == len(text)


def test_surrogates_have_a_form_and_names_with_them_are_none():
    said = r'{"arguments":{"a":"\ud800"},"name":"f"}'
    calls = [*json_calls(said, {}), *python_calls(r'f(a="\ud800")', {})]
    calls += json_calls(json.dumps({"name": "f", "arguments": '{"a":"\ud800"}'}), {})
    assert [json.loads(call.arguments.encode()) for call in calls] == [{"a": "\ud800"}] * 3
    with pytest.raises(ValueError, match="name"):
        json_calls(r'{"name":"\ud800","arguments":{}}', {})


def test_odd_schemas_leave_values_as_texts_and_force_no_call():
    for properties in ([], None, {"a": {"type": None}}, {"a": {"type": 5}}, {"a": 5}):
        (call,) = keyed_calls("f<arg_key>a</arg_key><arg_value>1</arg_value>", {"f": {"properties": properties}})
        assert json.loads(call.arguments) == {"a": "1"}
    (call,) = keyed_calls("f\n<arg_key>a</arg_key>\n<arg_value>x <arg_key> y</arg_value>", {})
    assert json.loads(call.arguments) == {"a": "x <arg_key> y"}, "a value may have the mark of a key"
    odd = ({"required": None}, {"required": [[]]}, {"properties": {"a": {"type": "string", "enum": 5}}})
    for schema in odd:
        with pytest.raises(InvalidArgument):
            forced_grammar(AskedTools({"f": schema}, ("f",)), BY_NAME["glm"], {})
    for mode in ("auto", "required"):
        with pytest.raises(InvalidArgument, match="at least one"):
            read_choice({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": []}}, {"f": ""}, True)


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        *((json_calls, text) for text in ("  ", "7", '{"name": "f", "arguments": "[1]"}', "[" * 100_000)),
        *((python_calls, text) for text in ("f(a={**b})", "f(a={[1]: 2})", "f(1)", f"f(a='{'x' * (1 << 16)}')")),
        (xml_calls, "<function>"),
    ],
)
def test_what_is_no_call_is_said_so(reader, text):
    with pytest.raises(ValueError, match=r"."):
        reader(text, {})


def test_several_calls_and_missing_values_are_read():
    assert [call.name for call in json_calls('[{"name": "f"}, {"name": "g"}]', {})] == ["f", "g"]
    said = "f<arg_key>a</arg_key><arg_key>b</arg_key><arg_value>1</arg_value>"
    assert [json.loads(call.arguments) for call in keyed_calls(said, {})] == [{"b": "1"}]


def test_deep_values_are_no_calls():
    with pytest.raises(ValueError, match="deep"):
        json_calls(json.dumps({"name": "f", "arguments": f'{{"a":{DEEP}}}'}), {})
    with pytest.raises(ValueError, match="deep"):
        keyed_calls(
            f"f<arg_key>a</arg_key><arg_value>{DEEP}</arg_value>", {"f": {"properties": {"a": {"type": "array"}}}}
        )
    with pytest.raises(InvalidArgument):
        read_choice("auto", {"f": f'{{"a":{DEEP}}}'}, True)
