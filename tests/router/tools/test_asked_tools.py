"""Forced calls: whatever a model would rather say, what comes are calls that validate."""

import json
import random
import re
from dataclasses import replace

import pytest
import tokenizers
from effort import draws
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from gpu_worker.constraints.grammars import Grammars
from gpu_worker.testing.fake_runner import FakeRunner, allowed_by
from octavo.request.errors import InvalidArgument
from octavo.request.sampling import Constraint, Shape
from octavo.text.detokenizer import byte_alphabet
from octavo.text.grammar import check_grammar
from octavo.text.tokenizers.tokenizer import open_tokenizer
from octavo.v1 import types_pb2
from router.tools.asked_tools import AskedTools, read_choice
from router.tools.call_grammars import calls_grammar, forced_grammar, strict_grammar
from router.tools.formats import BY_NAME, DEFAULT, FORMATS
from router.tools.output_forms import Division
from router.tools.output_parser import OutputParser
from router.tools.parts import CallArguments
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


def named(tool, **outer):
    return {"type": "allowed_tools", "allowed_tools": {"tools": [tool], **outer}}


def test_a_choice_says_what_must_be_called():
    for choice, forced, is_parallel in (
        (None, (), True),
        ("auto", (), True),
        ("required", ("weather", "stop"), True),
        ({"type": "function", "function": {"name": "stop"}}, ("stop",), False),
        (named({"name": "stop"}, mode="auto"), (), True),
        (named({"function": {"name": "stop"}}, mode="required"), ("stop",), True),
    ):
        asked = read_choice(choice, SCHEMAS, True)
        assert (asked.forced, asked.is_parallel) == (forced, is_parallel)
    assert read_choice("none", SCHEMAS, True) is read_choice("auto", {}, True) is None
    for choice, schemas in (("required", {}), ("never", SCHEMAS), (3, SCHEMAS), ({"name": "weather"}, SCHEMAS)):
        with pytest.raises(InvalidArgument) as caught:
            read_choice(choice, schemas, True)
        assert caught.value.field == "tool_choice"


FORCED = [each.name for each in FORMATS if each.can_force]


def message_of(form, tools, text):
    return ToolMessage(tools, form, "r", 0).whole(text, STOP)


class Writer:
    """Writes random outputs that a grammar lets pass, up to the token of the end."""

    def __init__(self, grammar, info=None):
        constraint = Constraint(Shape.LARK, grammar)
        check_grammar(constraint)
        self._compiled = Grammars(info or FakeRunner().info).compile(constraint)

    def write_tokens(self, rng, begin, vocab_size=256, end=0):
        """The tokens of one output, from a beginning on."""
        tokens, matcher = [], self._compiled.matcher()
        for token in begin:
            mask = bytes(matcher.mask(tokens, 0))
            assert mask[token >> 3] >> (token & 7) & 1, (begin, len(tokens))
            tokens.append(token)
        while len(tokens) < 600 and end not in (left := allowed_by(bytes(matcher.mask(tokens, 0)), vocab_size)):
            tokens.append(rng.choice(left))
        return tokens

    def write(self, rng, begin=""):
        return bytes(self.write_tokens(rng, begin.encode())).decode()


def assert_valid(calls):
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "weather":
            assert arguments["city"] in ("Oslo", "Rom\u00e9") and 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("name", FORCED)
def test_whatever_a_forced_output_says_is_calls_that_validate(name):
    rng, form = random.Random(4), BY_NAME[name]
    tools = read_choice("required", SCHEMAS, True)
    for _ in range(20):
        text = Writer(forced_grammar(tools, form, {})).write(rng)
        message = message_of(form, tools, text)
        assert message["content"] is None and message["tool_calls"]
        assert_valid(message["tool_calls"])


