"""Outputs of models, divided in any way: the same content, the same reasoning, the same calls."""

import json
import random
import re

import pytest
from effort import draws

from router.tools.formats import BY_NAME, FORMATS
from router.tools.harmony import HarmonyCounter, HarmonyParser
from router.tools.output_parser import OutputParser
from router.tools.parts import CallArguments, CallStart, Content, FunctionCall, Reasoning
from router.tools.reasoning import BY_NAME as REASONING
from router.tools.sections.json_section import JsonShape

SCHEMAS = {"weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
PARIS, ROME = {"city": 'Pa\u00efs </x> "q"', "days": 3}, {"city": "Rome", "days": 1}


def calls(*arguments):
    return [FunctionCall("weather", json.dumps(each, ensure_ascii=False)) for each in arguments]


def js(arguments):
    return json.dumps(arguments, ensure_ascii=False)


def one(arguments, key="arguments"):
    return f'{{"name": "weather", "{key}": {js(arguments)}}}'


PYTHON = ", ".join(f"weather(city={each['city']!r}, days={each['days']})" for each in (PARIS, ROME))
D = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
HEAD = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
WRITTEN = {
    "harmony": f"{HEAD}{js(PARIS)}<|call|><|start|>assistant{HEAD}{js(ROME)}<|call|>",
    "hermes": f"<tool_call>\n{one(PARIS)}\n</tool_call>\n<tool_call>\n{one(ROME)}\n</tool_call>",
    "qwen3_coder": "".join(
        f"<tool_call>\n<function=weather>\n<parameter=city>\n{each['city']}\n</parameter>\n<parameter=days>\n"
        f"{each['days']}\n</parameter>\n</function>\n</tool_call>"
        for each in (PARIS, ROME)
    ),
    "glm": "".join(
        f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{each['city']}</arg_value>\n"
        f"<arg_key>days</arg_key>\n<arg_value>{each['days']}</arg_value>\n</tool_call>"
        for each in (PARIS, ROME)
    ),
    "mistral_args": f"[TOOL_CALLS]weather[ARGS]{js(PARIS)}[TOOL_CALLS]weather[ARGS]{js(ROME)}",
    "mistral": f"[TOOL_CALLS][{one(PARIS)}, {one(ROME)}]",
    "phi4_mini": f"<|tool_call|>[{one(PARIS)},{one(ROME)}]<|/tool_call|>",
    "functools": f"functools[{one(PARIS)}, {one(ROME)}]",
    "granite": f"<|tool_call|>[{one(PARIS)}, {one(ROME)}]",
    "gemma": f"```tool_code\n{PYTHON}\n```",
    "gemma4": "".join(
        f'<|tool_call>call:weather{{city:<|"|>{each["city"]}<|"|>,days:{each["days"]}}}<tool_call|>'
        for each in (PARIS, ROME)
    ),
    "functiongemma": "".join(
        f"<start_function_call>call:weather{{city:<escape>{each['city']}<escape>,days:{each['days']}}}<end_function_call>"
        for each in (PARIS, ROME)
    ),
    "llama3_json": f"{one(PARIS, 'parameters')}; {one(ROME, 'parameters')}",
    "pythonic": f"[{PYTHON}]",
    "deepseek": D.format(
        "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{js(each)}\n```<｜tool▁call▁end｜>"
            for each in (PARIS, ROME)
        )
    ),
    "deepseek_v31": D.format(
        "".join(f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{js(each)}<｜tool▁call▁end｜>" for each in (PARIS, ROME))
    ),
}  # fmt: skip


def joined(parts):
    """Parts, with those of one kind that follow one another as one, and whole calls."""
    found: list[object] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, CallStart):
            found.append(FunctionCall(part.name, ""))
        elif isinstance(part, CallArguments):
            assert isinstance(last, FunctionCall)
            found[-1] = FunctionCall(last.name, last.arguments + part.text)
        elif type(last) is type(part):
            found[-1] = type(part)(last.text + part.text)
        else:
            found.append(part)
    return found


def parsed(name, pieces, *, was_cut=False, thinks="", inside=False):
    if name == "harmony":
        parser = HarmonyParser(has_tools=True)
    else:
        parser = OutputParser(BY_NAME[name], SCHEMAS, REASONING.get(thinks), begins_inside=inside)
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.finish(was_cut=was_cut)
    assert parser.num_calls == sum(isinstance(part, CallStart) for part in parts)
    return joined(parts)


