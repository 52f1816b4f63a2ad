"""Outputs of models, divided in any way: the same content, the same reasoning, the same calls."""

import json
import random

import pytest

from router.tools.formats import BY_NAME, FORMATS, format_of
from router.tools.output_parser import OutputParser
from router.tools.parts import Content, FunctionCall, Part, Reasoning

SCHEMAS = {"weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
PARIS, ROME = {"city": 'Pa\u00efs </x> "q"', "days": 3}, {"city": "Rome", "days": 1}


def calls(*arguments: object) -> list[FunctionCall]:
    return [FunctionCall("weather", json.dumps(each, ensure_ascii=False)) for each in arguments]


def js(arguments: object) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def one(arguments: object, key: str = "arguments") -> str:
    return f'{{"name": "weather", "{key}": {js(arguments)}}}'


PYTHON = ", ".join(f"weather(city={each['city']!r}, days={each['days']})" for each in (PARIS, ROME))
D = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
WRITTEN = {
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
    "mistral": f"[TOOL_CALLS][{one(PARIS)}, {one(ROME)}]",
    "phi4_mini": f"<|tool_call|>[{one(PARIS)},{one(ROME)}]<|/tool_call|>",
    "granite": f"<|tool_call|>[{one(PARIS)}, {one(ROME)}]",
    "gemma": f"```tool_code\n{PYTHON}\n```",
    "llama3_json": f"{one(PARIS, 'parameters')}; {one(ROME, 'parameters')}",
    "pythonic": f"[{PYTHON}]",
    "deepseek": D.format(
        "".join(f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{js(each)}<｜tool▁call▁end｜>" for each in (PARIS, ROME))
    ),
}  # fmt: skip


def joined(parts: list[Part]) -> list[Part]:
    """Parts, with those of one kind that follow one another as one."""
    found: list[Part] = []
    for part in parts:
        if found and not isinstance(part, FunctionCall) and type(found[-1]) is type(part):
            found[-1] = type(part)(found[-1].text + part.text)
        else:
            found.append(part)
    return found


def parsed(name: str, pieces: list[str], *, was_cut: bool = False, **options: bool) -> list[Part]:
    parser = OutputParser(BY_NAME[name], SCHEMAS, **options)
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.finish(was_cut=was_cut)
    assert parser.num_calls == sum(isinstance(part, FunctionCall) for part in parts)
    return joined(parts)


def divided(rng: random.Random, text: str) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.choice([0, 1, 3, 10, len(text)])))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("name", [each.name for each in FORMATS])
def test_each_format_says_the_calls_that_were_written(name: str):
    assert parsed(name, [WRITTEN[name]]) == calls(PARIS, ROME)


@pytest.mark.parametrize("name", [each.name for each in FORMATS])
def test_any_division_says_the_same(name: str):
    rng, tools = random.Random(name), BY_NAME[name]
    scraps = [
        " ",
        "\n",
        "<",
        "<tool",
        "[",
        "{",
        "<th",
        "think>",
        "text",
        "é",
        '{"name"',
        WRITTEN[name],
        tools.begins[0],
    ]
    scraps += [tools.begins[0], tools.end, "<think>", "</think>", WRITTEN[name][: len(WRITTEN[name]) // 2]]
    for _ in range(300):
        text = "".join(rng.choices(scraps, k=rng.randrange(1, 8)))
        options = {
            "has_reasoning": rng.random() < 0.5,
            "begins_inside": rng.random() < 0.2,
            "was_cut": rng.random() < 0.3,
        }
        whole = parsed(name, [text], **options)
        for _ in range(4):
            assert parsed(name, divided(rng, text), **options) == whole, text


def test_reasoning_stands_before_content_and_calls():
    text = "<think>\nHm.\n</think>\n\nLook:\n" + WRITTEN["hermes"]
    assert parsed("hermes", [text], has_reasoning=True) == [Reasoning("Hm."), Content("Look:"), *calls(PARIS, ROME)]
    assert parsed("hermes", ["Hm.</think>Yes"], begins_inside=True) == [Reasoning("Hm."), Content("Yes")]
    assert parsed("hermes", ["Hm"], begins_inside=True) == [Reasoning("Hm")]


def test_what_is_no_call_stays_content():
    for text in (
        "<tool_call>nothing</tool_call> so",
        "a <tool_call>{",
        'see {"name": "weather"} there',
        "[1] is first",
    ):
        for name in ("hermes", "llama3_json", "pythonic"):
            assert parsed(name, [text]) == [Content(text)], (name, text)


def test_an_output_that_was_cut_inside_a_call_is_content_and_one_that_ended_is_a_call():
    text = "<tool_call>" + one(ROME)
    assert parsed("hermes", [text], was_cut=True) == [Content(text)]
    assert parsed("hermes", [text]) == calls(ROME)


def test_templates_say_their_formats():
    assert format_of("{{ '<tool_call>' }} <function= ").name == "qwen3_coder"
    assert format_of("{% if tools %}<tool_call>{% endif %}").name == "hermes"
    assert format_of("{{ messages }}") is None