@pytest.mark.parametrize("name", [each for each in FORCED if not BY_NAME[each].open_call.startswith("{")])
def test_an_output_is_calls_or_json_of_the_schema(name):
    rng, form = random.Random(6), BY_NAME[name]
    tools = read_choice("auto", SCHEMAS, True)
    schema = {"properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}
    answer = Constraint(Shape.JSON_SCHEMA, json.dumps({"type": "object", **schema}))
    writer = Writer(calls_grammar(Division(tools, form, None), {}, answer))
    begin = form.open_all + form.open_call.replace("NAME", "weather")
    for _ in range(5):
        called = message_of(form, tools, writer.write(rng, begin))
        assert called["content"] is None and called["tool_calls"]
        assert_valid(called["tool_calls"])
        answered = message_of(form, tools, writer.write(rng, '{"age"'))
        assert json.loads(answered["content"]).keys() == {"age"} and not answered.get("tool_calls")


@pytest.mark.parametrize("inside", [False, True])
def test_reasoning_may_stand_before_a_forced_call(inside):
    tools, think = read_choice("required", SCHEMAS, True), REASONING["think"]
    grammar = forced_grammar(tools, DEFAULT, {}, think, begins_inside=inside)
    begin = "" if inside else "<think>"
    text = Writer(grammar).write(random.Random(1), f"{begin}a <tool_call> b</think>\n\n<tool_call>")
    message = ToolMessage(tools, DEFAULT, "r", 0, think, begins_inside=inside).whole(text, STOP)
    assert message["reasoning"] == message["reasoning_content"] == "a <tool_call> b"
    assert message["content"] is None
    assert_valid(message["tool_calls"])


def test_an_output_has_one_form():
    """A call that must come needs an output of no other form; JSON stands after reasoning that the prompt has begun."""
    division = Division(read_choice("required", SCHEMAS, True), DEFAULT, None)
    as_json = calls_grammar(division, {}, Constraint(Shape.JSON_OBJECT))
    assert as_json == calls_grammar(division, {}, None)  # the schema is of an answer, and none comes
    with pytest.raises(InvalidArgument, match="regex"):
        calls_grammar(division, {}, Constraint(Shape.REGEX, "a*"))
    for form, what in ((None, "nobody knows"), (BY_NAME["gemma4"], "cannot be forced")):
        with pytest.raises(InvalidArgument, match=what):
            calls_grammar(Division(division.tools, form, None), {}, None)
    free, odd = read_choice("auto", SCHEMAS, True, ["stop"]), AskedTools({"find": {"required": ["a"]}})
    for tools, form in ((free, "llama3_json"), (odd, "glm")):  # JSON alone binds it: no grammar has both
        assert not calls_grammar(Division(tools, BY_NAME[form], None), {}, Constraint(Shape.JSON_OBJECT))
    assert calls_grammar(Division(free, DEFAULT, None), {}, None) == strict_grammar(free, DEFAULT, {})
    division = Division(None, None, REASONING["think"], begins_inside=True)
    grammar = calls_grammar(division, {}, Constraint(Shape.JSON_SCHEMA, '{"enum": [7]}'))
    text = Writer(grammar).write(random.Random(2), "So {it} is.</think>\n\n")
    message = division.message("r", 0).whole(text, STOP)
    assert (message["reasoning"], message["content"]) == ("So {it} is.", "7")


@pytest.mark.parametrize("name", [each for each in FORCED if BY_NAME[each].binds_strict])
def test_a_strict_tool_keeps_its_schema_among_other_text(name):
    rng, form = random.Random(5), BY_NAME[name]
    tools = read_choice("auto", SCHEMAS, not form.open_all, ["weather"])  # other calls may have arguments without end
    grammar = strict_grammar(tools, form, {})
    before = "" if form.at_start else "Well, [so] <it> is\n"
    assert Writer(grammar).write(rng, before + "No: {name").startswith(before)
    begin, num_calls = form.open_all + form.open_call.replace("NAME", "weather"), 0
    for _ in range(10):
        text = Writer(grammar).write(rng, before + begin)
        message = message_of(form, tools, text)
        assert_valid(message["tool_calls"])
        num_calls += len(message["tool_calls"])
        assert (message["content"] or "") == before.strip()
    assert num_calls >= 10


MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


@pytest.mark.parametrize("grammar_of", [forced_grammar, strict_grammar])
@pytest.mark.parametrize("name", [each for each in FORCED if MARK.search(BY_NAME[each].open_call)])
def test_calls_are_bound_where_their_marks_are_special_tokens(name, grammar_of, tmp_path):
    form = BY_NAME[name]
    marks = dict.fromkeys(MARK.findall(form.open_call + form.close_call))
    backend = tokenizers.Tokenizer(BPE(vocab=byte_alphabet(), merges=[]))
    backend.decoder = ByteLevel()
    backend.add_special_tokens([*(mark for mark in marks if "NAME" not in mark), "<end>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    size = (tokenizer := open_tokenizer(str(tmp_path))).vocab_size
    info = replace(FakeRunner().info, tokenizer=str(tmp_path), vocab_size=size, eos_token_ids=(size - 1,))
    tools, rng = read_choice("required", SCHEMAS, False, SCHEMAS), random.Random(3)
    if not form.binds_strict and grammar_of is strict_grammar:
        return
    writer = Writer(grammar_of(tools, form, tokenizer.special_tokens), info)
    for _ in range(10):
        tokens = writer.write_tokens(rng, [tokenizer.special_tokens[form.begins[0]]], size, size - 1)
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        message = message_of(form, tools, text)
        assert len(message["tool_calls"]) == 1, text
        assert_valid(message["tool_calls"])


IN_PYTHON = [each.name for each in FORMATS if each.in_python]
FIND = {
    "type": "object",
    "properties": {
        "what": {"type": "string", "maxLength": 6},
        "size": {"type": "number"},
        "open": {"type": "boolean"},
        "near": {"type": ["string", "null"], "maxLength": 3},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "required": ["size", "tags"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "object", "properties": {"é": {"type": "boolean"}}, "additionalProperties": False}},
}


def assert_finds(arguments):
    assert {"size", "tags"} <= set(arguments) <= set(FIND["properties"])
    assert isinstance(arguments["size"], (int, float)) and len(arguments["tags"]) <= 2
    assert all(set(tag) <= {"é"} and all(type(each) is bool for each in tag.values()) for tag in arguments["tags"])
    assert isinstance(arguments.get("what", ""), str) and type(arguments.get("open", True)) is bool
    assert isinstance(arguments.get("near"), (str, type(None)))


def refuse(name):
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.scaled
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", IN_PYTHON)
def test_calls_in_python_keep_their_schemas_and_say_the_same_in_any_division(name):
    rng, form = random.Random(name), BY_NAME[name]
    tools = AskedTools({"a.find": FIND}, ("a.find",))
    writer = Writer(forced_grammar(tools, form, {}))
    for _ in range(draws(40, 25_000)):
        text = writer.write(rng)
        whole = message_of(form, tools, text)
        assert whole["content"] is None, text
        for call in whole["tool_calls"]:
            assert_finds(json.loads(call["function"]["arguments"], parse_constant=refuse))
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.choice([0, 1, 5, len(text)])))
        parser = OutputParser(form, tools.schemas)
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
        said = [part.text for part in parts if isinstance(part, CallArguments)]
        assert said == [call["function"]["arguments"] for call in whole["tool_calls"]], text


CITIES = [{"type": "string", "pattern": "x"}, {"anyOf": []}, {"enum": [1]}, {"type": ["string"]}]


@pytest.mark.parametrize(
    ("form", "tool", "schema", "what"),
    [
        ("pythonic", "get-weather", {}, "the name 'get-weather'"),
        ("pythonic", "print.if", {}, "the name 'print.if'"),
        ("pythonic", "find", {"properties": {"class": {}}}, "the argument 'class' of 'find'"),
        ("pythonic", "find", {"properties": {"\ufb01": {}}}, "the argument"),  # Python would read "fi"
        ("pythonic", "find", {"anyOf": [{}]}, "says of anyOf"),
        ("pythonic", "find", {"properties": {"a": False}}, "says of 'a'"),
        ("pythonic", "find", {"required": ["a"]}, "says of its properties"),
        *[
            (form, "find", {"properties": {"city": city}}, "'find' says of city")
            for form in ("qwen3_coder", "glm")
            for city in CITIES
        ],
    ],
)
def test_what_a_format_cannot_say_is_refused_by_name(form, tool, schema, what):
    with pytest.raises(InvalidArgument, match=rf"tool_choice: .*{what}.*cannot be kept"):
        forced_grammar(AskedTools({tool: schema}, (tool,)), BY_NAME[form], {})


def test_an_end_mark_in_a_text_of_python_ends_nothing():
    call = "```tool_code\nfind(what=\"```\", near='it\\'s ```')\n```"
    message = message_of(BY_NAME["gemma"], AskedTools({"find": FIND}), call + " so")
    (found,) = message["tool_calls"]
    assert json.loads(found["function"]["arguments"]) == {"what": "```", "near": "it's ```"}
    assert message["content"] == "so"
    text = "```tool_code\nit's\n``` so"
    assert message_of(BY_NAME["gemma"], AskedTools({}), text)["content"] == text


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
def test_texts_and_values_stand_between_marks(name):
    form, schema = (
        BY_NAME[name],
        {"properties": {"what": {"type": "string"}, "list": {"type": "array"}}, "required": ["what"]},
    )
    tools = AskedTools({"find": schema}, ("find",), is_parallel=False)
    key = form.open_argument.replace("KEY", "what")
    begin, grammar = form.open_call.replace("NAME", "find") + key, forced_grammar(tools, form, {})
    text = Writer(grammar).write(random.Random(3), begin + 'a "<b>\n' + form.close_argument)
    (call,) = message_of(form, tools, text)["tool_calls"]
    found = json.loads(call["function"]["arguments"])
    assert found["what"].startswith('a "<b>') and isinstance(found.get("list", []), list)
    for no_text in (*form.no_text, form.close_argument.strip() + "x"):
        with pytest.raises(AssertionError):
            Writer(grammar).write(random.Random(3), begin + "a " + no_text)


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
    assert whole[0]["id"] != message_of(DEFAULT, tools, text)["tool_calls"][0]["id"]