def divided(rng, text):
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.choice([0, 1, 3, 10, len(text)])))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("name", [each.name for each in FORMATS])
def test_each_format_says_the_calls_that_were_written(name):
    assert parsed(name, [WRITTEN[name]]) == calls(PARIS, ROME)


def scraps_of(name):
    """Texts of which outputs are made that are hard to read."""
    tools, written = BY_NAME[name], WRITTEN[name]
    plain = [" ", "\n", "<", "<tool", "[", "{", "}", '"', "\\", ",", "<th", "think>", "text", "é", '{"name"', "'"]
    halves = [written[: len(written) // 2], written[len(written) // 2 :], written[: len(written) // 5]]
    marks = [*tools.begins, tools.end, "<think>", "</think>", '"arguments": {"a": 1}}', "[ARGS]"]
    return [*plain, *halves, written, *marks]


@pytest.mark.scaled
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [each.name for each in FORMATS])
def test_any_division_says_the_same(name):
    rng, scraps = random.Random(name), scraps_of(name)
    for _ in range(draws(400, 25_000)):
        text = "".join(rng.choices(scraps, k=rng.randrange(1, 8)))
        options = {"thinks": rng.choice(["", "think"]), "inside": rng.random() < 0.2, "was_cut": rng.random() < 0.3}
        whole = parsed(name, [text], **options)
        for _ in range(4):
            assert parsed(name, divided(rng, text), **options) == whole, text


@pytest.mark.parametrize("name", [each.name for each in FORMATS if isinstance(each.body, JsonShape)])
def test_arguments_are_sent_as_they_come(name):
    told, sent = [], ""
    parser = HarmonyParser(has_tools=True) if name == "harmony" else OutputParser(BY_NAME[name], SCHEMAS)
    for character in WRITTEN[name]:
        for part in parser.push(character):
            told.append(len(sent)) if isinstance(part, CallStart) else None
            sent += part.text if isinstance(part, CallArguments) else ""
        if "R" in sent:  # of Rome: the second call is under way
            break
    assert told == [0, len(js(PARIS))] and sent == js(PARIS) + '{"city": "R'


def test_a_call_may_be_written_in_other_ways():
    for text in (
        f'<tool_call>{{"arguments": {js(ROME)}, "name": "weather"}}</tool_call>',
        f'<tool_call>{{"name": "weather", "arguments": {js(ROME)}, "id": "}}"}}</tool_call>',
        f'<tool_call>{{"name": "weather", "arguments": {js(js(ROME))}}}</tool_call>',
        f'<tool_call>{{"type": "function", "function": {{"name": "weather", "parameters": {js(ROME)}}}}}</tool_call>',
        f'<tool_call>{{"name": "weather", "arguments": {js(ROME)}</tool_call>',
    ):
        assert parsed("hermes", [text]) == calls(ROME), text


def test_values_of_gemma_are_texts_numbers_lists_and_objects():
    said = '<|tool_call>call:a.b{k:[1,-2.5e3,{x:null,y:<|"|>{,:}<|"|>}],word:celsius,empty:{},none:[]}<tool_call|>'
    arguments = {"k": [1, -2500.0, {"x": None, "y": "{,:}"}], "word": "celsius", "empty": {}, "none": []}
    (call,) = parsed("gemma4", [said])
    assert isinstance(call, FunctionCall) and (call.name, json.loads(call.arguments)) == ("a.b", arguments)
    for broken in ('call:a{k:<|"|>x}', "call:a{k}", "call:a", "call:a{k:}", "call:a{k:1}}"):
        whole = f"<|tool_call>{broken}<tool_call|>"
        assert parsed("gemma4", [whole]) == [Content(whole)], broken


def test_reasoning_stands_before_content_and_calls():
    text = "<think>\nHm.\n</think>\n\nLook:\n" + WRITTEN["hermes"]
    assert parsed("hermes", [text], thinks="think") == [Reasoning("Hm."), Content("Look:"), *calls(PARIS, ROME)]
    assert parsed("hermes", ["Hm.</think>Yes"], thinks="think", inside=True) == [Reasoning("Hm."), Content("Yes")]
    assert parsed("hermes", ["Hm"], thinks="think", inside=True) == [Reasoning("Hm")]


def test_what_is_no_call_stays_content():
    marked = {"city": "</tool_call>"}  # inside of a string it ends nothing
    assert parsed("hermes", [f"<tool_call>{one(marked)}</tool_call>so"]) == [*calls(marked), Content("so")]
    no_calls = "<tool_call>nothing</tool_call> so", "a <tool_call>{", 'see {"name": "weather"} there', "[1] is first"
    for text in no_calls:
        for name in ("hermes", "llama3_json", "pythonic"):
            assert parsed(name, [text]) == [Content(text)], (name, text)


def test_arguments_that_are_read_are_valid_json():
    """What is no JSON makes no call where an object says it, and is a text where it stands between marks."""

    def strict_json(text):
        return json.loads(text, parse_constant=pytest.fail)

    for value, is_json in (("NaN", False), ("-Infinity", False), ("1e999", True), ('"NaN"', True)):
        written = f'<tool_call>{{"arguments": {{"days": {value}}}, "name": "weather"}}</tool_call>'
        (part,) = parsed("hermes", [written])
        assert strict_json(part.arguments) if is_json else part == Content(written)
        keyed = f"weather\n<arg_key>days</arg_key>\n<arg_value>{value}</arg_value>\n"
        (part,) = parsed("glm", [f"<tool_call>{keyed}</tool_call>"])
        assert strict_json(part.arguments)


def test_a_call_that_was_cut_has_the_arguments_that_came():
    text = "<tool_call>" + one(ROME)
    assert parsed("hermes", [text]) == parsed("hermes", [text], was_cut=True) == calls(ROME)
    assert parsed("hermes", [text[:-4]], was_cut=True) == [FunctionCall("weather", js(ROME)[:-3])]
    assert parsed("hermes", ["Hm. ", text, "<tool_call>\n{"], was_cut=True) == [Content("Hm."), *calls(ROME)]
    assert parsed("hermes", [text[:-30]], was_cut=True) == []
    assert parsed("hermes", [text[:-30]]) == [Content(text[:-30])], "the model has ended it so itself"
    assert parsed("glm", ["Hm." + WRITTEN["glm"][:40]], was_cut=True) == [Content("Hm.")]


ANALYSIS = "<|channel|>analysis<|message|>Hm, <|not.<|end|>"


def test_channels_of_harmony_are_reasoning_calls_and_content():
    other, long = f" to=functions.weather<|channel|>commentary json<|message|>{js(ROME)}", "<|channel|>" + "x" * 600
    hm = Reasoning("Hm, <|not.")
    for text, said in (
        (f"{ANALYSIS}<|start|>assistant{HEAD}{js(ROME)}<|call|>", [hm, *calls(ROME)]),
        (f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>Yes", [hm, Content("Yes")]),
        (other, calls(ROME)),
        ("<|channel|>commentary to=functions.weather<|message|>", calls({})),
        ("plain", [Content("plain")]),
        (long, [Content(long)]),
    ):
        assert parsed("harmony", [text]) == said
    assert HarmonyParser(has_tools=False).push(other) == [Content(js(ROME))]


MARKS = re.compile(r"(<[|/]?[a-z]+[|]?>)")


def test_tokens_of_reasoning_are_counted_one_by_one():
    """A token is a mark, or a character."""
    think, final = REASONING["think"], "<|channel|>final<|message|>Yes"
    for counter, text, counted in (
        (HarmonyCounter(), f"{ANALYSIS}<|start|>assistant{final}", len("analysisHm, <|not.") + 3),
        (HarmonyCounter(), final, 0),
        (think.counter(False), " <think>Hm</think>Yes</think>", 5),
        (think.counter(False), "<think>Hm", 3),
        (think.counter(True), "Hm</think>Yes", 3),
        (think.counter(False), "Hm</think>Yes", 0),
        (think.counter(False), "<thi", 0),
    ):
        for token in [each for part in MARKS.split(text) for each in ([part] if MARKS.fullmatch(part) else part)]:
            counter.add([token.encode()])
        assert counter.finish() == counted
