"""Outputs of models, divided in any way: the same content, the same reasoning, the same calls."""

import json
import random

import pytest
from effort import draws

from router.tools.formats import BY_NAME, FORMATS, format_of
from router.tools.output_parser import OutputParser
from router.tools.parts import CallArguments, CallStart, Content, FunctionCall, Part, Reasoning
from router.tools.reasoning import BY_NAME as REASONING
from router.tools.sections.json_section import JsonShape

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
    "mistral_args": f"[TOOL_CALLS]weather[ARGS]{js(PARIS)}[TOOL_CALLS]weather[ARGS]{js(ROME)}",
    "mistral": f"[TOOL_CALLS][{one(PARIS)}, {one(ROME)}]",
    "phi4_mini": f"<|tool_call|>[{one(PARIS)},{one(ROME)}]<|/tool_call|>",
    "granite": f"<|tool_call|>[{one(PARIS)}, {one(ROME)}]",
    "gemma": f"```tool_code\n{PYTHON}\n```",
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


def joined(parts: list[Part]) -> list[object]:
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


def parsed(
    name: str, pieces: list[str], *, was_cut: bool = False, thinks: str = "", inside: bool = False
) -> list[object]:
    parser = OutputParser(BY_NAME[name], SCHEMAS, REASONING.get(thinks), begins_inside=inside)
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.finish(was_cut=was_cut)
    assert parser.num_calls == sum(isinstance(part, CallStart) for part in parts)
    return joined(parts)


def divided(rng: random.Random, text: str) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.choice([0, 1, 3, 10, len(text)])))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("name", [each.name for each in FORMATS])
def test_each_format_says_the_calls_that_were_written(name: str):
    assert parsed(name, [WRITTEN[name]]) == calls(PARIS, ROME)


def scraps_of(name: str) -> list[str]:
    """Texts of which outputs are made that are hard to read."""
    tools, written = BY_NAME[name], WRITTEN[name]
    plain = [" ", "\n", "<", "<tool", "[", "{", "}", '"', "\\", ",", "<th", "think>", "text", "é", '{"name"']
    halves = [written[: len(written) // 2], written[len(written) // 2 :], written[: len(written) // 5]]
    return [
        *plain,
        *halves,
        written,
        *tools.begins,
        tools.end,
        "<think>",
        "</think>",
        '"arguments": {"a": 1}}',
        "[ARGS]",
    ]


@pytest.mark.scaled
@pytest.mark.parametrize("name", [each.name for each in FORMATS])
def test_any_division_says_the_same(name: str):
    rng, scraps = random.Random(name), scraps_of(name)
    for _ in range(draws(400, 25_000)):
        text = "".join(rng.choices(scraps, k=rng.randrange(1, 8)))
        options = {"thinks": rng.choice(["", "think"]), "inside": rng.random() < 0.2, "was_cut": rng.random() < 0.3}
        whole = parsed(name, [text], **options)
        for _ in range(4):
            assert parsed(name, divided(rng, text), **options) == whole, text


@pytest.mark.parametrize("name", [each.name for each in FORMATS if isinstance(each.body, JsonShape)])
def test_arguments_are_sent_as_they_come(name: str):
    parser, told, sent = OutputParser(BY_NAME[name], SCHEMAS), [], ""
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
    assert parsed("mistral", [f"[TOOL_CALLS]weather[ARGS]{js(PARIS)}[TOOL_CALLS]weather[ARGS]{js(ROME)}"]) == calls(
        PARIS, ROME
    )
    fenced = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{js(ROME)}\n```<｜tool▁call▁end｜>"
    assert parsed("deepseek", [D.format(fenced)]) == calls(ROME)


def test_a_mark_inside_of_a_string_ends_nothing():
    arguments = {"city": "</tool_call>"}
    assert parsed("hermes", [f"<tool_call>{one(arguments)}</tool_call>so"]) == [*calls(arguments), Content("so")]


def test_reasoning_stands_before_content_and_calls():
    text = "<think>\nHm.\n</think>\n\nLook:\n" + WRITTEN["hermes"]
    assert parsed("hermes", [text], thinks="think") == [Reasoning("Hm."), Content("Look:"), *calls(PARIS, ROME)]
    assert parsed("hermes", ["Hm.</think>Yes"], thinks="think", inside=True) == [Reasoning("Hm."), Content("Yes")]
    assert parsed("hermes", ["Hm"], thinks="think", inside=True) == [Reasoning("Hm")]


def test_what_is_no_call_stays_content():
    for text in (
        "<tool_call>nothing</tool_call> so",
        "a <tool_call>{",
        'see {"name": "weather"} there',
        "[1] is first",
    ):
        for name in ("hermes", "llama3_json", "pythonic"):
            assert parsed(name, [text]) == [Content(text)], (name, text)


def test_a_call_that_was_cut_has_the_arguments_that_came():
    text = "<tool_call>" + one(ROME)
    assert parsed("hermes", [text]) == parsed("hermes", [text], was_cut=True) == calls(ROME)
    assert parsed("hermes", [text[:-4]], was_cut=True) == [FunctionCall("weather", js(ROME)[:-3])]
    assert parsed("hermes", [text[:-30]], was_cut=True) == [Content(text[:-30])]
    half = WRITTEN["glm"][:40]
    assert parsed("glm", [half], was_cut=True) == [Content(half)]


def test_templates_say_their_formats():
    assert format_of("{{ '<tool_call>' }} <function= ").name == "qwen3_coder"
    assert format_of("{% if tools %}<tool_call>{% endif %}").name == "hermes"
    assert format_of("{{ messages }}") is None
